"""Asks a server for completions, and for the rest of those that were ended there because other adapters took over."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix
from flotilla.services.rollout.engines.requests import check_request, unstarted_completion
from flotilla.services.rollout.engines.servers.adapters import ServedAdapters
from flotilla.services.rollout.engines.servers.client import Refused
from flotilla.services.rollout.engines.servers.completions import completion_of, new_request_id
from flotilla.services.rollout.engines.servers.connection import Connection
from flotilla.services.rollout.engines.servers.dialect import (
    Body,
    Dialect,
    ShownImages,
    VersionLabels,
    VersionLost,
)
from flotilla.services.rollout.engines.servers.gate import UpdateGate
from flotilla.services.rollout.engines.servers.in_flight import Active, InFlight, what_it_has
from flotilla.services.rollout.engines.servers.model import ServedModel
from flotilla.shared.errors import FlotillaError, InvalidRequest, RequestInFlight, Unavailable, WorkerDied
from flotilla.shared.schemas.trajectory import FinishReason


class Sampler:
    """Samples what one engine is asked for.

    Args:
        dialect: what kind of server it asks.
        gate: that requests go through.
        labels: of the versions.
        serving: returns the version that serves now.
        adapters: that the server samples with; None: it has whole weights.

    Attributes:
        active: what is asked for now.
        generated_tokens: of completions that have ended.
        prefilled_tokens: of their prompts, and of what they continued with.
    """

    def __init__(
        self,
        dialect: Dialect,
        gate: UpdateGate,
        labels: VersionLabels,
        serving: Callable[[], int],
        adapters: ServedAdapters | None,
    ) -> None:
        self._dialect, self._gate, self._labels = dialect, gate, labels
        self._serving, self._adapters = serving, adapters
        self.active = InFlight()
        self.generated_tokens = 0
        self.prefilled_tokens = 0

    async def generate(
        self, request: GenerationRequest, connection: Connection, model: ServedModel, context_tokens: int
    ) -> list[Completion]:
        """Sample one completion per seed; see ``Engine.generate``.

        Args:
            request: what is asked of the engine.
            connection: to its server.
            model: that the server runs.
            context_tokens: prompt and completion together.
        """
        check_request(request, context_tokens, model.vocab_size)
        if request.request_id in self.active:
            raise RequestInFlight(f"request {request.request_id} is in flight already")
        active = Active(request, [new_request_id() for _ in request.seeds])
        self.active[request.request_id] = active
        try:
            return await self._sampled(active, connection, model)
        finally:
            del self.active[request.request_id]

    async def abort(self, connection: Connection, each: str) -> None:
        """Ask the server to end a completion by its id there; one that is lost is sent again, or needs no more."""
        with suppress(FlotillaError):
            await self._dialect.abort(connection, each)

    async def interrupt(self, connection: Connection) -> None:
        """End all completions at the server, whose rest is sampled once the gate is open.

        Raises:
            The server's death, if it dies meanwhile.
        """
        await self.active.interrupt(partial(self.abort, connection), is_over=lambda: connection.death is not None)
        connection.check()

    async def _sampled(self, active: Active, connection: Connection, model: ServedModel) -> list[Completion]:
        request, gives_up = active.request, partial(_has_no_use, active, connection)
        async with self._gate.inside(holds_weights=request.holds_weights, gives_up=gives_up) as is_inside:
            if not is_inside:
                connection.check()
                return [unstarted_completion(request, index) for index in range(len(request.seeds))]
            try:
                async with asyncio.TaskGroup() as calls:
                    work = [self._sample(active, index, connection, model) for index in range(len(active.ids))]
                    active.calls = [calls.create_task(each) for each in work]
            except BaseExceptionGroup as errors:
                # One cause is enough to tell: the others are the same, or its consequences.
                raise errors.exceptions[0] from None
            if any(call.cancelled() for call in active.calls):
                connection.check()
            return [call.result() for call in active.calls]

    async def _sample(self, active: Active, index: int, connection: Connection, model: ServedModel) -> Completion:
        """Sample a completion; where other adapters take over meanwhile, the rest of it with those."""
        request = active.request
        num_resumed: int | None = None
        made = unstarted_completion(request, index)
        prefix = request.prefixes[index] if request.prefixes else None
        if prefix is not None and not (
            request.resume.allows(prefix.versions, self._serving()) and self._is_sendable(prefix, request, model)
        ):
            prefix = None
        while await self._may_ask(active, connection):
            before = self.active.num_interruptions
            made = await self._ask(active, index, prefix, connection, model)
            is_interrupted = before != self.active.num_interruptions and not active.is_aborted
            if made.finish_reason is not FinishReason.ABORTED or not is_interrupted:
                break
            if made.token_ids.size >= request.sampling.max_new_tokens:
                made = replace(made, finish_reason=FinishReason.LENGTH)
                break
            if made.token_ids.size > made.num_resumed:
                num_resumed = made.num_resumed if num_resumed is None else num_resumed
                prefix = what_it_has(made)
            active.ids[index] = new_request_id()
        return made if num_resumed is None else replace(made, num_resumed=num_resumed)

    def _is_sendable(self, prefix: Prefix, request: GenerationRequest, model: ServedModel) -> bool:
        """Whether what was kept can be sent behind images: a server may take a sampled token of theirs for one more."""
        if self._dialect.places_images or not request.images or model.processor is None:
            return True
        return not {model.processor.token_id, *model.processor.marks} & set(prefix.token_ids)

    async def _may_ask(self, active: Active, connection: Connection) -> bool:
        """Wait while adapters change: what is sent then would have those before, under the label of the next."""
        if self._adapters is None:
            return True
        await self._gate.until_open(partial(_has_no_use, active, connection))
        connection.check()
        return not active.is_aborted

    async def _ask(
        self, active: Active, index: int, prefix: Prefix | None, connection: Connection, model: ServedModel
    ) -> Completion:
        request, adapters = active.request, self._adapters
        body = await self._body(active, index, prefix, model)
        asked, name = (body, None) if adapters is None else (adapters.asked_with(body), adapters.serving)
        try:
            with self.active.asking(active, index):
                reply = await connection.generate(asked)
            if adapters is not None and name is not None and (other := adapters.host.sampled_with(reply)) != name:
                raise ValueError(f"it sampled with {other!r} what was asked of {name!r}")
            read = partial(completion_of, self._dialect.sampled, vocab_size=model.vocab_size, routers=model.routers)
            # The experts of long answers take longer than health and leases may wait for the loop.
            completion = await asyncio.to_thread(read, reply, request, index, prefix, self._labels.version)
        except Refused as error:
            raise (InvalidRequest if error.answered == 400 else Unavailable)(error.detail) from error
        except VersionLost as error:
            connection.has_lost(error)
            raise connection.death or error from error
        except ValueError as error:
            connection.die(WorkerDied(f"the {self._dialect.name} server's reply cannot be used: {error}"))
            raise connection.death or error from error
        except asyncio.CancelledError:
            if connection.death is None:
                connection.spawn(self.abort(connection, active.ids[index]), "server abort")
            raise
        self.generated_tokens += completion.token_ids.size - completion.num_resumed
        self.prefilled_tokens += len(request.prompt_ids) + completion.num_resumed
        return completion

    async def _body(self, active: Active, index: int, prefix: Prefix | None, model: ServedModel) -> Body:
        request = active.request
        if not request.images:
            return self._dialect.body(request, index, prefix, active.ids[index], self._serving())
        processor = await asyncio.to_thread(model.processor_for, request.images)
        serving = self._serving()
        body = self._dialect.body(request, index, prefix, active.ids[index], serving)
        return await asyncio.to_thread(self._dialect.with_images, body, ShownImages(request.images, processor, serving))


def _has_no_use(active: Active, connection: Connection) -> bool:
    """Whether a request need not be sent any more."""
    return active.is_aborted or connection.death is not None
