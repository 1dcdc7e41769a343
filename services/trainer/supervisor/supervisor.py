"""Follows the desired state: one experiment at a time, trained by a worker process that may die.

    idle -> starting -> running <-> paused -> finished -> idle
                  \\-> failed (permanent failure, or died too often)

A worker that dies is started again and continues from its checkpoint, after a pause that grows; when that keeps
happening within a few minutes, or when starting again would fail the same way, the experiment fails with the cause.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flotilla.services.trainer.supervisor.process import ExitStatus, WorkerHandle
from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.services.trainer.wire import (
    Failed,
    FromWorker,
    ImageReady,
    Launch,
    Line,
    Offered,
    Order,
    Status,
    StoreOpened,
)
from flotilla.shared.children.restarts import FIRST_PAUSE_SECONDS, Restarts
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.service import (
    WAITS_FOR_TURN,
    Assignment,
    DeviceReport,
    Failure,
    JobReport,
    ObservedState,
    WorkState,
)
from flotilla.shared.service.reconciling import StateFollower
from flotilla.shared.streams.plans import WORKERS_PER_EPOCH
from flotilla.shared.telemetry import logging as telemetry
from flotilla.shared.weights.pull.kept_images import DIRECTORY as KEPT_IMAGES

log = logging.getLogger(__name__)

MAX_DEATHS = 4
DEATH_WINDOW_SECONDS = 300.0
PAUSE_GROWTH = 4.0
STOP_SECONDS = 8.0
LAST_CHECKPOINT_SECONDS = 25.0
"""Somewhat less than a gateway waits for the services of an experiment that ends."""
NEWS_SECONDS = 2.0
"""How long the news of a step or a version waits for more: the gateway has both from the worker's own calls."""
RELEASE_SECONDS = 120.0
"""How long weights may take to leave a device: the host's disk may be slow."""
COMPONENT = "trainer"


class NodeOfJob:
    """What is known of the job of the assignment at hand.

    Args:
        host: address of this host, under which other nodes reach it.

    Attributes:
        port: of the job's store, where this is the first node and has opened it.
        ended: why the job ended here.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self.port: int | None = None
        self.ended: str | None = None

    def forget(self) -> None:
        """Begin with another assignment."""
        self.port = self.ended = None

    def report(self, assignment: Assignment | None) -> JobReport | None:
        """Return the report for the gateway; None if the experiment's ranks are all on one host."""
        if assignment is None or _num_nodes(assignment) == 1:
            return None
        host = None if self.port is None else self._host
        return JobReport(epoch=assignment.trainer_epoch, host=host, port=self.port, ended=self.ended)

    def may_start(self, wanted: Assignment) -> bool:
        """Whether all is known that the ranks of this host need, and the job has not ended already."""
        if _num_nodes(wanted) == 1:
            return True
        node = wanted.node
        return node is not None and self.ended is None and (node.rank == 0 or node.port is not None)


def is_next_job(mine: Assignment | None, theirs: Assignment | None) -> bool:
    """Whether an assignment is the same experiment's next job on several hosts."""
    is_same = mine is not None and theirs is not None and mine.experiment_id == theirs.experiment_id
    return is_same and mine is not None and _num_nodes(mine) > 1


def _num_nodes(assignment: Assignment) -> int:
    """Read how many hosts a job is on; the spec is validated where a worker is started."""
    section = assignment.spec.get("parallelism")
    count = section.get("nodes", 1) if isinstance(section, dict) else 1
    return count if isinstance(count, int) else 1


@dataclass(frozen=True)
class Addresses:
    """Facts of the fleet for a worker."""

    gateway_url: str
    redis_url: str
    host: str
    log_level: str
    log_format: telemetry.LogFormat


class Process(Protocol):
    """The part of ``WorkerHandle`` that is used here."""

    @property
    def pid(self) -> int:
        """Process id."""

    def tell(self, line: Line) -> None:
        """Send it a message."""

    async def ended(self) -> ExitStatus:
        """Wait for its end."""

    async def stop(self, wait_seconds: float) -> None:
        """Wait for an end that was ordered, then kill."""

    async def kill(self) -> None:
        """End it now."""


StartWorker = Callable[[Launch, ParallelismConfig, Callable[[FromWorker], None]], Awaitable[Process]]


class Supervisor(StateFollower):
    """Makes what is observed follow what is desired.

    Args:
        addresses: handed to each worker.
        images: the versions that this service offers to be pulled.
        service_id: returns the id that the gateway gave.
        start_worker: starts a process.
    """

    def __init__(
        self,
        addresses: Addresses,
        images: ServedImages,
        service_id: Callable[[], str | None],
        start_worker: StartWorker = WorkerHandle.start,
    ) -> None:
        super().__init__(COMPONENT)
        self._addresses = addresses
        self._images = images
        self._service_id = service_id
        self._start_worker = start_worker
        self._worker: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._offering: set[asyncio.Task[None]] = set()
        self._status: Status | None = None
        self._told: Failure | None = None  # by the worker, of its own end
        self._is_hopeless = False
        self._is_passing = False
        self._is_leaving = False
        self._is_between_workers = False
        self._told_of_device: DeviceReport | None = None  # by the worker that runs
        self._holds_devices: bool | None = None  # by the same, on a host that does not lead
        self._idle_since: float | None = None
        self._news: asyncio.TimerHandle | None = None
        self._restarts = Restarts(
            MAX_DEATHS,
            window_seconds=DEATH_WINDOW_SECONDS,
            first_pause_seconds=FIRST_PAUSE_SECONDS,
            growth=PAUSE_GROWTH,
        )
        self._furthest_step = 0
        self._node = NodeOfJob(addresses.host)
        self._started_workers = 0
        self._launched_as = ""

    def observe(self) -> ObservedState:
        """Report state, version, step, load and failure."""
        status = self._status
        return ObservedState(
            experiment_id=self._assignment.experiment_id if self._assignment else None,
            state=self._state,
            policy_version=status.version if status else None,
            step=status.step if status else None,
            load=dict(status.load) | {"worker_starts": float(self._started_workers)} if status else {},
            failure=self._failure or (status.failure if status else None),
            device=self._device(),
            job=self._node.report(self._assignment),
        )

    def _device(self) -> DeviceReport | None:
        """Report what the worker has on a device that is shared in turns; without one, that one is to be started."""
        order = self._desired.device if self._desired is not None else None
        if order is None:
            return None
        if self._worker is None and not self._is_between_workers:
            return DeviceReport(shift=order.shift, is_held=False, is_wanted=self._state is WorkState.STARTING)
        if self._holds_devices is not None:
            # The leader wants them, and may take them at any moment of its shift.
            held = order.may_hold or self._holds_devices
            return DeviceReport(shift=order.shift, is_held=held, is_wanted=self._state is WorkState.STARTING)
        # Until it follows orders it is loading.
        return self._told_of_device or DeviceReport(shift=order.shift, is_held=True, is_wanted=True)

    @property
    def _may_hold(self) -> bool:
        """Whether a worker may have the device, by the newest order."""
        order = self._desired.device if self._desired is not None else None
        return order is None or order.may_hold

    async def _reconcile(self) -> None:
        desired = self._desired
        if desired is None:
            return
        wanted = desired.assignment if desired.state is not WorkState.IDLE else None
        if not _is_same(self._assignment, wanted) or self._is_named_otherwise():
            await self._dismiss(is_over=wanted is None, is_continued=is_next_job(self._assignment, wanted))
            if wanted is None:
                self._enter(WorkState.IDLE)
                return
            self._assignment = wanted
        if desired.state is WorkState.DRAINING:
            await self._dismiss()
            self._enter(WorkState.IDLE)
            return
        if wanted is None or self._is_hopeless or desired.state not in {WorkState.RUNNING, WorkState.PAUSED}:
            return
        if self._worker is None and not (self._may_hold and self._node.may_start(wanted)):
            self._enter(WorkState.STARTING)
        elif self._worker is None and not self._backoff.is_pending:
            await self._start(wanted)
        if self._worker is not None:
            self._worker.tell(Order(state=desired.state, device=desired.device, last_change=wanted.last_change))

    def _is_named_otherwise(self) -> bool:
        """Whether the service has another id than the one its worker knows: its messages would be ignored."""
        service_id = self._service_id()
        return self._worker is not None and service_id is not None and service_id != self._launched_as

    async def _start(self, assignment: Assignment) -> None:
        telemetry.experiment_id.set(assignment.experiment_id)
        try:
            spec = validate_spec(assignment.spec)
        except InvalidSpec as error:
            self._give_up(error.detail)
            return
        is_kept = spec.asynchrony.publication.write_to_directory
        self._images.keep_in(Path(assignment.directory) / KEPT_IMAGES if is_kept else None)
        self._started_workers += 1
        self._launched_as = self._service_id() or ""
        launch = Launch(
            assignment=assignment,
            service_id=self._launched_as,
            incarnation=self._incarnation(assignment),
            **vars(self._addresses),
        )
        self._enter(WorkState.STARTING)
        self._is_leaving = self._is_passing = False
        self._told = self._told_of_device = self._holds_devices = self._idle_since = None
        self._is_between_workers = True
        try:
            self._worker = await self._start_worker(launch, spec.parallelism, self._hear)
        except OSError as error:
            self._is_between_workers = False
            # Too many processes, no memory for one more: such reasons pass.
            self._start_again(f"no process can be started: {error}", self._backoff.postpone())
            return
        self._is_between_workers = False
        log.info("worker is started", extra={"pid": self._worker.pid, "number": self._started_workers})
        self._watching = asyncio.create_task(self._watch(self._worker), name="worker")

    def _incarnation(self, assignment: Assignment) -> int | None:
        if assignment.trainer_epoch == 0:
            return None
        return assignment.trainer_epoch * WORKERS_PER_EPOCH + self._started_workers

    def _hear(self, message: FromWorker) -> None:
        if self._is_leaving:
            self._note_wait(message)
            return
        if isinstance(message, ImageReady):
            offering = asyncio.create_task(self._offer(message), name=f"offer version {message.version}")
            self._offering.add(offering)
            offering.add_done_callback(self._offering.discard)
        elif isinstance(message, StoreOpened):
            self._node.port = message.port
            self.notify()
        elif isinstance(message, Failed):
            self._failure = self._told = message.failure
            self._is_hopeless, self._is_passing = message.is_permanent, message.is_passing
        else:
            known = self._status
            is_urgent = known is None or (
                (message.device, message.holds_devices) != (self._told_of_device, self._holds_devices)
            )
            is_news = known is not None and (message.step, message.version) != (known.step, known.version)
            self._status, self._told_of_device = message, message.device
            self._holds_devices = message.holds_devices
            self._end_if_it_does_not_release(message.device)
            if message.state is not WorkState.STARTING:
                # It works again: what it died of before is no longer its state.
                self._failure = None
                self._backoff.reset()
            self._enter(message.state)
            if is_urgent:
                self.notify()
            elif is_news and self._news is None:
                self._news = asyncio.get_running_loop().call_later(NEWS_SECONDS, self._tell_news)

    def _note_wait(self, message: FromWorker) -> None:
        """Let the gateway, which waits for a last checkpoint, know whether that waits for others' steps."""
        if isinstance(message, Status) and self._status is not None:
            before, self._status = self._status, self._status.model_copy(update={"load": message.load})
            if (WAITS_FOR_TURN in before.load) is not (WAITS_FOR_TURN in message.load):
                self.notify()

    def _tell_news(self) -> None:
        self._news = None
        self.notify()

    def _end_if_it_does_not_release(self, told: DeviceReport | None) -> None:
        """Kill a worker that was asked to release the device, does not need it, and still has it."""
        order = self._desired.device if self._desired is not None else None
        is_late = order is not None and told is not None and not order.may_hold and told.is_held and not told.is_wanted
        if not is_late:
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now - self._idle_since > RELEASE_SECONDS and self._worker is not None:
            log.error("the worker does not release the device, it is ended", extra={"seconds": RELEASE_SECONDS})
            self._idle_since = None
            ending = asyncio.create_task(self._worker.kill(), name="end of a worker that keeps the device")
            self._offering.add(ending)
            ending.add_done_callback(self._offering.discard)

    async def _offer(self, message: ImageReady) -> None:
        await self._images.offer(message.version, Path(message.path), message.checksum)
        if self._worker is not None:
            self._worker.tell(Offered(version=message.version))

    async def _watch(self, worker: Process) -> None:
        ending = await worker.ended()
        if self._is_leaving or worker is not self._worker:
            return
        self._worker = None
        if self._is_hopeless and self._told is not None:
            self._fail(self._told)
            return
        cause = self._told.cause if self._told else ending.cause
        if self._is_passing or ending.is_with_others:
            # No death of this experiment's to count: where others were the cause, it continues without them.
            self._start_again(cause, self._backoff.postpone())
            return
        step = self._status.step if self._status is not None else 0
        if step is not None and step > self._furthest_step:
            # It got further than ever before it died: whatever it died of does not keep it from continuing.
            self._furthest_step = step
            self._restarts.forget()
        self._after_death(cause)

    def _after_death(self, cause: str) -> None:
        """Start another worker after a pause, unless that has failed too often."""
        pause = self._restarts.died()
        if pause is None:
            window = f"{DEATH_WINDOW_SECONDS:g} s without getting further"
            self._give_up(f"died {MAX_DEATHS} times within {window}, the last time: {cause}")
            return
        self._backoff.postpone(pause)
        self._start_again(cause, pause)

    def _start_again(self, cause: str, pause: float) -> None:
        log.error("worker ended, another one is started", extra={"cause": cause, "pause_seconds": pause})
        self._failure = Failure(component=COMPONENT, cause=cause, fatal=False)
        self._node.ended = cause
        self._enter(WorkState.STARTING)
        self.notify()
        self._changed.set()

    def _give_up(self, cause: str) -> None:
        self._is_hopeless = True
        self._fail(cause)

    async def _close(self) -> None:
        await self._dismiss()

    async def _dismiss(self, *, is_over: bool = False, is_continued: bool = False) -> None:
        """End the worker after its step, and forget the experiment.

        Args:
            is_over: no trainer continues with the experiment: the worker gets the time for a last checkpoint.
            is_continued: the next job of the same experiment follows: what this one died of counts on.
        """
        self._is_leaving = True
        worker, self._worker = self._worker, None
        if worker is not None:
            self._is_between_workers = True
            worker.tell(Order(state=WorkState.IDLE if is_over else WorkState.DRAINING))
            try:
                await worker.stop(LAST_CHECKPOINT_SECONDS if is_over else STOP_SECONDS)
            finally:
                self._is_between_workers = False
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)
        for offering in self._offering:
            offering.cancel()
        await asyncio.gather(*self._offering, return_exceptions=True)
        await self._images.withdraw(is_over=is_over)
        self._watching = self._status = self._assignment = None
        self._node.forget()
        if is_continued:
            return
        self._failure = None
        self._is_hopeless = False
        self._furthest_step = 0
        self._backoff.reset()
        self._restarts.forget()


def _is_same(mine: Assignment | None, theirs: Assignment | None) -> bool:
    """Whether one worker serves both: a changed spec or a new term as the trainer needs another one."""
    if mine is None or theirs is None:
        return mine is theirs
    keys = [(each.experiment_id, each.revision, each.trainer_epoch, each.directory) for each in (mine, theirs)]
    return keys[0] == keys[1]
