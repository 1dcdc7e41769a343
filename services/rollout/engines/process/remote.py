"""The asynchronous side of an engine that runs elsewhere: each method is a command, and calls have numbers."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest, WeightTransfer
from flotilla.services.rollout.engines.process.commands import (
    Abort,
    AbortTransfer,
    AdvanceTransfer,
    Answer,
    BeginTransfer,
    Call,
    Command,
    CompleteTransfer,
    DiscardWeights,
    DropAdapter,
    Generate,
    LoadAdapter,
    Profile,
    Sleep,
    TakeLoad,
    TransferCommand,
    UpdateWeights,
    Wake,
)
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError


class RemoteEngine(ABC):
    """An ``Engine`` whose work is done behind a channel of commands; subclasses define the channel.

    Args:
        call_seconds: deadline of a call that waits for no sampling.
    """

    capabilities = TorchEngineConfig.CAPABILITIES

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._numbers = itertools.count(1)

    @abstractmethod
    async def start(self) -> None:
        """Load the initial weights; returns when the engine can generate."""

    @abstractmethod
    async def close(self) -> None:
        """Abort what is in flight and free everything; may be called more than once."""

    @abstractmethod
    async def ask(self, call: Call) -> Answer:
        """Have a call carried out; cancelling it ends its request, or drops its update unless that was applied.

        Raises:
            WorkerDied: no process is there to receive it.
            FlotillaError: it failed.
        """

    @abstractmethod
    def post(self, command: Command) -> None:
        """Send a command.

        Raises:
            WorkerDied: no process is there to receive it.
        """

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample one completion per seed; cancelling it ends the request in the engine. See ``Engine.generate``."""
        completions = await self.ask(Generate(next(self._numbers), request))
        assert isinstance(completions, list | tuple)
        return completions

    async def abort(self, request_id: str) -> None:
        """End a request now; see ``Engine.abort``."""
        self.post(Abort(request_id))

    def begin_transfer(self, image: Path, version: int) -> WeightTransfer:
        """Let it read an image while it is received; see ``Engine.begin_transfer``."""
        transfer = _RemoteTransfer(next(self._numbers), self)
        self.post(BeginTransfer(transfer.number, image, version))
        return transfer

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        """Replace the weights; cancelling it drops the update unless it was applied. See ``Engine.load_weights``."""
        await self.ask(UpdateWeights(next(self._numbers), image, version, on_update))

    async def load_proved(self, image: Path, version: int, on_update: OnWeightUpdate, digest: str) -> bool:
        """Replace the weights, and read them back; see ``ProvesWeights.load_proved``."""
        await self.ask(UpdateWeights(next(self._numbers), image, version, on_update, digest))
        return True

    async def load_adapter(
        self,
        name: str,
        file: Path | None,
        scale: float,
        version: int,
        on_update: OnWeightUpdate = OnWeightUpdate.CONTINUE,
    ) -> None:
        """Let requests have an adapter; cancelling it drops it unless it is there. See ``AddsAdapters``."""
        await self.ask(LoadAdapter(next(self._numbers), name, file, scale, version, on_update))

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter; see ``AddsAdapters.drop_adapter``."""
        await self.ask(DropAdapter(next(self._numbers), name))

    def profile(self, directory: Path, versions: frozenset[int], num_steps: int, service_id: str) -> None:
        """Record the first steps under each of some versions; see ``ProfilesSteps.profile``."""
        self.post(Profile(directory, versions, num_steps, service_id))

    async def sleep(self) -> None:
        """Free weights and cache; see ``Engine.sleep``.

        Raises:
            DeadlineExceeded: the engine did not within ``call_seconds``.
        """
        await self._ask_soon(Sleep(next(self._numbers)), "go to sleep")

    async def discard_weights(self) -> None:
        """Give the weights up, and keep their memory; see ``DiscardsWeights``.

        Raises:
            DeadlineExceeded: the engine did not within ``call_seconds``.
        """
        await self._ask_soon(DiscardWeights(next(self._numbers)), "discard its weights")

    async def wake(self) -> None:
        """Read the initial weights again; see ``Engine.wake``.

        Raises:
            DeadlineExceeded: the engine did not within ``call_seconds``.
        """
        await self._ask_soon(Wake(next(self._numbers)), "wake up")

    async def load(self, adapter: str | None = None) -> EngineLoad:
        """Take a snapshot of the load, or of the part of it that one adapter's requests make.

        Raises:
            DeadlineExceeded: the engine did not answer within ``call_seconds``.
        """
        load = await self._ask_soon(TakeLoad(next(self._numbers), adapter), "report its load")
        assert isinstance(load, EngineLoad)
        return load

    async def _ask_soon(self, call: Call, what: str) -> Answer:
        try:
            async with asyncio.timeout(self._call_seconds):
                return await self.ask(call)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not {what} within {self._call_seconds} s") from None


class _RemoteTransfer:
    """A ``WeightTransfer`` whose methods are commands. The engine's death is noticed by its waiters."""

    def __init__(self, number: int, engine: RemoteEngine) -> None:
        self.number = number
        self._engine = engine
        self._is_over = False

    def advance(self, bytes_arrived: int) -> None:
        """See ``WeightTransfer.advance``."""
        self._send(AdvanceTransfer(self.number, bytes_arrived))

    def complete(self) -> None:
        """See ``WeightTransfer.complete``."""
        self._send(CompleteTransfer(self.number), is_last=True)

    def abort(self, reason: str) -> None:
        """See ``WeightTransfer.abort``."""
        self._send(AbortTransfer(self.number, reason), is_last=True)

    def _send(self, command: TransferCommand, *, is_last: bool = False) -> None:
        if not self._is_over:
            self._is_over = is_last
            with suppress(FlotillaError):
                self._engine.post(command)
