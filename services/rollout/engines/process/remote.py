"""The asynchronous side of an engine that runs elsewhere: numbers its calls and waits for the replies."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest, WeightTransfer
from flotilla.services.rollout.engines.process.commands import (
    Abort,
    AbortTransfer,
    AdvanceTransfer,
    BeginTransfer,
    Call,
    Cancel,
    Command,
    CompleteTransfer,
    DiscardWeights,
    Generate,
    Result,
    Sleep,
    TakeLoad,
    UpdateWeights,
    Wake,
)
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError


class RemoteEngine(ABC):
    """An ``Engine`` whose work is done by something that takes commands; subclasses say how they get there.

    Args:
        call_seconds: deadline of a call that waits for no sampling.
    """

    capabilities = TorchEngineConfig.CAPABILITIES

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._numbers = itertools.count(1)
        self._transfers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Result]] = {}

    @abstractmethod
    async def start(self) -> None:
        """Load the initial weights; returns when the engine can generate."""

    @abstractmethod
    async def close(self) -> None:
        """Abort what is in flight and free everything; may be called more than once."""

    @abstractmethod
    def _post(self, command: Command) -> None:
        """Send a command.

        Raises:
            WorkerDied: there is nobody to take it.
        """

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample one completion per seed; cancelling it ends the request in the engine. See ``Engine.generate``."""
        result = await self._ask(lambda call: Generate(call, request))
        assert isinstance(result, list | tuple)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request now; see ``Engine.abort``."""
        self._post(Abort(request_id))

    def begin_transfer(self, image: Path, version: int) -> WeightTransfer:
        """Let it read an image while it is received; see ``Engine.begin_transfer``."""
        transfer = _RemoteTransfer(next(self._transfers), self._post)
        self._post(BeginTransfer(transfer.number, image, version))
        return transfer

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        """Replace the weights; cancelling it drops the update unless it was applied. See ``Engine.load_weights``."""
        await self._ask(lambda call: UpdateWeights(call, image, version, on_update))

    async def sleep(self) -> None:
        """Free weights and cache; see ``Engine.sleep``.

        Raises:
            DeadlineExceeded: the engine did not within ``call_seconds``.
        """
        await self._ask_soon(Sleep, "go to sleep")

    async def discard_weights(self) -> None:
        """Give the weights up, and keep their memory; see ``DiscardsWeights``.

        Raises:
            DeadlineExceeded: the engine did not within ``call_seconds``.
        """
        await self._ask_soon(DiscardWeights, "discard its weights")

    async def wake(self) -> None:
        """Read the initial weights again; see ``Engine.wake``.

        Raises:
            DeadlineExceeded: the engine did not within ``call_seconds``.
        """
        await self._ask_soon(Wake, "wake up")

    async def load(self) -> EngineLoad:
        """Take a snapshot of the load.

        Raises:
            DeadlineExceeded: the engine did not answer within ``call_seconds``.
        """
        result = await self._ask_soon(TakeLoad, "report its load")
        assert isinstance(result, EngineLoad)
        return result

    async def _ask_soon(self, make: Callable[[int], Call], what: str) -> Result:
        try:
            async with asyncio.timeout(self._call_seconds):
                return await self._ask(make)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not {what} within {self._call_seconds} s") from None

    async def _ask(self, make: Callable[[int], Call]) -> Result:
        number = next(self._numbers)
        reply: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._post(make(number))
            result = await reply
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._replies.pop(number, None)
        if isinstance(result, FlotillaError):
            raise result
        return result

    def _cancel(self, number: int) -> None:
        with suppress(FlotillaError):  # Nobody may be left to work on it.
            self._post(Cancel(number))

    def _replied(self, number: int, result: Result) -> None:
        """Hand a reply to its caller; on the event loop's thread."""
        reply = self._replies.get(number)
        if reply is not None and not reply.done():
            reply.set_result(result)

    def _fail_all(self, error: FlotillaError) -> None:
        """Raise the same error in every waiting caller."""
        for number in list(self._replies):
            self._replied(number, error)


class _RemoteTransfer:
    """A ``WeightTransfer`` whose methods are commands. The engine's death is found by those who wait for it."""

    def __init__(self, number: int, post: Callable[[Command], None]) -> None:
        self.number = number
        self._post = post
        self._is_over = False

    def advance(self, bytes_arrived: int) -> None:
        """See ``WeightTransfer.advance``."""
        if not self._is_over:
            self._send(AdvanceTransfer(self.number, bytes_arrived))

    def complete(self) -> None:
        """See ``WeightTransfer.complete``."""
        self._end(CompleteTransfer(self.number))

    def abort(self, reason: str) -> None:
        """See ``WeightTransfer.abort``."""
        self._end(AbortTransfer(self.number, reason))

    def _end(self, command: Command) -> None:
        if not self._is_over:
            self._is_over = True
            self._send(command)

    def _send(self, command: Command) -> None:
        with suppress(FlotillaError):
            self._post(command)
