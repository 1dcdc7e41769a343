"""Every change that writes more than once, with a failure and a death before each of its writes.

Writes are counted in the store's twin, so a change that gets another write gets another fault. After each fault the
gateway's memory is what the store holds, nothing is half done, and asking again brings the change to its end.
"""

import contextlib
import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.evaluation.evaluator import Evaluator
from flotilla.services.gateway.lifecycle.origins import remove_unfinished
from flotilla.services.gateway.monitoring.watchdog import Stall, Watchdog
from flotilla.services.gateway.publications.negotiation import Opened
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.runtime.work import ExperimentWork
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import Write
from flotilla.shared.checkpoints.folders import folders
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.schemas.experiment import Event, ExperimentState
from flotilla.shared.schemas.publication import PublicationReport, ReceiveState, Rendezvous
from flotilla.shared.schemas.service import Failure, ObservedState, ServiceKind, WorkState
from flotilla.shared.schemas.task import Lane
from tests.unit.gateway.builders import (
    MemoryPlanes,
    a_gateway,
    a_manifest,
    a_registration,
    a_request,
    a_spec,
    add_experiment,
    add_service,
    running,
    say,
    spec_document,
    stop,
)
from tests.unit.gateway.stored import store_checkpoint
from tests.unit.gateway.test_evaluator import ROWS, answer

ID = "tiny-1"
PATH = f"/v1/experiments/{ID}"
FULL = Unavailable("the disk is full")


class Killed(BaseException):
    """The process ends here: nothing of what follows is done."""


class FaultyStore(MemoryStore):
    """Raises ``error`` in place of write number ``breaks_at``, counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.breaks_at = 0
        self.error: BaseException = FULL

    def do(self, write: Write) -> Event | None:
        self.num_writes += 1
        if self.num_writes == self.breaks_at:
            raise self.error
        return super().do(write)


@functools.cache
def the_app() -> FastAPI:
    """Make the app of every gateway here: which one answers is in a request's scope."""
    return create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))


class World:
    """A gateway, what it writes to, and who calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FaultyStore()
        self.clock = ManualClock()
        self.planes = MemoryPlanes()
        self.services: dict[ServiceKind, str] = {}
        self.at_rest: set[ServiceKind] = set()
        self.gateway = a_gateway(self.store, self.clock, self.planes, data=folder, token="t")

    async def restart(self) -> None:
        """Open another gateway on what this one has left."""
        await stop(self.gateway)
        self.gateway = a_gateway(self.store, self.clock, self.planes, data=self.folder, token="t")
        await self.gateway.repository.load()
        await self.gateway.commands.load()
        await self.gateway.registry.load()
        await self.gateway.publications.load()
        for kind, service_id in self.services.items():
            if self.gateway.registry.find(service_id) is not None:
                await self.report(kind)

    @property
    def experiment(self) -> Experiment:
        return self.gateway.repository.get(ID)

    async def report(self, kind: ServiceKind, **changes: Any) -> None:
        """Let a service say how it is."""
        version = 0 if kind is ServiceKind.ROLLOUT else None
        works: dict[str, Any] = {"experiment_id": ID, "state": WorkState.RUNNING, "policy_version": version}
        if kind in self.at_rest:
            works = {"experiment_id": None, "state": WorkState.IDLE}
        await say(self.gateway, self.services[kind], ObservedState(**works | changes))

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make a request under one idempotency key; return the answer.

        Raises:
            Unavailable: the answer was 503.
        """

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await the_app()(scope | {"state": {"gateway": self.gateway}}, receive, send)

        headers = {"Authorization": "Bearer t", "Idempotency-Key": "one", "Content-Type": "application/json"}
        content = body if isinstance(body, str | None) else json.dumps(body)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://gateway") as client:
            response = await client.request(method, path, headers=headers, content=content)
        if response.status_code == Unavailable.status:
            raise Unavailable(response.text)
        return response.json() if response.content else None


Step = Callable[[World], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    """A change: what is there before, what asks for it, and whether it has come to its end."""

    name: str
    arrange: Step
    act: Step
    goal: Callable[[World], bool]


async def nothing(_: World) -> None:
    """Arrange nothing."""


def with_state(state: ExperimentState, *kinds: ServiceKind, **changes: Any) -> Step:
    """Arrange an experiment in a state, with services at work for it."""

    async def arrange(world: World) -> None:
        await add_experiment(world.gateway, state=state, trainer_epoch=1, **changes)
        for kind in kinds:
            world.services[kind] = await add_service(world.gateway, kind, kind.value, ID)

    return arrange


FLEET = (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.REWARD)
AT_WORK = with_state(ExperimentState.RUNNING, *FLEET)


async def announced(world: World) -> None:
    await AT_WORK(world)
    await world.gateway.publications.announce(ID, world.services[ServiceKind.TRAINER], a_request())


async def received(world: World) -> None:
    """Open the epoch, and let the only member join and receive."""
    publications = world.gateway.publications
    await publications.apply_to_version(ID, 1, Opened(Rendezvous(host="h", port=1, epoch=1, world_size=2)))
    for state in (ReceiveState.JOINED, ReceiveState.RECEIVED):
        checksum = a_manifest().checksum if state is ReceiveState.RECEIVED else None
        report = PublicationReport(version=1, epoch=1, state=state, checksum=checksum)
        await world.report(ServiceKind.ROLLOUT, publication=report)


async def create(world: World) -> None:
    (world.folder / "model").mkdir(exist_ok=True)
    (world.folder / "model" / "config.json").write_text("{}")
    (world.folder / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n' * 8)
    spec = spec_document(model={"path": str(world.folder / "model")}, data={"path": str(world.folder / "train.jsonl")})
    first = await world.call("POST", "/v1/experiments?start=true", spec)
    assert await world.call("POST", "/v1/experiments?start=true", spec) == first
    assert first["state"] == "starting"


def ended(state: ExperimentState) -> Step:
    """Arrange an experiment that has come to rest after two of three steps, its model and its data."""

    async def arrange(world: World) -> None:
        (world.folder / "model").mkdir(exist_ok=True)
        (world.folder / "model" / "config.json").write_text("{}")
        (world.folder / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n' * 8)
        model, data = {"path": str(world.folder / "model")}, {"path": str(world.folder / "train.jsonl")}
        spec = a_spec(model=model, data=data, optimisation={"steps": 3, "groups_per_mini_batch": 2})
        document, directory = spec.model_dump(mode="json"), world.folder / "experiments" / ID
        changes = {"step": 2, "trainer_epoch": 1, "final_ledger": {}}
        await add_experiment(world.gateway, state=state, spec=document, directory=str(directory), **changes)
        store_checkpoint(directory, 2, document)

    return arrange


async def fork(world: World) -> None:
    changes = {"optimisation": {"steps": 5}, "name": "other"}
    first = await world.call("POST", f"{PATH}/fork", {"step": 2, "changes": changes})
    assert await world.call("POST", f"{PATH}/fork", {"step": 2, "changes": changes}) == first
    assert (first["state"], first["step"], first["total_steps"], first["policy_version"]) == ("starting", 2, 5, 2)
    assert first["origin"] == {
        "experiment_id": ID,
        "step": 2,
        "version": 2,
        "path": str(world.folder / "experiments" / ID / "checkpoints" / "step-00000002"),
        "first_group_id": 4,
        "source_weights": [],
        "generated_tokens": 0,
    }


def is_forked_once(world: World) -> bool:
    """Whether there is one fork with the checkpoint that it begins from, and a start leaves nothing of others."""
    experiments, repository = world.folder / "experiments", world.gateway.repository
    (mine,) = [e.id for e in repository if e.record.origin is not None]
    remove_unfinished(experiments, lambda each: repository.find(each) is not None)
    assert {path.name for path in experiments.iterdir()} == {e.id for e in repository}
    return [step for step, _ in folders(experiments / mine / "checkpoints")] == [2]


async def extend(world: World) -> None:
    """Ask for five steps; asked again after that was stored, it is refused."""
    first = await world.call("POST", f"{PATH}/extend", {"steps": 5})
    assert await world.call("POST", f"{PATH}/extend", {"steps": 5}) == first


def is_extended(state: ExperimentState, epoch: int) -> Callable[[World], bool]:
    def reached(world: World) -> bool:
        experiment = world.experiment
        steps = (experiment.spec.optimisation.steps, experiment.record.spec["optimisation"]["steps"])
        trainer = (experiment.state, experiment.record.trainer_epoch)
        return steps == (5, 5) and trainer == (state, epoch) and happened("experiment_extended")(world)

    return reached


async def fail(world: World) -> None:
    failure = Failure(component="trainer", cause="no", fatal=True)
    await world.report(ServiceKind.TRAINER, state=WorkState.FAILED, failure=failure)


async def register_in_place(world: World) -> None:
    record = a_registration(ServiceKind.ROLLOUT, "new", address="http://127.0.0.1/rollout")
    if (old := world.gateway.registry.find(world.services[ServiceKind.ROLLOUT])) is not None:
        world.gateway.registry.shorten(old)
    first = await world.call("POST", "/v1/services", record.model_dump(mode="json"))
    assert await world.call("POST", "/v1/services", record.model_dump(mode="json")) == first


def leave(kind: ServiceKind) -> Step:
    async def act(world: World) -> None:
        if world.gateway.registry.find(world.services[kind]) is not None:
            await world.gateway.fleet.leave(world.services[kind], reason="it left")

    return act


async def release(world: World) -> None:
    await world.gateway.fleet.release(world.gateway.registry.get(world.services[ServiceKind.ROLLOUT]), "test")


async def idle_fleet(world: World) -> None:
    await add_experiment(world.gateway, state=ExperimentState.STARTING)
    for kind in FLEET:
        await add_service(world.gateway, kind, kind.value)


async def reconcile(world: World) -> None:
    await world.gateway.reconciler.reconcile()


async def announce(world: World) -> None:
    request = a_request(2).model_dump(mode="json")
    first = await world.call("POST", f"{PATH}/publications", request)
    assert await world.call("POST", f"{PATH}/publications", request) == first


async def an_evaluation(world: World) -> None:
    evaluation = {"path": "/nowhere/heldout.jsonl", "greedy": True}
    spec = a_spec(evaluation=evaluation)
    await add_experiment(world.gateway, spec=spec.model_dump(mode="json"))


async def evaluate(world: World) -> None:
    gateway, experiment = world.gateway, world.experiment
    dataset = Dataset(ROWS, experiment.spec.data, 0)
    evaluator = Evaluator(experiment, dataset, gateway.repository, gateway.events, gateway.clock)
    await evaluator.abandon()
    if evaluator.due() is not None:
        async with running(answer(experiment, [1.0])):
            await evaluator.evaluate(0)


async def tear_down(world: World) -> None:
    if world.experiment.record.final_ledger is None:
        await ExperimentWork(world.gateway).end(world.experiment)


async def stopping(world: World) -> None:
    await with_state(ExperimentState.STOPPING, outcome="stopped")(world)
    dataset = Dataset(ROWS, world.experiment.spec.data, 0)
    await world.experiment.train.admission.issue(dataset.task(0, group_size=2), limit=9)
    world.services[ServiceKind.REWARD] = await add_service(world.gateway, ServiceKind.REWARD, "reward", ID)
    world.at_rest = {ServiceKind.REWARD}
    await world.report(ServiceKind.REWARD)


async def look_twice(world: World) -> None:
    gateway, experiment = world.gateway, world.experiment
    measured = gateway.measurements.of(experiment)
    stall = Stall(experiment, gateway.repository, gateway.events)
    parts = (stall, gateway.registry, gateway.publications, world.clock)
    watchdog = Watchdog(experiment, *parts, measured=measured, why_blocked=lambda: None, stall_seconds=30.0)
    await watchdog.look()
    world.clock.advance(31.0)
    await watchdog.look()


def post(path: str, body: Any = None) -> Step:
    async def act(world: World) -> None:
        address = path.format(**{kind.value: service_id for kind, service_id in world.services.items()})
        first = await world.call("POST", address, body)
        assert await world.call("POST", address, body) == first

    return act


def state_is(state: ExperimentState) -> Callable[[World], bool]:
    return lambda world: world.experiment.state is state


def closed(phase: str) -> Callable[[World], bool]:
    return lambda world: [p.phase for p in world.store._publications.values()] == [phase]


def happened(kind: str) -> Callable[[World], bool]:
    """Whether an event is there, once."""
    return lambda world: [event.type for event in all_events(world.store)].count(kind) == 1


STATES = ExperimentState
METRICS = {"step": 1, "version": 0, "values": {"loss": 1.0}}
CHECKPOINT = {
    "step": 1,
    "version": 1,
    "path": "/nowhere/tiny-1/checkpoints/step-00000001",
    "at": "2026-01-01T00:00:00.000Z",
}
CASES = (
    Case("create and start", nothing, create, lambda w: [e.state for e in w.gateway.repository] == [STATES.STARTING]),
    Case("pause", with_state(STATES.RUNNING), post(f"{PATH}/pause"), state_is(STATES.PAUSED)),
    Case("resume", with_state(STATES.PAUSED), post(f"{PATH}/resume"), state_is(STATES.RUNNING)),
    Case("stop", announced, post(f"{PATH}/stop"), lambda w: closed("aborted")(w) and state_is(STATES.STOPPING)(w)),
    Case(
        "change",
        AT_WORK,
        lambda world: world.call("PATCH", PATH, {"resources": {"priority": 4}}),
        lambda world: world.experiment.spec.resources.priority == 4,
    ),
    Case(
        "delete",
        with_state(STATES.STOPPED, final_ledger={}),
        lambda world: world.call("DELETE", PATH),
        lambda world: not list(world.gateway.repository) and [a.action for a in world.store._audit] == ["delete"],
    ),
    Case("fail", announced, fail, lambda w: closed("aborted")(w) and state_is(STATES.FAILED)(w)),
    Case("register in place of a dead one", announced, register_in_place, happened("service_left")),
    Case(
        "drain",
        AT_WORK,
        post("/v1/services/{rollout}/drain", {"notice_seconds": 5}),
        lambda world: world.gateway.registry.get(world.services[ServiceKind.ROLLOUT]).is_draining,
    ),
    Case("a rollout leaves", announced, leave(ServiceKind.ROLLOUT), closed("committed")),
    Case("a trainer leaves", announced, leave(ServiceKind.TRAINER), closed("aborted")),
    Case("release", announced, release, happened("service_left")),
    Case("assign", idle_fleet, reconcile, lambda world: world.experiment.record.trainer_epoch == 1),
    Case("wait for services", with_state(STATES.STARTING), reconcile, happened("waiting")),
    Case("announce", AT_WORK, announce, lambda world: len(world.store._publications) == 1),
    Case(
        "announce another version",
        announced,
        announce,
        lambda w: [p.phase for p in w.store._publications.values()] == ["aborted", "preparing"],
    ),
    Case("commit", announced, received, lambda w: closed("committed")(w) and w.experiment.record.policy_version == 1),
    Case(
        "a send fails",
        announced,
        post(f"{PATH}/publications/1/failed", {"epoch": 1, "detail": "no"}),
        happened("publication_epoch_closed"),
    ),
    Case("checkpoint", AT_WORK, post(f"{PATH}/checkpoints", CHECKPOINT), lambda w: w.experiment.record.step == 1),
    Case(
        "metrics",
        AT_WORK,
        post(f"{PATH}/metrics", METRICS),
        lambda world: len(list(world.store._metrics[ID].after(0))) == 1,
    ),
    Case(
        "training ends",
        AT_WORK,
        lambda world: world.report(ServiceKind.TRAINER, state=WorkState.FINISHED, step=2),
        happened("training_finished"),
    ),
    Case("evaluate", an_evaluation, evaluate, happened("evaluation")),
    Case("come to rest", stopping, tear_down, state_is(STATES.STOPPED)),
    Case("fork", ended(STATES.COMPLETED), fork, is_forked_once),
    Case("resume what was stopped", ended(STATES.STOPPED), post(f"{PATH}/resume"), state_is(STATES.STARTING)),
    Case("extend what is at work", AT_WORK, extend, is_extended(STATES.RUNNING, 2)),
    Case("extend what has ended", ended(STATES.COMPLETED), extend, is_extended(STATES.STARTING, 1)),
    Case("name a stall", with_state(STATES.RUNNING), look_twice, happened("stalled")),
)


def all_events(store: MemoryStore) -> list[Event]:
    return sorted((event for events in store._events.values() for event in events), key=lambda event: event.id)


async def check(world: World) -> None:
    """Compare memory with the store, and the store with itself."""
    gateway, store = world.gateway, world.store
    assert {e.id: e.record for e in gateway.repository} == store._experiments
    assert {s.id: s.record for s in gateway.registry} == store._services
    events = all_events(store)
    for experiment in gateway.repository:
        record = experiment.record
        rows = await store.publications(record.id)
        is_open = [row for row in rows if row.ended_at is None]
        assert len(is_open) == (gateway.publications.open_phase(record.id) is not None) <= experiment.is_active
        committed = [row for row in rows if row.phase == "committed"]
        first_version = 0 if record.origin is None else record.origin["version"]
        assert record.policy_version == max((row.version for row in committed), default=first_version)
        mine = store._events[record.id]
        moved = [event.data["state"] for event in mine if event.type == "experiment_state"]
        assert not moved or moved[-1] == record.state.value
        assert (record.problem is not None) == (len(events_of(events, "stalled", "waiting")) > 0 or "failed" in moved)
        assert record.is_trained == (len(events_of(events, "training_finished")) > 0)
        assert (record.evaluated_version is not None) == (len(events_of(events, "evaluation")) > 0)
        for lane in Lane:
            assert (await world.planes(record.id, lane).ledger()).balanced
    actions = [audit.action for audit in store._audit if "after" in audit.detail or audit.action == "fail"]
    asked = [event for event in events_of(events, "experiment_state") if event.data["state"] != "stopped"]
    assert len(actions) == len(asked)
    assert len([a for a in store._audit if a.action == "create"]) == len(events_of(events, "experiment_created"))
    left = {event.data["service_id"] for event in events_of(events, "service_left")}
    assert not left & {s.id for s in gateway.registry if s.experiment_id is not None}


def events_of(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.type in kinds]


@pytest.mark.parametrize("error", [FULL, Killed()], ids=["fails", "is killed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_a_change_is_whole_or_has_not_been_whichever_write(
    case: Case, error: BaseException, tmp_path: Path
) -> None:
    number, is_reached = 0, True
    while is_reached:
        number += 1
        (folder := tmp_path / str(number)).mkdir()
        world = World(folder)
        await case.arrange(world)
        world.store.num_writes, world.store.breaks_at, world.store.error = 0, number, error

        with contextlib.suppress(FlotillaError, Killed):
            await case.act(world)
        is_reached = world.store.num_writes >= number
        world.store.breaks_at = 0
        if isinstance(error, Killed):
            await world.restart()

        await check(world)
        await case.act(world)
        await check(world)
        assert case.goal(world), f"after a fault at write {number}"
        await stop(world.gateway)
    assert number > 2, "no write was reached"


async def test_a_step_that_ends_while_the_experiment_stops_is_shown(tmp_path: Path) -> None:
    world = World(tmp_path)
    await with_state(ExperimentState.STOPPING, step=4)(world)

    await world.call("POST", f"{PATH}/metrics", METRICS | {"step": 5})

    assert (await world.call("GET", PATH))["step"] == 5
