"""One experiment's part of an engine whose batch holds samples of several: an adapter on a base that all have.

Its versions are its adapter's, and nothing that it asks for stops what the others sample. Where the experiment turns
out to need weights of its own, it raises ``CannotShare``: the caller then makes an engine for it alone.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from flotilla.services.rollout.engines.base import AddsAdapters, Completion, Engine, EngineLoad, GenerationRequest
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.errors import FlotillaError, InvalidRequest, ModelError, WeightTransferFailed, WorkerDied
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.weights.image.adapters import AdaptersHeader
from flotilla.shared.weights.image.layout import read_layout

_NUMBERS = itertools.count(1)


class Adapting(Engine, AddsAdapters, Protocol):
    """The engine's process that experiments share; see ``ProcessEngine``."""

    @property
    def process_id(self) -> int | None:
        """Of its process, while that runs."""

    def hide_last_words(self) -> None:
        """Omit the last log lines when the process ends: they may be of another experiment."""

    async def load(self, adapter: str | None = None) -> EngineLoad:
        """Take a snapshot of the load, or of the part of it that one adapter's requests make."""


class CannotShare(Exception):
    """The experiment needs an engine of its own."""


class Base:
    """An engine's process, and its users.

    Args:
        settings: that it is started with.
        engine: not yet started.
    """

    def __init__(self, settings: EngineSettings, engine: Adapting) -> None:
        self.settings, self.engine = settings, engine
        self.users: set[SharedEngine] = set()
        self._starting: asyncio.Task[EngineLoad] | None = None

    @property
    def is_over(self) -> bool:
        """Whether its process was started, and does not run."""
        starting = self._starting
        return starting is not None and starting.done() and self.engine.process_id is None

    async def started(self) -> EngineLoad:
        """Wait until the process has the base. Errors as of ``Engine.start``; all who wait get the same."""
        if self._starting is None:
            # What it writes is not of the experiment that came first.
            self._starting = asyncio.create_task(self._start(), name="shared engine", context=Context())
        # A cancelled waiter does not end it for the others.
        return await asyncio.shield(self._starting)

    async def _start(self) -> EngineLoad:
        await self.engine.start()
        return await self.engine.load()

    async def close(self) -> None:
        """End the process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self.engine.close()


class Bases(Protocol):
    """Where an experiment's engine finds its base; see ``SharedEngines``."""

    def join(self, user: "SharedEngine") -> Base:
        """Give the process that runs with the settings of a user, or a new one."""

    async def leave(self, user: "SharedEngine", base: Base) -> None:
        """Take a user away; without one the process ends."""

    def cannot_share(self, user: "SharedEngine", why: str) -> None:
        """Let its experiment have an engine of its own from the next start on."""


class _NoTransfer:
    """An image of adapters is small: it is read when it is to serve."""

    def advance(self, bytes_arrived: int) -> None:
        """See ``WeightTransfer.advance``."""

    def complete(self) -> None:
        """See ``WeightTransfer.complete``."""

    def abort(self, reason: str) -> None:
        """See ``WeightTransfer.abort``."""


class SharedEngine:
    """An ``Engine`` of one experiment in a process that others use, too.

    Args:
        experiment_id: of the experiment.
        settings: of the process, the same for all that share it.
        bases: where the process is found.
    """

    capabilities = TorchEngineConfig.CAPABILITIES - {EngineCapability.SLEEP}

    def __init__(self, experiment_id: str, settings: EngineSettings, bases: Bases) -> None:
        self.experiment_id, self.settings = experiment_id, settings
        self._bases = bases
        self._base: Base | None = None
        self._name = f"{experiment_id} {next(_NUMBERS)}"
        self._in_flight: set[str] = set()
        self._has_adapter = False

    async def start(self) -> None:
        """Wait for the process with the base, and begin with an adapter that adds nothing; see ``Engine.start``.

        Raises:
            CannotShare: the engine computes no adapters of single samples with this model, or on this host.
        """
        self._base = self._bases.join(self)
        try:
            if not (await self._base.started()).takes_adapters:
                raise CannotShare("the engine adds no adapters to single samples of this model here")
            if len(self._base.users) > 1:
                self._base.engine.hide_last_words()
            await self.wake()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Abort what is in flight, and forget the adapter; the last one ends the process. See ``Engine.close``."""
        base, self._base = self._base, None
        if base is None:
            return
        try:
            with suppress(FlotillaError):
                for request_id in self._in_flight:
                    await base.engine.abort(request_id)
                if self._has_adapter and len(base.users) > 1:
                    await base.engine.drop_adapter(self._name)
        finally:
            await self._bases.leave(self, base)

    @property
    def _engine(self) -> Adapting:
        if self._base is None:
            raise WorkerDied("the engine was closed")
        return self._base.engine

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample with the experiment's adapter; see ``Engine.generate``."""
        if request.adapter is not None:
            raise InvalidRequest("an engine that experiments share adds the adapter of each")
        named = replace(request, request_id=self._own(request.request_id), adapter=self._name)
        self._in_flight.add(named.request_id)
        try:
            return await self._engine.generate(named)
        finally:
            self._in_flight.discard(named.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request now; see ``Engine.abort``."""
        await self._engine.abort(self._own(request_id))

    def _own(self, request_id: str) -> str:
        return f"{self._name} {request_id}"

    def begin_transfer(self, image: Path, version: int) -> _NoTransfer:
        """Read nothing ahead; see ``Engine.begin_transfer``."""
        return _NoTransfer()

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        """Replace the experiment's adapter; see ``Engine.load_weights``.

        Raises:
            WorkerDied: the process ended; or the image is no adapter that it can add, so that this experiment needs a
                process of its own, which it gets with its next start.
        """
        header = await asyncio.to_thread(self._header, image)
        try:
            if header is None:
                raise CannotShare(f"version {version} is whole weights")
            await self._engine.load_adapter(self._name, image, header.scale, version, on_update)
        except CannotShare as error:
            self._bases.cannot_share(self, str(error))
            raise WorkerDied(f"it gets an engine of its own: {error}") from error

    def _header(self, image: Path) -> AdaptersHeader | None:
        """Read of which adapters an image is; blocks, once for all of the base.

        Raises:
            WeightTransferFailed: it cannot be read, or is for another base than the process has.
        """
        layout = read_layout(image)
        try:
            header = AdaptersHeader.read(layout.metadata)
            found = checksum_of(safetensors_files(Path(self.settings.model_path)))
        except (ValueError, ModelError) as error:
            raise WeightTransferFailed(f"version cannot be read: {error}") from error
        if header is not None and header.base != found:
            raise WeightTransferFailed(
                f"the adapters are for a base with checksum {header.base}, and the model's files here have {found}: "
                "trainer and rollouts need the same model.path"
            )
        return header

    async def sleep(self) -> None:
        """Refuse: others sample."""
        raise InvalidRequest("an engine that experiments share does not sleep")

    async def wake(self) -> None:
        """Serve the weights that training began with; see ``Engine.wake``."""
        await self._engine.load_adapter(self._name, None, 1.0, self.settings.version)
        self._has_adapter = True

    async def load(self) -> EngineLoad:
        """Take a snapshot of this experiment's part of the load."""
        base = self._base
        found = await self._engine.load(self._name)
        return replace(found, sharers=0 if base is None else len(base.users))
