"""The worker's life: read the launch, train, follow orders, report how it ends."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, NoReturn, cast

from flotilla.services.trainer.parallel.commands import Opening
from flotilla.services.trainer.parallel.job import Place, is_lost_peer
from flotilla.services.trainer.wire import (
    EXIT_PEER_LOST,
    TO_WORKER,
    Failed,
    ImageReady,
    Launch,
    Line,
    Offered,
    Order,
    Status,
)
from flotilla.services.trainer.worker.checkpoint_policy import CheckpointOverdue
from flotilla.services.trainer.worker.control import RunControl, ToldToEnd
from flotilla.services.trainer.worker.execution import Job
from flotilla.services.trainer.worker.session import Session, SessionDeps, open_session
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import ClaimLost, DataError, FlotillaError, InvalidRequest, ModelError
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import WAITS_FOR_TURN, DeviceOrder, Failure, WorkState
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.telemetry import logging as telemetry
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.files import sweep

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_PEER_SILENT = 5
STATUS_SECONDS = 1.0
OFFER_SECONDS = 5.0
MAX_CAUSE_CHARACTERS = 2000
COMPONENT = "trainer"
HOPELESS = (ModelError, DataError, InvalidRequest, CheckpointOverdue)
"""What would fail in the same way if the worker were started again."""


class Orphaned(Exception):
    """The supervisor is gone."""


class WorkerProcess:
    """Trains what it is launched for.

    Args:
        orders: lines from the supervisor.
        answers: where lines to the supervisor go.
        place: in the job of several ranks that this process leads; None where it trains alone.
        make_deps: makes what its session is opened in.
        sweeps: whether images of ended workers are removed first; not beside workers that may be opening their own.
    """

    def __init__(
        self,
        orders: asyncio.StreamReader,
        answers: IO[bytes],
        place: Place | None = None,
        make_deps: Callable[..., SessionDeps] = SessionDeps,
        *,
        sweeps: bool = True,
    ) -> None:
        self._place, self._make_deps, self._sweeps = place, make_deps, sweeps
        self._orders = orders
        self._answers = answers
        self._control = RunControl(on_state=lambda _: self._say_status())
        self._session: Session | None = None
        self._offered: asyncio.Queue[int] = asyncio.Queue()
        self._failures: dict[str, Failure | None] = {
            "checkpoint": None,
            "samples": None,
            "device": None,
            "profiler": None,
        }
        self._device_order: DeviceOrder | None = None
        self._last_change: str | None = None
        self._started = time.monotonic()

    async def run(self) -> int:
        """Work until the supervisor orders a stop or the training fails; returns the exit code."""
        launch = await self._read()
        if not isinstance(launch, Launch):
            raise Orphaned
        telemetry.configure_logging("trainer-worker", launch.log_level, launch.log_format)
        telemetry.experiment_id.set(launch.assignment.experiment_id)
        telemetry.service_id.set(launch.service_id)
        try:
            async with asyncio.TaskGroup() as tasks:
                obeying = tasks.create_task(self._obey(), name="orders")
                telling = tasks.create_task(self._tell(), name="status")
                await self._train(launch)
                obeying.cancel()
                telling.cancel()
        except BaseExceptionGroup as group:
            if group.subgroup(Orphaned) is not None:
                raise Orphaned from None
            error = _first(group)
            if is_lost_peer(error):
                log.exception("a rank is lost", exc_info=error)
                return EXIT_PEER_LOST
            self._say_failure(error)
            return EXIT_FAILED
        return EXIT_DONE

    async def _train(self, launch: Launch) -> None:
        if self._sweeps:
            sweep_images()
        spec = validate_spec(launch.assignment.spec)
        redis, source = connect(launch.redis_url), spec.data.subscribes_to
        device = spec.parallelism.device if spec.uses_nccl else None
        endpoint = EndpointClient(bind_host=launch.host, device=device, sends_to_engines=spec.sends_to_engines)
        # It takes seconds to start, and meanwhile the model is loaded.
        is_wanted = spec.asynchrony.publication.expects_broadcasts(launch.host)
        starting = asyncio.create_task(_started(endpoint, is_wanted=is_wanted), name="weight endpoint")
        try:
            async with GatewayClient(launch.gateway_url, launch.assignment.token) as gateway:
                around = self._make_deps(
                    experiment_id=launch.assignment.experiment_id,
                    service_id=launch.service_id,
                    directory=_directory(launch),
                    incarnation=launch.incarnation,
                    gateway=gateway,
                    endpoint=endpoint,
                    plane=cast(DataPlane, RedisDataPlane(redis, launch.assignment.experiment_id)),
                    on_image=self._offer,
                    on_failure=partial(self._set_failure, "checkpoint"),
                    on_sample_failure=partial(self._set_failure, "samples"),
                    on_profile_failure=partial(self._set_failure, "profiler"),
                    job=self._job(launch),
                    on_device=self._say_status,
                    on_device_failure=partial(self._set_failure, "device"),
                    source_version=None
                    if source is None
                    else RedisDataPlane(redis, source).admission.published_version,
                )
                async with open_session(spec, around, self._control) as session:
                    self._session = session
                    session.device.take(self._device_order)
                    session.loop.announce_change(self._last_change)
                    self._say_status()
                    async with asyncio.TaskGroup() as tasks:
                        # After the last step, too: others may need the device for a last evaluation.
                        moving = tasks.create_task(session.device.run(), name="device")
                        if await session.run():
                            # Its images are served until the supervisor ends it.
                            await self._control.until_stopped()
                        moving.cancel()
        except ToldToEnd:
            log.info("stopped before the first step: nothing was trained, nothing is kept")
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await endpoint.close()
            await redis.aclose()

    def _job(self, launch: Launch) -> Job | None:
        if self._place is None:
            return None
        opening = Opening(
            spec=launch.assignment.spec,
            experiment_id=launch.assignment.experiment_id,
            log_level=launch.log_level,
            log_format=launch.log_format,
        )
        return Job(self._place, opening, partial(end_for_silence, self._answers))

    async def _obey(self) -> None:
        while True:
            order = await self._read()
            if isinstance(order, Offered):
                self._offered.put_nowait(order.version)
                continue
            if not isinstance(order, Order):
                continue
            self._device_order, self._last_change = order.device, order.last_change
            if self._session is not None:
                self._session.device.take(order.device)
                self._session.loop.announce_change(order.last_change)
            if order.state is WorkState.RUNNING:
                self._control.resume()
            elif order.state is WorkState.PAUSED:
                self._control.pause()
            else:
                self._control.stop(is_over=order.state is WorkState.IDLE)

    async def _offer(self, version: int, path: Path, checksum: str) -> None:
        """Let the supervisor serve an image, and wait until it does."""
        self._say(ImageReady(version=version, path=str(path), checksum=checksum))
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                while await self._offered.get() != version:
                    pass
        except TimeoutError:
            log.warning("the supervisor does not answer", extra={"version": version})

    async def _read(self) -> Launch | Order | Offered:
        line = await self._orders.readline()
        if not line:
            raise Orphaned
        return TO_WORKER.validate_json(line)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self._say_status()

    def _set_failure(self, part: str, failure: Failure | None) -> None:
        """Note that a part fails and is tried again, or no longer; the first of several is reported."""
        if failure != self._failures[part]:
            self._failures[part] = failure
            self._say_status()

    def _say_status(self) -> None:
        session = self._session
        if session is None:
            self._say(Status(state=self._control.state, step=None, version=None))
            return
        load = {
            "ready_groups": float(session.source.num_ready),
            "trained_tokens": float(session.loop.progress.totals.trained_tokens),
            "seconds": time.monotonic() - self._started,
        }
        if session.compute.is_waiting:
            load[WAITS_FOR_TURN] = 1.0
        version = session.publisher.published_version
        self._say(
            Status(
                state=self._control.state,
                step=session.loop.progress.step,
                version=version,
                load=load,
                failure=next(filter(None, self._failures.values()), None),
                device=session.device.report(),
            )
        )

    def _say_failure(self, error: BaseException) -> None:
        log.error("training failed", exc_info=error)
        self._say(describe_failure(error))

    def _say(self, line: Line) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._answers.write(line.line())
            self._answers.flush()


def sweep_images() -> None:
    """Remove the images of workers that have ended."""
    if swept := sweep():
        log.info("images of ended workers were removed", extra={"count": len(swept)})


async def _started(endpoint: EndpointClient, *, is_wanted: bool) -> None:
    if not is_wanted:
        return
    try:
        await endpoint.start()
    except FlotillaError as error:
        # It is started when an epoch is opened, and fails there if it cannot be.
        log.warning("the weight endpoint did not start", extra={"error": error.detail})


def end_for_silence(answers: IO[bytes], cause: str) -> NoReturn:
    """End this process at once: its other threads may wait for the silent rank."""
    answers.write(_failed(cause, is_permanent=False).line())
    answers.flush()
    os._exit(EXIT_PEER_SILENT)


def describe_failure(error: BaseException) -> Failed:
    """Turn what ended the training into one sentence, and return whether a restart could help."""
    if isinstance(error, MemoryError):
        cause = f"out of memory: {error}" if str(error) else "out of memory"
        return _failed(cause, is_permanent=False)
    if isinstance(error, ClaimLost):
        return Failed(failure=Failure(component=COMPONENT, cause=error.detail, fatal=False), is_permanent=True)
    if isinstance(error, FlotillaError):
        return _failed(error.detail, is_permanent=isinstance(error, HOPELESS), is_passing=error.retryable)
    text = str(error).strip().splitlines()
    return _failed(f"{type(error).__name__}: {text[0] if text else 'no message'}", is_permanent=False)


def _failed(cause: str, *, is_permanent: bool, is_passing: bool = False) -> Failed:
    failure = Failure(component=COMPONENT, cause=cause[:MAX_CAUSE_CHARACTERS], fatal=is_permanent)
    return Failed(failure=failure, is_permanent=is_permanent, is_passing=is_passing)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _directory(launch: Launch) -> Path:
    return Path(launch.assignment.directory)
