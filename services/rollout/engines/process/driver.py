"""Drives a ``TorchEngine`` from a queue of commands, on the thread that calls ``run``."""

import queue
import time
from collections.abc import Callable
from functools import partial

from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.embedded.engine import TorchEngine, use_threads
from flotilla.services.rollout.engines.embedded.outcomes import Generated, GenerationFailed, Outcome, Updated
from flotilla.services.rollout.engines.embedded.profiling import EngineProfiler
from flotilla.services.rollout.engines.process.commands import (
    Abort,
    AbortTransfer,
    AdapterCall,
    AdvanceTransfer,
    BeginTransfer,
    Cancel,
    Close,
    Command,
    CompleteTransfer,
    DiscardWeights,
    DropAdapter,
    Generate,
    LoadAdapter,
    Profile,
    Result,
    Sleep,
    TakeLoad,
    UpdateWeights,
    Wake,
)
from flotilla.shared.errors import FlotillaError
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.host.cores import CoreSeat

Reply = Callable[[int, Result], None]
THREADS_SECONDS = 0.1
"""How long the engine computes with as many threads before it looks again."""


class EngineDriver:
    """Steps an engine while it has work and waits for commands while it has none.

    Args:
        engine: used by the thread that calls ``run`` alone.
        reply: called on that thread with the number of a call and its result.
        cores: returns how many threads to compute with; None: torch's number.
    """

    def __init__(self, engine: TorchEngine, reply: Reply, cores: CoreSeat | None = None) -> None:
        self._engine = engine
        self._cores = cores
        self._threads_until = 0.0
        self._reply = reply
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._call_of: dict[str, int] = {}
        self._request_of: dict[int, str] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._profiler = EngineProfiler()

    def post(self, command: Command) -> None:
        """Hand over a command; any thread may."""
        # A transfer hears of its progress at once, so that the thread which reads its image need not wait for the step
        # that is being computed. The engine hears in its turn that one begins, and that its image is whole.
        match command:
            case BeginTransfer(transfer, image, version):
                self._arrivals[transfer] = Arrival(image, version)
            case AdvanceTransfer(transfer, bytes_arrived):
                self._arrivals[transfer].advance(bytes_arrived)
                return
            case CompleteTransfer(transfer):
                self._arrivals[transfer].complete()
            case AbortTransfer(transfer, reason):
                self._arrivals.pop(transfer).abort(reason)
                return
        self._inbox.put(command)

    def run(self) -> None:
        """Work until a ``Close`` arrives; what is in flight then is aborted and replied to."""
        while True:
            is_closing = self._take_commands()
            if is_closing:
                self._engine.abort_all()
            if (faults := armed()) is not None:
                faults.hit(Site.ENGINE_STEP)
            self._use_cores()
            with self._profiler.step(self._engine.version):
                outcomes = self._engine.step()
            for outcome in outcomes:
                self._report(outcome)
            if is_closing:
                self._profiler.close()
                return

    def _use_cores(self) -> None:
        # Not at every step: another number of threads ends some and starts others.
        if self._cores is not None and time.monotonic() > self._threads_until:
            use_threads(self._cores.begin())
            self._threads_until = time.monotonic() + THREADS_SECONDS

    def _take_commands(self) -> bool:
        """Execute the commands that wait; block for one while the engine is idle. True when it is to close."""
        may_block = self._engine.is_idle
        if may_block and self._cores is not None:
            self._cores.end()
            self._threads_until = 0.0
        while True:
            try:
                command = self._inbox.get(block=may_block)
            except queue.Empty:
                return False
            may_block = False
            if isinstance(command, Close):
                return True
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Generate(call, request):
                try:
                    self._engine.submit(request)
                except FlotillaError as error:
                    self._reply(call, error)
                else:
                    self._call_of[request.request_id] = call
                    self._request_of[call] = request.request_id
            case UpdateWeights(call, image, version, mode, digest):
                self._engine.request_update(call, image, version, mode, digest)
            case BeginTransfer(transfer):
                # Without an arrival it was aborted before its turn came.
                if (arrival := self._arrivals.get(transfer)) is not None:
                    self._engine.begin_transfer(arrival)
            case CompleteTransfer(transfer):
                self._engine.complete_transfer(self._arrivals.pop(transfer))
            case TakeLoad(call, adapter):
                self._reply(call, self._engine.load(adapter))
            case Sleep(call):
                self._engine.sleep()
                self._reply(call, None)
            case DiscardWeights(call):
                self._engine.discard_weights()
                self._reply(call, None)
            case Wake(call):
                self._do(call, self._engine.wake)
            case LoadAdapter() | DropAdapter():
                self._change_adapters(command)
            case Profile(directory, versions, num_steps, service_id):
                self._profiler.choose(directory, versions, num_steps, service_id)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Cancel(call):
                self._engine.cancel_update(call)
                if call in self._request_of:
                    self._engine.abort(self._request_of[call])

    def _change_adapters(self, command: AdapterCall) -> None:
        if isinstance(command, DropAdapter):
            self._do(command.call, partial(self._engine.drop_adapter, command.name))
        else:
            name, file, scale = command.name, command.file, command.scale
            self._engine.request_adapter(command.call, name, file, scale, command.version, command.mode)

    def _do(self, call: int, work: Callable[[], None]) -> None:
        """Do something that may fail, and reply."""
        try:
            work()
        except FlotillaError as error:
            self._reply(call, error)
        else:
            self._reply(call, None)

    def _report(self, outcome: Outcome) -> None:
        match outcome:
            case Generated(request_id, completions):
                self._reply(self._forget(request_id), completions)
            case GenerationFailed(request_id, error):
                self._reply(self._forget(request_id), error)
            case Updated(update_id, error):
                self._reply(update_id, error)

    def _forget(self, request_id: str) -> int:
        call = self._call_of.pop(request_id)
        del self._request_of[call]
        return call
