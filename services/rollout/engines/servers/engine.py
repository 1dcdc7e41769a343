"""An engine whose work a server does: one of its own, or one that runs already.

The server samples and batches; this side orders requests and weight updates, and checks images before the server sees
them. A server whose weights are unknown after a failure is abandoned: the engine dies, and the next one starts from
the initial weights.
"""

import asyncio
import shutil
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest, WeightTransfer
from flotilla.services.rollout.engines.servers.adapters import ServedAdapters
from flotilla.services.rollout.engines.servers.attaching import UNREADABLE, check_served, failed_start
from flotilla.services.rollout.engines.servers.connection import NO_ANSWER, Connection
from flotilla.services.rollout.engines.servers.dialect import Dialect, Known, Sleeper, VersionLabels
from flotilla.services.rollout.engines.servers.gate import UpdateGate
from flotilla.services.rollout.engines.servers.in_flight import ABORT_SECONDS
from flotilla.services.rollout.engines.servers.model import ServedModel, make_place, read_served_model, stage_directory
from flotilla.services.rollout.engines.servers.proof import ServerProof
from flotilla.services.rollout.engines.servers.sampling import Sampler
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.concurrency.cancelling import to_the_end
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import (
    DeadlineExceeded,
    FlotillaError,
    InvalidRequest,
    Unavailable,
    WeightTransferFailed,
    WorkerDied,
)
from flotilla.shared.schemas.engine import EngineCapability

SWITCH_POLL_SECONDS = 0.01


class WholeTransfer:
    """A ``WeightTransfer`` of which nothing is read ahead: the server reads images whole, when they are to serve."""

    def advance(self, bytes_arrived: int) -> None:
        """See ``WeightTransfer.advance``."""

    def complete(self) -> None:
        """See ``WeightTransfer.complete``."""

    def abort(self, reason: str) -> None:
        """See ``WeightTransfer.abort``."""


class ServerEngine:
    """An ``Engine`` whose work a server does.

    It is started once; after the server's death or a ``close``, make another.

    Args:
        settings: how the server runs, or where.
        dialect: what kind of server it is.
        transport: another one than sockets, for tests.
    """

    def __init__(
        self, settings: ServerSettings, dialect: Dialect, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._settings = settings
        self._dialect = dialect
        self._transport = transport
        self._place = make_place()
        self._gate = UpdateGate()
        self._labels = VersionLabels()
        self._connection: Connection | None = None
        self._model: ServedModel | None = None
        self._context_tokens = settings.context_tokens
        self._version = settings.version
        self._staged: Path | None = None
        """The directory that was loaded last; servers continue naming it as their model's."""
        prover = dialect.prover
        can_ask = prover is not None and settings.device == "cpu" and (prover.asks_others or settings.url is None)
        self._proof = ServerProof(prover, settings.dtype, settings.load_seconds) if prover and can_ask else None
        host = dialect.adapters if settings.adapters is not None else None
        self._adapters = ServedAdapters(host, settings, self._place) if host is not None else None
        self._sampler = Sampler(dialect, self._gate, self._labels, lambda: self._version, self._adapters)
        self._is_closing = False
        self._is_asleep = self._is_falling_asleep = False
        self._num_sleeps = 0

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What this kind of server promises; see ``Engine.capabilities``."""
        return self._dialect.capabilities

    @property
    def process_id(self) -> int | None:
        """Of the server that is ours, while it runs."""
        server = self._connection.server if self._connection is not None else None
        return server.process_id if server is not None else None

    async def start(self) -> None:
        """Start the server, or find it; see ``Engine.start``.

        Raises:
            ModelError: the directory is no model, or the server at ``url`` is for another one, or no such server.
            InvalidSpec: the server refuses its arguments.
            WorkerDied: the server ended while it loaded, or did not load within ``start_seconds``.
            Unavailable: the one at ``url`` cannot be reached now, or is not ready.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(settings.start_seconds):
                self._model = await asyncio.to_thread(
                    read_served_model,
                    settings.model_path,
                    records_experts=settings.records_experts,
                    images=settings.images,
                )
                self._context_tokens = min(
                    settings.context_tokens, self._model.max_positions or settings.context_tokens
                )
                self._connection = Connection(
                    settings,
                    self._dialect,
                    self._place,
                    self._context_tokens,
                    self._labels.of(settings.version),
                    on_death=self._on_death,
                    serving=self._serving,
                    transport=self._transport,
                )
                # Until it has its first weights it is not asked for its health, nor for their label.
                async with self._gate.updating(OnWeightUpdate.DRAIN), self._gate.switching():
                    await self._connection.start()
                    await self._prepare(self._connection, self._model)
        except BaseException as error:
            last_lines = self._connection.last_lines if self._connection is not None else ""
            await self._free()
            if (cause := failed_start(error, settings, self._dialect.name, last_lines)) is not None:
                raise cause from error
            raise

    async def close(self) -> None:
        """Abort what is in flight and end the server if it is ours; see ``Engine.close``."""
        if self._is_closing:
            return
        self._is_closing = True
        with suppress(TimeoutError, FlotillaError):
            async with asyncio.timeout(self._settings.close_seconds):
                await asyncio.gather(*(self.abort(request_id) for request_id in list(self._sampler.active)))
                await self._gate.until_empty()
        await self._free()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample one completion per seed, without regard to the seeds' values; see ``Engine.generate``."""
        connection, model = self._running()
        if self._is_asleep or self._is_falling_asleep:
            raise Unavailable("the engine is asleep")
        return await self._sampler.generate(request, connection, model, self._context_tokens)

    async def abort(self, request_id: str) -> None:
        """End a request now, unless weights are being loaded: then once they are. See ``Engine.abort``."""
        connection, _ = self._running()
        active = self._sampler.active.get(request_id)
        if active is None:
            return
        active.is_aborted = True
        await self._gate.look()
        while any(not call.done() for call in active.calls) and connection.death is None:
            if self._gate.is_switching:
                # SGLang would not hear it, nor another one after it.
                await asyncio.sleep(SWITCH_POLL_SECONDS)
                continue
            pairs = zip(active.ids, active.calls, strict=True)
            await asyncio.gather(*(self._sampler.abort(connection, each) for each, call in pairs if not call.done()))
            await asyncio.wait(active.calls, timeout=ABORT_SECONDS)

    def begin_transfer(self, image: Path, version: int) -> WeightTransfer:
        """Announce an image; nothing is read of it until it is loaded. See ``Engine.begin_transfer``."""
        self._running()
        return WholeTransfer()

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        """Have the server load an image that fits its model; see ``Engine.load_weights``.

        Without ``EXACT_SPANS`` the server may count the token that was under way to the new version under ``continue``.
        """
        await self._load(image, version, on_update, None)

    async def load_proved(self, image: Path, version: int, on_update: OnWeightUpdate, digest: str) -> bool:
        """Have the server load an image, and prove what it has in memory; see ``ProvesWeights.load_proved``.

        It is held against the image: the digest is of no use to a server, which hashes in its own way. One that has
        something else is abandoned, so that the next one begins again.
        """
        connection, _ = self._running()
        proof, settings = self._proof, self._settings
        if proof is not None and not self._is_asleep and self._version == settings.version:
            await proof.learn(connection, settings.model_path)
        can_tell = proof is not None and (proof.can_tell if self._adapters is None else proof.can_tell_adapters)
        await self._load(image, version, on_update, proof if can_tell else None)
        return can_tell

    async def _load(self, image: Path, version: int, on_update: OnWeightUpdate, proof: ServerProof | None) -> None:
        connection, model = self._running()
        if self._adapters is not None:
            await self._load_adapters(self._adapters, image, version, on_update, proof)
            return
        num_sleeps = self._num_sleeps
        async with self._gate.updating(on_update):
            await asyncio.to_thread(model.check_fits, image)
            source = await asyncio.to_thread(stage_directory, self._place, self._settings.model_path, image)
            before, self._staged = self._staged, source
            if before is not None:
                await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
            async with self._gate.switching():
                if num_sleeps != self._num_sleeps:
                    raise Unavailable("the engine was put to sleep")
                await self._to_the_end(connection, self._switch(connection, source, version, on_update, proof))

    async def _load_adapters(
        self, adapters: ServedAdapters, image: Path, version: int, on_update: OnWeightUpdate, proof: ServerProof | None
    ) -> None:
        """Have the server load adapters while it samples, then have all that it samples continue with them."""
        connection, model = self._running()
        if on_update is OnWeightUpdate.CONTINUE:
            raise WeightTransferFailed(
                "a sample at a server keeps the adapters that it began with: set asynchrony.on_weight_update to "
                "interrupt or drain, or asynchrony.publication.lora to merged"
            )
        async with self._gate.updating(on_update):
            try:
                name = await adapters.stage(model.shapes, image, self._labels.of(version))
                await self._to_the_end(connection, self._load_beside(connection, adapters, name, version, proof))
                async with self._gate.switching():
                    await self._to_the_end(connection, self._change_adapters(connection, adapters, name, version))
            finally:
                if connection.death is None:
                    await self._to_the_end(connection, adapters.forget_others(connection))

    async def _load_beside(
        self, connection: Connection, adapters: ServedAdapters, name: str, version: int, proof: ServerProof | None
    ) -> None:
        with connection.loading(version, goes_on_after=WeightTransferFailed):
            await adapters.load(connection, name)
            if proof is not None:
                await proof.check_adapters(connection, adapters, name, version)

    async def _change_adapters(self, connection: Connection, adapters: ServedAdapters, name: str, version: int) -> None:
        """End what is at the server, all under the version before; what was not at its end continues under this one."""
        connection.check()
        with connection.loading(version):
            await self._interrupt(connection)
            await adapters.host.relabel(connection, self._labels.of(version))
        adapters.serving, self._version = name, version

    async def _interrupt(self, connection: Connection) -> None:
        seconds = self._settings.load_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._sampler.interrupt(connection)
        except TimeoutError:
            late = f"what it sampled did not end within {seconds:g} s (rollout.engine.load_seconds)"
            raise DeadlineExceeded(late) from None

    async def sleep(self) -> None:
        """Have the server free its memory; see ``Engine.sleep``.

        Raises:
            InvalidRequest: this kind of server does not promise ``SLEEP``.
            WorkerDied: it did not free it, and is abandoned.
        """
        connection, _ = self._running()
        sleeper = self._dialect.sleeper
        if sleeper is None:
            raise InvalidRequest(f"a {self._dialect.name} server does not lend its memory")
        if self._is_asleep:
            return
        self._is_falling_asleep = True
        self._num_sleeps += 1
        try:
            async with asyncio.timeout(self._settings.load_seconds) as until_empty:
                await asyncio.gather(*(self.abort(request_id) for request_id in list(self._sampler.active)))
                async with self._gate.updating(OnWeightUpdate.DRAIN), self._gate.switching():
                    until_empty.reschedule(None)
                    await self._to_the_end(connection, self._fall_asleep(connection, sleeper))
        except TimeoutError:
            late = f"its requests did not end within {self._settings.load_seconds:g} s (rollout.engine.load_seconds)"
            connection.die(WorkerDied(f"the {self._dialect.name} server did not go to sleep: {late}"))
            raise connection.death or Unavailable(late) from None
        finally:
            self._is_falling_asleep = False

    async def wake(self) -> None:
        """Have the server read the model's directory again; see ``Engine.wake``."""
        connection, _ = self._running()
        if not (self._is_asleep or self._gate.is_held):
            return
        source, version = self._settings.model_path, self._settings.version
        async with self._gate.updating(OnWeightUpdate.DRAIN), self._gate.switching():
            await self._to_the_end(connection, self._switch(connection, source, version, OnWeightUpdate.DRAIN))

    async def load(self) -> EngineLoad:
        """Take a snapshot of the load; what runs, and its tokens, as the server last said. See ``Engine.load``."""
        connection, _ = self._running()
        is_asked = self._dialect.asks_when_idle and not (self._gate.is_switching or self._is_asleep)
        asks = not self._gate.is_held and (self._sampler.active or is_asked)
        running, unfinished = await self._at_server(connection) if asks else (0, 0)
        num_open = sum(active.num_open for active in self._sampler.active.values())
        running = min(running, num_open)
        return EngineLoad(
            version=self._version,
            running=running,
            waiting=num_open - running,
            slots=self._settings.slots,
            generated_tokens=self._sampler.generated_tokens + unfinished,
            prefilled_tokens=self._sampler.prefilled_tokens,
        )

    async def _prepare(self, connection: Connection, model: ServedModel) -> None:
        """Check a server that runs already, and have it begin with the initial weights."""
        settings, is_found = self._settings, self._settings.url is not None
        if is_found:
            await check_served(self._dialect, connection, settings, model, self._context_tokens)
        await self._dialect.greet(connection, self._labels.of(settings.version))
        if is_found:
            # Another client may have left other weights there.
            await self._switch(connection, settings.model_path, settings.version, OnWeightUpdate.DRAIN)

    async def _to_the_end(self, connection: Connection, work: Coroutine[None, None, None]) -> None:
        """Await a change of the server, also when cancelled: a half-made change cannot be undone."""
        await to_the_end(connection.spawn(work, "change of the server"))

    async def _switch(
        self,
        connection: Connection,
        source: Path,
        version: int,
        mode: OnWeightUpdate,
        proof: ServerProof | None = None,
    ) -> None:
        """Pause or wake, load, continue. After a failure between the weights are unknown: the server is abandoned."""
        connection.check()
        seconds, sleeper, label = self._settings.load_seconds, self._dialect.sleeper, self._labels.of(version)

        async def check() -> None:
            if proof is not None:
                await proof.check(connection, source, version)

        with connection.loading(version):
            if self._is_asleep and sleeper is not None:
                await sleeper.wake(connection, source, label, load_seconds=seconds)
                # It may sample, but is not asked to until this is over.
                await check()
            else:
                await self._dialect.switch(connection, source, label, mode, load_seconds=seconds, check=check)
        self._version, self._is_asleep = version, False

    async def _fall_asleep(self, connection: Connection, sleeper: Sleeper) -> None:
        """Free the memory. After a failure it is unknown how much: the server is abandoned to free it all."""
        connection.check()
        try:
            await sleeper.sleep(connection, seconds=self._settings.load_seconds)
        except FlotillaError as error:
            connection.die(WorkerDied(f"the {self._dialect.name} server did not go to sleep: {error.detail}"))
            raise connection.death or error from error
        self._is_asleep = True

    async def _at_server(self, connection: Connection) -> tuple[int, int]:
        """Ask how many completions run, and how many tokens they have."""
        prompts = sum(len(active.request.prompt_ids) for active in self._sampler.active.values())
        with suppress(*NO_ANSWER, Unavailable, *UNREADABLE):
            return await self._dialect.load(connection, Known(prompts, self._sampler.generated_tokens))
        return 0, 0

    def _serving(self) -> str | None:
        """Return the label of what it samples with; None while it is paused, or has not started."""
        return None if self._gate.is_switching or self._is_asleep else self._labels.of(self._version)

    def _on_death(self) -> None:
        """Wake all waiters for the server."""
        for active in self._sampler.active.values():
            for call in active.calls:
                call.cancel()
        if self._connection is not None:
            self._connection.spawn(self._gate.look(), "waiting requests")

    async def _free(self) -> None:
        if self._connection is not None:
            if self._connection.death is None:
                self._connection.death = WorkerDied("the engine was closed")
                self._on_death()
            await self._connection.close()
        await asyncio.to_thread(shutil.rmtree, self._place, ignore_errors=True)

    def _running(self) -> tuple[Connection, ServedModel]:
        if self._connection is None or self._model is None:
            raise WorkerDied("the engine does not run")
        self._connection.check()
        return self._connection, self._model
