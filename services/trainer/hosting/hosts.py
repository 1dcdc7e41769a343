"""The supervisors' side of a process in which several experiments train; see ``serving``."""

import asyncio
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Self

from pydantic import ValidationError

from flotilla.services.trainer.supervisor.process import KILL_SECONDS, ExitStatus, WorkerHandle, environment_of
from flotilla.services.trainer.supervisor.supervisor import Process, StartWorker
from flotilla.services.trainer.wire import FROM_WORKER, FromWorker, Launch, Line, Order, Status
from flotilla.shared.children.processes import READ_BYTES, python_module
from flotilla.shared.children.spawning import Child, spawn
from flotilla.shared.config.base.model import Threads
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.rules.publication import KEY, publishes_adapters
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.service import MOST_WAITED_SECONDS, WAITS_FOR_TURN, WorkState

log = logging.getLogger(__name__)


def reason_not_shared(spec: ExperimentSpec) -> str | None:
    """Return why an experiment trains in a process of its own; None where it may share one.

    Args:
        spec: in which nothing is left to ``auto``.
    """
    if spec.model.lora is None:
        return "it trains all weights: model.lora alone leaves a base that others can use"
    if not publishes_adapters(spec):
        return f"its images are whole weights: {KEY} is {spec.asynchrony.publication.lora}"
    if spec.parallelism.ranks > 1:
        return f"it has {spec.parallelism.ranks} ranks"
    if spec.parallelism.device != "cpu":
        return f"bases are shared on a CPU, not on {spec.parallelism.device}"
    if spec.model.quantisation is not None:
        return "model.lora.quantisation makes another base"
    if spec.algorithm.needs_critic:
        return "its critic is a whole model of its own"
    if spec.exactness is not None:
        return f"exactness {spec.exactness} computes in another way"
    if spec.optimisation.compile_layers:
        return "optimisation.compile_layers makes programs of its own layers"
    if spec.shares_devices:
        return f"{spec.resources.turns} moves the base away"
    return None


MODULE = "flotilla.services.trainer.hosting"
SHARED_KILL_SECONDS = 60.0
"""How long an abandoned worker may keep computing in a process that others train in."""
MOST_ALONE = 1024
"""Experiments that are remembered as those of a process that ended."""
Hear = Callable[[FromWorker], None]


class HostedWorker:
    """One experiment's worker in a process of several; see ``WorkerHandle``.

    Args:
        host: the process.
        number: of the worker there.
        on_message: called with its messages.
    """

    def __init__(self, host: "WorkerHost", number: int, on_message: Hear) -> None:
        self._host, self._number, self._on_message = host, number, on_message
        self._context = copy_context()
        self._ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._makes_last_checkpoint = False
        self._waited_at = 0.0
        self.is_given_up = False
        """Whether its end is requested."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._host.pid

    def tell(self, line: Line) -> None:
        """Send it a message; nothing happens where it has ended."""
        if isinstance(line, Order):
            self._makes_last_checkpoint = line.state is WorkState.IDLE
        if not self._ended.done():
            self._host.send(self._number, line.model_dump_json())

    def hear(self, text: str) -> None:
        """Take in what it says."""
        try:
            message = FROM_WORKER.validate_json(text)
        except ValidationError:
            log.warning("a worker sent a malformed message", extra={"number": self._number})
            return
        if isinstance(message, Status) and WAITS_FOR_TURN in message.load:
            self._waited_at = time.monotonic()
        self._context.run(self._on_message, message)

    def end(self, ending: ExitStatus) -> None:
        """Note that it has ended."""
        if not self._ended.done():
            self._ended.set_result(ending)

    def when_ended(self, note: Callable[[ExitStatus], None]) -> None:
        """Register a callback for its end, called before its waiters wake."""
        self._ended.add_done_callback(lambda ended: note(ended.result()))

    async def ended(self) -> ExitStatus:
        """Wait for its end, and return its cause."""
        return await asyncio.shield(self._ended)

    async def stop(self, wait_seconds: float) -> None:
        """Wait for an ordered end; abandon a worker that does not reach it.

        What it waits for others' steps is no part of the time for a last checkpoint, up to ``MOST_WAITED_SECONDS``.
        """
        began = time.monotonic()
        while not self._ended.done():
            waited_at = min(self._waited_at, began + MOST_WAITED_SECONDS) if self._makes_last_checkpoint else began
            left = max(began, waited_at) + wait_seconds - time.monotonic()
            if left <= 0:
                await self.kill()
                return
            await asyncio.wait([self._ended], timeout=left)

    async def kill(self) -> None:
        """Give it up now: it may compute to the end of its step while others train on.

        Where it does not come to that end in time, it may keep the others from theirs: the process is ended.
        """
        self.is_given_up = True
        self._host.send(self._number, None)
        began = time.monotonic()
        await asyncio.wait([self._ended], timeout=KILL_SECONDS)
        if not self._ended.done() and self._host.is_wanted:
            await asyncio.wait([self._ended], timeout=SHARED_KILL_SECONDS - KILL_SECONDS)
        if not self._ended.done():
            await self._host.end(f"an experiment in it did not end within {time.monotonic() - began:.0f} s")


class WorkerHost:
    """A process with workers of several experiments. Made by :meth:`start`; it ends with the last of them."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._workers: dict[int, HostedWorker] = {}
        self._numbers = itertools.count(1)
        self._reading = asyncio.create_task(self._read(), name="workers' messages", context=Context())

    @classmethod
    async def start(cls, threads: Threads) -> Self:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        # Workers' threads compute in turn: what one has freed the next one takes, if they have one heap.
        environment = environment_of(os.environ, threads) | {"MALLOC_ARENA_MAX": "1"}
        child = await spawn(
            python_module(MODULE),
            environment=environment,
            max_line_bytes=READ_BYTES,
            leads_session=False,  # A kill of the service's process group ends the workers, too.
            context=Context(),  # A line that names no experiment is not of the one that came first.
        )
        return cls(child)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.process.pid

    @property
    def is_over(self) -> bool:
        """Whether no worker can begin there any more."""
        return self._reading.done() or self._child.has_ended or self._child.stdin.is_closing()

    @property
    def num_workers(self) -> int:
        """Count those that train there."""
        return len(self._workers)

    @property
    def is_wanted(self) -> bool:
        """Whether one of its workers is to continue."""
        return any(not each.is_given_up for each in self._workers.values())

    def begin(self, launch: Launch, on_message: Hear) -> HostedWorker:
        """Have it train one more experiment."""
        number = next(self._numbers)
        if number > 1:
            self._child.words.hide()
        worker = self._workers[number] = HostedWorker(self, number, on_message)
        worker.tell(launch)
        return worker

    def send(self, number: int, text: str | None) -> None:
        """Send a worker a line; None: its supervisor has closed."""
        if not self._child.stdin.is_closing():
            self._child.stdin.write(json.dumps([number, text]).encode() + b"\n")

    async def _read(self) -> None:
        rest = b""
        while data := await self._child.stdout.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line)
            if not self._workers:
                # Its base is unused: the memory is free for others.
                self._child.stdin.close()
        code = await self._child.ended()
        cause = f"the training process {self._child.cause()}"
        await self._child.end()
        self._end_all(code, cause)

    async def end(self, why: str) -> None:
        """Kill the process, and end all of its workers.

        Args:
            why: completes "the training process was ended: ".
        """
        log.error("a training process is ended", extra={"why": why, "pid": self.pid, "sharers": self.num_workers})
        self._reading.cancel()
        code = await self._child.end()
        self._end_all(-signal.SIGKILL if code is None else code, f"the training process was ended: {why}")

    def _end_all(self, code: int, cause: str) -> None:
        ending = ExitStatus(code, cause, is_with_others=len(self._workers) > 1)
        for worker in self._workers.values():
            worker.end(ending)
        self._workers.clear()

    def _hear(self, line: bytes) -> None:
        try:
            number, text, *code = json.loads(line)
        except ValueError:
            self._child.words.add(line)
            return
        worker = self._workers.get(number)
        if worker is None:
            return
        if text is not None:
            worker.hear(text)
            return
        del self._workers[number]
        worker.end(ExitStatus(code[0], f"the training process ended this experiment with code {code[0]}"))


StartHost = Callable[[Threads], Awaitable[WorkerHost]]


class SharedWorkers:
    """Starts workers: those that may share a base in one process, others in one of their own.

    Args:
        start_alone: starts a process for one experiment.
        start_host: starts one for several.
    """

    def __init__(self, start_alone: StartWorker = WorkerHandle.start, start_host: StartHost = WorkerHost.start) -> None:
        self._start_alone, self._start_host = start_alone, start_host
        self._hosts: dict[tuple[object, ...], WorkerHost] = {}
        self._alone: dict[str, str] = {}
        """Experiments whose process ended with several in it, and how: one of them may end the next one, too."""
        self._starting = asyncio.Lock()

    async def start(self, launch: Launch, parallelism: ParallelismConfig, on_message: Hear) -> Process:
        """Start a worker; see ``WorkerHandle.start``."""
        spec = validate_spec(launch.assignment.spec)
        experiment_id = launch.assignment.experiment_id
        if (why := self._alone.get(experiment_id) or reason_not_shared(spec)) is not None:
            log.info("the trainer's process is not shared", extra={"why": why})
            return await self._start_alone(launch, parallelism, on_message)
        key = _key(spec)
        async with self._starting:
            host = self._hosts.get(key)
            if host is None or host.is_over:
                host = self._hosts[key] = await self._start_host(parallelism.threads)
            worker = host.begin(launch, on_message)
        worker.when_ended(partial(self._note, experiment_id))
        log.info("the trainer's process is shared", extra={"pid": host.pid, "sharers": host.num_workers})
        return worker

    def _note(self, experiment_id: str, ending: ExitStatus) -> None:
        if ending.is_with_others:
            self._alone[experiment_id] = f"it was in one with others when {ending.cause}"
            if len(self._alone) > MOST_ALONE:
                del self._alone[next(iter(self._alone))]


def _key(spec: ExperimentSpec) -> tuple[object, ...]:
    """Name what all in one process have in common."""
    model = spec.model
    return model.path, model.revision, model.dtype, model.attention, model.kernels, spec.parallelism.threads
