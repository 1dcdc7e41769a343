"""Who waits for a turn of the store looks again once it comes: what was true before may have changed meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.monitoring.watchdog import Stall
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.publications.negotiation import Opened
from flotilla.services.gateway.publications.takeovers import Takeovers
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.routes.metrics import put_metrics
from flotilla.services.gateway.runtime import teardown
from flotilla.services.gateway.runtime.teardown import Teardown
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.checkpoints.takeover import RefusedIncarnation, StandingPoint, TakeoverRequest
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Conflict, NotFound, Unavailable
from flotilla.shared.schemas.experiment import Event, ExperimentState, MetricBatch
from flotilla.shared.schemas.publication import PublicationPhase, PublicationReport, ReceiveState, Rendezvous
from flotilla.shared.schemas.service import WAITS_FOR_TURN, ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.plans import WORKERS_PER_EPOCH
from flotilla.shared.streams.redis.connection import COMPONENT
from tests.unit.gateway.builders import a_gateway, a_manifest, a_request, add_experiment, add_service, say, turns

KNOWN = {"component": "rollout", "cause": "1 tasks wait and none is claimed", "at": "then"}


async def in_turn(gateway: GatewayState, *calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Let calls wait for the store's turn in this order, then let them go."""
    async with gateway.store.transaction():
        waiting = []
        for call in calls:
            waiting.append(asyncio.ensure_future(call()))
            await turns()
    return await asyncio.gather(*waiting, return_exceptions=True)


def cause_of(gateway: GatewayState, experiment: Experiment) -> tuple[str, str] | None:
    problem = gateway.commands.view(experiment).problem
    return None if problem is None else (problem.component, problem.cause)


async def test_a_phase_that_ends_while_its_lateness_waits_is_not_late() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, publication_seconds=10.0)
    experiment = await add_experiment(gateway, trainer_epoch=1)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)
    await gateway.publications.announce(experiment.id, trainer, a_request(1))
    meeting = Opened(Rendezvous(host="h", port=1, epoch=1, world_size=2))
    await gateway.publications.apply_to_version(experiment.id, 1, meeting)
    clock.advance(11.0)

    def joined() -> Awaitable[Any]:
        report = PublicationReport(version=1, epoch=1, state=ReceiveState.JOINED)
        observed = ObservedState(
            experiment_id=experiment.id, state=WorkState.RUNNING, policy_version=0, publication=report
        )
        return say(gateway, rollout, observed)

    await in_turn(gateway, joined, gateway.publications.check_deadlines)

    publication = await gateway.publications.get(experiment.id, 1)
    assert (publication.phase, publication.epoch) == (PublicationPhase.TRANSFERRING, 1)


@pytest.mark.parametrize("known", [None, KNOWN], ids=["a stall is named", "a stall is over"])
async def test_a_failure_keeps_its_cause_whatever_the_watchdog_has_seen(known: dict[str, str] | None) -> None:
    gateway = a_gateway(clock=ManualClock())
    experiment = await add_experiment(gateway, problem=known)
    stall = Stall(experiment, gateway.repository, gateway.events)

    await in_turn(
        gateway,
        lambda: gateway.commands.fail(experiment, "trainer", "out of memory"),
        stall.clear if known else lambda: stall.name("reward", "2 generated groups wait"),
    )

    assert experiment.state is ExperimentState.FAILED
    assert cause_of(gateway, experiment) == ("trainer", "out of memory")


async def test_a_failure_keeps_its_cause_when_the_scheduler_no_longer_waits() -> None:
    gateway = a_gateway(clock=ManualClock())
    experiment = await add_experiment(gateway, problem={"component": "scheduler", "cause": "too few", "at": "then"})

    await in_turn(
        gateway,
        lambda: gateway.commands.fail(experiment, "trainer", "out of memory"),
        lambda: gateway.scheduler._report_waiting(experiment, None),
    )

    assert cause_of(gateway, experiment) == ("trainer", "out of memory")


async def test_a_failure_keeps_its_cause_while_the_data_plane_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = a_gateway(clock=ManualClock())
    experiment = await add_experiment(gateway)
    await gateway.commands.fail(experiment, "trainer", "out of memory")
    absences = [Unavailable("the Redis server reads its log", component=COMPONENT)]

    async def drain(*_: Any, **__: Any) -> Ledger:
        if absences:
            raise absences.pop()
        return await experiment.train.ledger()

    async def finished() -> None:
        return None

    monkeypatch.setattr(teardown, "drain_outstanding", drain)
    monkeypatch.setattr(teardown, "UNAVAILABLE_BACKOFF_SECONDS", 0.0)
    await Teardown(
        experiment,
        gateway.repository,
        gateway.registry,
        gateway.fleet,
        gateway.commands,
        gateway.clock,
        idle_timeout_seconds=1.0,
        finish_sending=finished,
    ).run()

    assert not absences and experiment.record.final_ledger is not None
    assert cause_of(gateway, experiment) == ("trainer", "out of memory")


async def test_the_end_waits_for_a_last_checkpoint_that_waits_for_others_steps() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    observed = ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING)
    ending = Teardown(
        experiment,
        gateway.repository,
        gateway.registry,
        gateway.fleet,
        gateway.commands,
        clock,
        idle_timeout_seconds=30.0,
        finish_sending=asyncio.Event().wait,  # type: ignore[arg-type]
    )
    await say(gateway, trainer, observed.model_copy(update={"load": {WAITS_FOR_TURN: 1.0}}))
    waiting = asyncio.create_task(ending._wait_for_quiet())
    for _ in range(4):
        clock.advance(20.0)
        await asyncio.sleep(2 * teardown.POLL_SECONDS)
    assert not waiting.done()

    await say(gateway, trainer, observed)
    clock.advance(31.0)

    async with asyncio.timeout(5):
        await waiting


@pytest.mark.parametrize("action", [Action.START, Action.RESUME])
async def test_an_experiment_deleted_while_its_files_are_read_is_not_stored_again(
    action: Action, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    store = MemoryStore()
    gateway = a_gateway(store, ManualClock())
    state = ExperimentState.DRAFT if action is Action.START else ExperimentState.FAILED
    experiment = await add_experiment(gateway, state=state, final_ledger={}, directory=str(tmp_path / "e"))
    loop, may_go_on = asyncio.get_running_loop(), asyncio.Event()

    def slow(_spec: object, _places: object) -> None:
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(5.0)

    monkeypatch.setattr(checks, "check", slow)
    acting = asyncio.create_task(gateway.commands.act(experiment.id, action))
    await turns()
    await gateway.commands.act(experiment.id, Action.DELETE)
    may_go_on.set()

    with pytest.raises(NotFound):
        await acting
    assert await store.experiments() == []


async def test_a_resumed_experiment_knows_the_image_of_its_version() -> None:
    gateway = a_gateway(clock=ManualClock())
    experiment = await add_experiment(gateway, trainer_epoch=1)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    await gateway.publications.announce(experiment.id, trainer, a_request(1))
    assert experiment.record.policy_version == 1

    await gateway.commands.fail(experiment, "trainer", "out of memory")

    image = gateway.publications.committed(experiment.id, 1)
    assert image is not None and image.checksum == a_manifest(1).checksum


async def test_the_last_metrics_of_a_deleted_experiment_do_not_store_it_again() -> None:
    store = MemoryStore()
    gateway = a_gateway(store, ManualClock())
    experiment = await add_experiment(gateway, state=ExperimentState.STOPPED, final_ledger={})

    _, refusal = await in_turn(
        gateway,
        lambda: gateway.commands.act(experiment.id, Action.DELETE),
        lambda: put_metrics(experiment.id, MetricBatch(step=2, version=1, values={"a": 1.0}), gateway),
    )

    assert isinstance(refusal, NotFound)
    assert await store.experiments() == []
    assert await store.metrics(experiment.id, names=(), after=0, limit=9) == []


async def test_an_engine_that_starts_again_while_the_database_is_absent_ends_its_epoch_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = a_gateway(clock=ManualClock())
    experiment = await add_experiment(gateway, trainer_epoch=1)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)

    async def publish(version: int) -> int:
        epoch = (await gateway.publications.announce(experiment.id, trainer, a_request(version))).epoch
        meeting = Opened(Rendezvous(host="h", port=1, epoch=epoch, world_size=2))
        await gateway.publications.apply_to_version(experiment.id, version, meeting)
        checksum = a_manifest(version).checksum
        for state, known in ((ReceiveState.JOINED, None), (ReceiveState.RECEIVED, checksum)):
            report = PublicationReport(version=version, epoch=epoch, state=state, checksum=known)
            await say(gateway, rollout, at_work(version - 1, publication=report))
        return epoch

    def at_work(version: int | None, **facts: Any) -> ObservedState:
        state = WorkState.STARTING if version is None else WorkState.RUNNING
        return ObservedState(experiment_id=experiment.id, state=state, policy_version=version, **facts)

    async def fails(_writes: object) -> list[Event]:
        raise Unavailable("the disk is full")

    assert await publish(1) == 1
    with monkeypatch.context() as patched:
        patched.setattr(gateway.store, "apply", fails)
        with pytest.raises(Unavailable):
            await say(gateway, rollout, at_work(None))
    await say(gateway, rollout, at_work(None))
    await say(gateway, rollout, at_work(1))

    assert await publish(2) == 2, "nobody is at the end of the first epoch any more"


@pytest.mark.parametrize("call", ["decide", "raise_epoch"])
async def test_a_takeover_that_waits_behind_the_end_of_its_experiment_changes_nothing(call: str) -> None:
    gateway = a_gateway(clock=ManualClock())
    facts: dict[str, Any] = {
        "policy_version": 1,
        "published_step": 1,
        "step": 1,
        "trainer_epoch": 1,
        "is_trained": True,
    }
    experiment = await add_experiment(gateway, **facts)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    takeovers = Takeovers(
        gateway.repository, gateway.registry, gateway.store, gateway.events, gateway.commands.live.stage_restored
    )
    request = TakeoverRequest(step=0, published=StandingPoint(version=0, step=0))
    refused = RefusedIncarnation(recorded=5 * WORKERS_PER_EPOCH)

    def take_over() -> Awaitable[Any]:
        if call == "decide":
            return takeovers.decide(experiment.id, trainer, request)
        return takeovers.raise_epoch(experiment.id, trainer, refused)

    _, refusal = await in_turn(gateway, lambda: gateway.commands.act(experiment.id, Action.STOP), take_over)

    assert isinstance(refusal, Conflict)
    assert (experiment.record.is_trained, experiment.record.trainer_epoch) == (True, 1)
