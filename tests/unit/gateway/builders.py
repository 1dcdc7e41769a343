"""What the gateway's unit tests are made of: a spec, records, and a gateway in memory with a clock that is moved."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from flotilla.services.gateway.access.caller import caller
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.publication import Manifest, PublicationRequest, TensorSpec
from flotilla.shared.schemas.service import Capabilities, ObservedState, Registration, ServiceKind, WorkState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.memory.plane import MemoryDataPlane


def spec_document(**changes: Any) -> dict[str, Any]:
    """Make a spec of two steps with two groups each."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": "/nowhere/model"},
        "data": {"path": "/nowhere/train.jsonl"},
        "rollout": {"group_size": 2, "sampling": {"max_new_tokens": 8}},
        "reward": {"components": [{"kind": "numeric"}]},
        "optimisation": {"steps": 2, "groups_per_mini_batch": 2},
    }
    return document | changes


def a_spec(**changes: Any) -> ExperimentSpec:
    """Validate such a spec."""
    return validate_spec(spec_document(**changes))


def a_record(experiment_id: str = "tiny-1", **changes: Any) -> ExperimentRecord:
    """Make the record of an experiment; its spec is ``spec_document`` unless given."""
    fields: dict[str, Any] = {
        "id": experiment_id,
        "name": "tiny",
        "state": ExperimentState.DRAFT,
        "revision": 1,
        "spec": a_spec().model_dump(mode="json"),
        "directory": f"/nowhere/{experiment_id}",
        "created_at": 1.0,
        "updated_at": 1.0,
    }
    return ExperimentRecord(**(fields | changes))


class MemoryPlanes:
    """Opens lanes in memory; the same lane is the same whoever opens it."""

    def __init__(self) -> None:
        self._planes: dict[tuple[str, Lane], MemoryDataPlane] = {}

    def __call__(self, experiment_id: str, lane: Lane, *, lease_seconds: float | None = None) -> MemoryDataPlane:
        plane = self._planes.setdefault((experiment_id, lane), MemoryDataPlane(lane))
        if lease_seconds is None:
            return plane
        hasty = MemoryDataPlane(lane, StreamsConfig(lease_seconds=lease_seconds))
        hasty._store, hasty.admission, hasty.mailbox = plane._store, plane.admission, plane.mailbox
        return hasty


async def answers() -> None:
    """Ping nothing."""


def a_gateway(
    store: MemoryStore | None = None,
    clock: ManualClock | None = None,
    planes: MemoryPlanes | None = None,
    **settings: Any,
) -> GatewayState:
    """Put a gateway together in memory; nothing of it runs."""
    fields: dict[str, Any] = {"token": "t", "redis_url": "redis://nowhere", "data": Path("/nowhere")}
    gateway = GatewayState(
        GatewaySettings(**(fields | settings)),
        store or MemoryStore(),
        planes or MemoryPlanes(),
        answers,
        clock or ManualClock(),
    )
    # Reconciling moves experiments; what works inside them (feeder, evaluator, watchdog, ending) is tested on its own.
    gateway.reconciler._work = gateway.reconciler._end = _rest
    return gateway


async def _rest(_experiment: Experiment) -> None:
    await asyncio.Event().wait()


async def stop(gateway: GatewayState) -> None:
    """End the tasks that the reconciler has started."""
    tasks = [task for _, task in gateway.reconciler._tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def acting(owner: str | None) -> Iterator[None]:
    """Act as whoever has a token of an owner."""
    token = caller.set(Principal(Scope.OPERATOR, f"{owner}s", owner=owner))
    try:
        yield
    finally:
        caller.reset(token)


async def add_experiment(gateway: GatewayState, experiment_id: str = "tiny-1", **changes: Any) -> Experiment:
    """Add an experiment, running unless another state is given."""
    usual = {"state": ExperimentState.RUNNING, "started_at": 1.0, "updated_at": gateway.clock.now()}
    record = a_record(experiment_id, **(usual | changes))
    return await gateway.repository.add(record, validate_spec(record.spec))


def a_registration(kind: ServiceKind = ServiceKind.ROLLOUT, incarnation: str = "one", **changes: Any) -> Registration:
    """Make a registration."""
    fields: dict[str, Any] = {
        "kind": kind,
        "address": f"http://127.0.0.1/{incarnation.replace(' ', '-')}",
        "host": "here",
        "pid": 1,
        "capabilities": Capabilities(transports=("gloo",), live_changes=kind is not ServiceKind.SANDBOX),
        "incarnation": incarnation,
    }
    return Registration(**(fields | changes))


async def add_service(
    gateway: GatewayState,
    kind: ServiceKind,
    incarnation: str,
    experiment_id: str | None = None,
    **registration: Any,
) -> str:
    """Register a service, assign it, and let it say that it works; return its id."""
    service_id = (await gateway.fleet.register(a_registration(kind, incarnation, **registration))).service_id
    if experiment_id is not None:
        await gateway.registry.assign(gateway.registry.get(service_id), experiment_id)
        version = 0 if kind is ServiceKind.ROLLOUT else None
        observed = ObservedState(experiment_id=experiment_id, state=WorkState.RUNNING, policy_version=version)
        await say(gateway, service_id, observed)
    return service_id


async def say(gateway: GatewayState, service_id: str, observed: ObservedState) -> Any:
    """Let a service report without waiting; return its desired state."""
    return await gateway.fleet.report(service_id, observed, 0.0, stays)


def stays() -> asyncio.Future[Any]:
    """A caller that does not hang up."""
    return asyncio.get_running_loop().create_future()


def a_manifest(version: int = 1) -> Manifest:
    """Make the manifest of an image of one tensor; its checksum is the version in hexadecimal."""
    tensor = TensorSpec(name="w", shape=(1,), dtype="F32", start=0, end=4)
    return Manifest(
        version=version,
        image_bytes=4,
        slice_bytes=4,
        checksum=f"{version:016x}",
        digest=f"{version:032x}",
        tensors=(tensor,),
    )


def a_request(version: int = 1) -> PublicationRequest:
    """Make the announcement of a version."""
    return PublicationRequest(manifest=a_manifest(version), step=version)


@asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a coroutine while the block lasts."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns() -> None:
    """Let go on whatever can: counted in turns of the loop, since no time is long enough on every machine."""
    for _ in range(100):
        await asyncio.sleep(0)


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for a state, on a machine with much else to do, too."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
