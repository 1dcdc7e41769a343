"""Publications against the registry, the repository and the clock; the state machine itself is tested beside it."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.publications.negotiation import Opened, SendFailed, Sent
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.runtime import reconciler
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import AppendEvent
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Conflict, NotFound, StalePolicyVersion, Unavailable
from flotilla.shared.schemas.experiment import Event, ExperimentState
from flotilla.shared.schemas.publication import PublicationPhase, PublicationReport, ReceiveState, Rendezvous
from flotilla.shared.schemas.service import Capabilities, DesiredState, ObservedState, ServiceKind, WorkState
from tests.unit.gateway.builders import (
    a_gateway,
    a_manifest,
    a_registration,
    a_request,
    add_experiment,
    add_service,
    running,
    say,
    stop,
    turns,
    until,
)


class Stage:
    """A running experiment with a trainer and some rollouts."""

    def __init__(self, gateway: GatewayState, experiment: Experiment, trainer: str, rollouts: list[str]) -> None:
        self.gateway = gateway
        self.experiment = experiment
        self.trainer = trainer
        self.rollouts = rollouts

    @classmethod
    async def of(cls, num_rollouts: int, store: MemoryStore | None = None, clock: ManualClock | None = None) -> "Stage":
        gateway = a_gateway(store, clock, publication_seconds=10.0)
        experiment = await add_experiment(gateway, trainer_epoch=1)
        trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
        rollouts = [
            await add_service(gateway, ServiceKind.ROLLOUT, f"r{n}", experiment.id) for n in range(num_rollouts)
        ]
        return cls(gateway, experiment, trainer, sorted(rollouts))

    async def restart(self, store: MemoryStore | None = None) -> None:
        """Replace the gateway by one that knows what the store does."""
        known, clock = cast(MemoryStore, store or self.gateway.store), cast(ManualClock, self.gateway.clock)
        self.gateway = a_gateway(known, clock, publication_seconds=10.0)
        await self.gateway.repository.load()
        await self.gateway.registry.load()
        await self.gateway.publications.load()
        self.experiment = self.gateway.repository.get(self.experiment.id)

    async def announce(self, version: int = 1) -> object:
        return await self.gateway.publications.announce(self.experiment.id, self.trainer, a_request(version))

    async def open(self, epoch: int, version: int = 1) -> None:
        meeting = Opened(Rendezvous(host="h", port=1, epoch=epoch, world_size=len(self.rollouts) + 1))
        await self.gateway.publications.apply_to_version(self.experiment.id, version, meeting)

    async def report(self, rollout: str, state: ReceiveState, epoch: int, version: int = 1) -> object:
        checksum = a_manifest(version).checksum if state is ReceiveState.RECEIVED else None
        observed = ObservedState(
            experiment_id=self.experiment.id,
            state=WorkState.RUNNING,
            policy_version=version - 1,
            publication=PublicationReport(version=version, epoch=epoch, state=state, checksum=checksum),
        )
        return await say(self.gateway, rollout, observed)

    async def publish(self, version: int, epoch: int) -> None:
        await self.announce(version)
        await self.open(epoch, version)
        for state in (ReceiveState.JOINED, ReceiveState.RECEIVED):
            for rollout in self.rollouts:
                await self.report(rollout, state, epoch, version)

    async def desired_of(self, service_id: str) -> DesiredState:
        return self.gateway.fleet.desired(self.gateway.registry.get(service_id))

    async def close(self, reason: str) -> None:
        async with self.gateway.store.transaction() as change:
            self.gateway.publications.stage_close(change, self.experiment.id, reason)

    async def gone(self, service: LiveService) -> None:
        async with self.gateway.store.transaction() as change:
            self.gateway.publications.stage_gone(change, self.experiment.id, service, "its lease ended")

    async def phase(self, version: int = 1) -> PublicationPhase:
        return (await self.gateway.publications.get(self.experiment.id, version)).phase


async def test_members_are_told_what_to_do_and_switch_when_all_have_received() -> None:
    stage = await Stage.of(2)
    await stage.announce()
    await stage.open(1)

    desired = await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)
    assert desired.publication.rank == 1 and desired.publication.rendezvous.epoch == 1  # type: ignore[attr-defined]
    await stage.report(stage.rollouts[1], ReceiveState.JOINED, 1)
    assert await stage.phase() is PublicationPhase.TRANSFERRING

    await stage.report(stage.rollouts[0], ReceiveState.RECEIVED, 1)
    assert stage.experiment.record.policy_version == 0
    desired = await stage.report(stage.rollouts[1], ReceiveState.RECEIVED, 1)

    assert await stage.phase() is PublicationPhase.COMMITTED
    assert (stage.experiment.record.policy_version, stage.experiment.record.published_step) == (1, 1)
    assert (desired.policy_version, desired.publication) == (1, None)  # type: ignore[attr-defined]
    assert desired.weights_url == "http://127.0.0.1/t/v1/weights/1"  # type: ignore[attr-defined]


async def test_rollouts_are_told_which_image_was_committed() -> None:
    store = MemoryStore()
    stage = await Stage.of(2, store)
    assert (await stage.desired_of(stage.rollouts[0])).policy_checksum is None

    await stage.publish(1, epoch=1)

    desired = await stage.desired_of(stage.rollouts[0])
    named = a_manifest(1).checksum, a_manifest(1).digest
    assert (desired.policy_version, desired.policy_checksum, desired.policy_digest) == (1, *named)
    await stage.restart(store)
    desired = await stage.desired_of(stage.rollouts[0])
    assert (desired.policy_checksum, desired.policy_digest) == named


async def test_the_same_membership_uses_its_epoch_again() -> None:
    stage = await Stage.of(2)
    await stage.publish(1, epoch=1)

    publication = await stage.announce(2)

    assert publication.epoch == 1 and publication.rendezvous is not None  # type: ignore[attr-defined]
    for state in (ReceiveState.JOINED, ReceiveState.RECEIVED):
        for rollout in stage.rollouts:
            await stage.report(rollout, state, 1, 2)
    assert stage.experiment.record.policy_version == 2


@pytest.mark.parametrize("change", ["joins", "leaves"])
async def test_another_membership_opens_another_epoch(change: str) -> None:
    stage = await Stage.of(2)
    await stage.publish(1, epoch=1)
    if change == "joins":
        await add_service(stage.gateway, ServiceKind.ROLLOUT, "new", stage.experiment.id)
    else:
        await stage.gateway.fleet.leave(stage.rollouts[0], reason="it died")

    publication = await stage.announce(2)

    assert publication.epoch == 2 and publication.rendezvous is None  # type: ignore[attr-defined]
    assert len(publication.members) == (3 if change == "joins" else 1)  # type: ignore[attr-defined]


async def test_who_cannot_receive_is_no_member() -> None:
    stage = await Stage.of(1)
    gateway, experiment = stage.gateway, stage.experiment
    loading = await add_service(gateway, ServiceKind.ROLLOUT, "loading", experiment.id)
    await say(gateway, loading, ObservedState(experiment_id=experiment.id, state=WorkState.STARTING, policy_version=-1))
    deaf = (await gateway.fleet.register(a_registration(incarnation="deaf", capabilities=Capabilities()))).service_id
    await gateway.registry.assign(gateway.registry.get(deaf), experiment.id)
    await say(gateway, deaf, ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING, policy_version=0))
    draining = await add_service(gateway, ServiceKind.ROLLOUT, "draining", experiment.id)
    await gateway.fleet.drain(draining)

    publication = await stage.announce()

    assert [m.service_id for m in publication.members] == stage.rollouts  # type: ignore[attr-defined]


async def test_without_rollouts_a_version_is_committed_at_once() -> None:
    stage = await Stage.of(0)

    publication = await stage.announce()

    assert publication.phase is PublicationPhase.COMMITTED  # type: ignore[attr-defined]
    assert stage.experiment.record.policy_version == 1


async def test_stale_versions_strangers_and_resting_experiments_are_refused() -> None:
    stage = await Stage.of(0)
    await stage.announce()

    with pytest.raises(StalePolicyVersion):
        await stage.announce(1)
    with pytest.raises(Conflict, match="not the trainer"):
        await stage.gateway.publications.announce(stage.experiment.id, "someone", a_request(2))
    with pytest.raises(NotFound):
        await stage.gateway.publications.get(stage.experiment.id, 7)


async def test_a_member_that_dies_is_taken_out_and_its_lease_ends_the_epoch() -> None:
    stage = await Stage.of(2)
    await stage.announce()
    await stage.open(1)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    await stage.gateway.fleet.leave(stage.rollouts[1], reason="its lease ended")

    publication = await stage.gateway.publications.get(stage.experiment.id, 1)
    assert (publication.epoch, publication.phase) == (2, PublicationPhase.PREPARING)
    assert [m.service_id for m in publication.members] == stage.rollouts[:1]


async def test_each_phase_has_a_deadline_and_each_epoch_begins_a_new_one() -> None:
    clock = ManualClock()
    stage = await Stage.of(2, clock=clock)
    await stage.announce()
    clock.advance(25.0)
    await stage.gateway.publications.check_deadlines()
    assert await stage.phase() is PublicationPhase.PREPARING, "the sender has longer than the members"
    await stage.open(1)
    clock.advance(9.0)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)
    await stage.gateway.publications.check_deadlines()
    assert (await stage.gateway.publications.get(stage.experiment.id, 1)).epoch == 1

    clock.advance(1.1)
    await stage.gateway.publications.check_deadlines()

    publication = await stage.gateway.publications.get(stage.experiment.id, 1)
    assert (publication.epoch, len(publication.members)) == (2, 1)
    clock.advance(29.0)
    await stage.gateway.publications.check_deadlines()
    assert await stage.phase() is PublicationPhase.PREPARING
    clock.advance(2.0)
    await stage.gateway.publications.check_deadlines()
    assert await stage.phase() is PublicationPhase.ABORTED


async def test_a_sender_that_dies_aborts_and_its_successor_opens_a_new_epoch() -> None:
    stage = await Stage.of(1)
    await stage.announce()
    await stage.open(1)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    await stage.gateway.fleet.leave(stage.trainer, reason="its lease ended")
    assert await stage.phase() is PublicationPhase.ABORTED
    assert stage.gateway.publications.order_for(stage.rollouts[0], stage.experiment.id) is None

    stage.trainer = await add_service(stage.gateway, ServiceKind.TRAINER, "t2", stage.experiment.id)
    publication = await stage.announce(1)
    assert publication.epoch == 2 and publication.phase is PublicationPhase.PREPARING  # type: ignore[attr-defined]


async def test_a_sender_that_announces_again_begins_a_new_epoch_once_it_had_opened_one() -> None:
    # The trainer's worker was started again inside the same service: the old store is gone with it.
    stage = await Stage.of(1)
    first = await stage.announce()
    assert await stage.announce() == first
    await stage.open(1)

    again = await stage.announce()

    assert again.epoch == 2 and again.rendezvous is None  # type: ignore[attr-defined]


async def test_failed_sends_open_the_next_epoch() -> None:
    stage = await Stage.of(1)
    await stage.announce()
    await stage.open(1)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    publication = await stage.gateway.publications.apply_to_version(
        stage.experiment.id, 1, SendFailed(1, "connection reset")
    )

    assert (publication.epoch, publication.rendezvous) == (2, None)
    assert "connection reset" in (publication.reason or "")


async def test_a_trainer_that_waits_hears_of_the_next_phase_at_once() -> None:
    stage = await Stage.of(1)
    await stage.announce()
    await stage.open(1)
    waiting = asyncio.create_task(
        stage.gateway.publications.get(
            stage.experiment.id, 1, wait_seconds=30.0, phase=PublicationPhase.PREPARING, epoch=1
        )
    )
    await turns()
    assert not waiting.done()

    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    assert (await asyncio.wait_for(waiting, 30.0)).phase is PublicationPhase.TRANSFERRING


async def test_a_restarted_gateway_goes_on_with_an_open_publication() -> None:
    store = MemoryStore()
    stage = await Stage.of(1, store)
    await stage.announce()
    await stage.open(1)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    await stage.restart(store)

    assert await stage.phase() is PublicationPhase.TRANSFERRING
    await stage.gateway.publications.apply_to_version(stage.experiment.id, 1, Sent(1, a_manifest().checksum))
    await stage.report(stage.rollouts[0], ReceiveState.RECEIVED, 1)
    assert stage.experiment.record.policy_version == 1
    assert (await stage.announce(2)).epoch == 1  # type: ignore[attr-defined]


async def test_a_commit_that_cannot_be_stored_is_made_when_the_database_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = await Stage.of(1)
    await stage.announce()
    await stage.open(1)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    async def fails(_writes: object) -> list[Event]:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(stage.gateway.store, "apply", fails)
        with pytest.raises(Unavailable, match="disk is full"):
            await stage.report(stage.rollouts[0], ReceiveState.RECEIVED, 1)
    transferring = PublicationPhase.TRANSFERRING
    publications = stage.gateway.publications
    watching = asyncio.create_task(publications.get(stage.experiment.id, 1, wait_seconds=60.0, phase=transferring))
    await turns()

    assert not watching.done(), "the trainer that watches has to wait, or it would ask again without a pause"
    assert stage.experiment.record.policy_version == 0
    await stage.report(stage.rollouts[0], ReceiveState.RECEIVED, 1)
    assert (await watching).phase is PublicationPhase.COMMITTED
    assert (stage.experiment.record.policy_version, stage.experiment.record.published_step) == (1, 1)


class SkewedClock(ManualClock):
    """A wall clock that is set back, beside a monotonic one that is not."""

    skew = 0.0

    def now(self) -> float:
        return super().now() + self.skew


async def test_the_newest_publication_is_found_whatever_the_clock_says() -> None:
    store, clock = MemoryStore(), SkewedClock()
    stage = await Stage.of(1, store, clock)
    await stage.publish(1, epoch=1)
    clock.advance(60.0)
    clock.skew = -3600.0

    await stage.announce(2)
    await stage.restart(store)

    assert stage.gateway.publications.open_phase(stage.experiment.id) is PublicationPhase.PREPARING
    clock.skew = -7200.0
    for state in (ReceiveState.JOINED, ReceiveState.RECEIVED):
        await stage.report(stage.rollouts[0], state, 1, 2)
    events = await store.events(stage.experiment.id, after=0, limit=99)
    assert all(event.data["seconds"] >= 0 for event in events if event.type == "publication_committed")
    await stage.restart(store)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1, 3)
    assert (await stage.announce(3)).epoch == 1, "the epoch of the newest one is used again"  # type: ignore[attr-defined]


async def test_a_publication_of_an_experiment_that_ends_is_aborted_at_start_up() -> None:
    store = MemoryStore()
    stage = await Stage.of(1, store)
    await stage.announce()
    await stage.gateway.repository.update(stage.experiment, state=ExperimentState.STOPPING)
    await stage.restart(store)

    await stage.open(1)
    for state in (ReceiveState.JOINED, ReceiveState.RECEIVED):
        await stage.report(stage.rollouts[0], state, 1)

    assert await stage.phase() is PublicationPhase.ABORTED
    assert stage.experiment.record.policy_version == 0


async def test_stopping_and_aborting_are_one_change() -> None:
    stage = await Stage.of(1)
    await stage.announce()
    await stage.open(1)
    await stage.report(stage.rollouts[0], ReceiveState.JOINED, 1)

    stopping = stage.gateway.commands.act(stage.experiment.id, Action.STOP)
    await asyncio.gather(stopping, stage.report(stage.rollouts[0], ReceiveState.RECEIVED, 1))

    assert await stage.phase() is PublicationPhase.ABORTED
    assert stage.experiment.record.policy_version == 0


async def test_a_restarted_gateway_waits_for_word_of_every_rollout_before_it_names_members() -> None:
    store = MemoryStore()
    stage = await Stage.of(1, store)
    await stage.restart(store)

    with pytest.raises(Unavailable, match="not yet heard"):
        await stage.announce()


async def test_stopping_aborts_what_is_open() -> None:
    stage = await Stage.of(1)
    await stage.announce()

    await stage.close("the experiment stops")

    assert await stage.phase() is PublicationPhase.ABORTED


async def durations(stage: Stage) -> dict[tuple[str, int], float]:
    rows = await stage.gateway.store.metrics(stage.experiment.id, names=[], after=0, limit=99)
    return {(point.name.removeprefix("publication/"), point.version): point.value for _, point in rows}


async def serve(stage: Stage, rollout: str, version: int) -> None:
    observed = ObservedState(experiment_id=stage.experiment.id, state=WorkState.RUNNING, policy_version=version)
    await say(stage.gateway, rollout, observed)


async def test_that_a_version_is_served_is_stored_with_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = await Stage.of(1, clock=ManualClock())
    await stage.publish(1, 1)
    stored, apply = list[list[str]](), stage.gateway.store.apply

    async def noted(writes: Any) -> Any:
        stored.append([each.kind for each in writes if isinstance(each, AppendEvent)])
        return await apply(writes)

    monkeypatch.setattr(stage.gateway.store, "apply", noted)
    await serve(stage, stage.rollouts[0], 1)
    assert stored == []
    with pytest.raises(Conflict):
        async with stage.gateway.store.transaction():
            raise Conflict("what it was put together for is over")

    await stage.announce(2)
    await turns()

    assert stored == [["publication_served", "publication_announced"]]


async def test_each_part_is_timed_until_every_member_serves_the_version() -> None:
    clock = ManualClock()
    stage = await Stage.of(2, clock=clock)
    await stage.announce()
    await stage.open(1)
    clock.advance(2.0)
    for rollout in stage.rollouts:
        await stage.report(rollout, ReceiveState.JOINED, 1)
    clock.advance(3.0)
    for rollout in stage.rollouts:
        await stage.report(rollout, ReceiveState.RECEIVED, 1)
    clock.advance(0.5)
    await serve(stage, stage.rollouts[0], 1)
    assert await durations(stage) == {}
    clock.advance(0.25)
    await serve(stage, stage.rollouts[1], 1)

    first, second = stage.rollouts
    events = await stage.gateway.store.events(stage.experiment.id, after=0, limit=99)
    assert [each.data for each in events if each.type == "publication_served"] == [
        {
            "version": 1,
            "members": {
                second: {"negotiate": 2.0, "transfer": 3.0, "commit": 0.75},
                first: {"negotiate": 2.0, "transfer": 3.0, "commit": 0.5},
            },
        }
    ]
    times = {("prepare_seconds", 1): 2.0, ("transfer_seconds", 1): 3.0, ("commit_seconds", 1): 0.75}
    assert await durations(stage) == times

    await serve(stage, stage.rollouts[1], 1)
    assert await durations(stage) == times


@pytest.mark.parametrize("killed_after", ["announced", "prepare", "transfer", "first"])
async def test_each_part_is_timed_whenever_the_gateway_is_killed(killed_after: str) -> None:
    clock = ManualClock()
    stage = await Stage.of(2, clock=clock)

    async def maybe_killed(moment: str) -> None:
        if moment == killed_after:
            await stage.restart()

    await stage.announce()
    await stage.open(1)
    await maybe_killed("announced")
    clock.advance(2.0)
    for rollout in stage.rollouts:
        await stage.report(rollout, ReceiveState.JOINED, 1)
    await maybe_killed("prepare")
    clock.advance(3.0)
    for rollout in stage.rollouts:
        await stage.report(rollout, ReceiveState.RECEIVED, 1)
    await maybe_killed("transfer")
    clock.advance(0.5)
    await serve(stage, stage.rollouts[0], 1)
    await maybe_killed("first")
    clock.advance(0.25)
    for rollout in stage.rollouts:
        await serve(stage, rollout, 1)

    times = {("prepare_seconds", 1): 2.0, ("transfer_seconds", 1): 3.0, ("commit_seconds", 1): 0.75}
    assert await durations(stage) == times
    await stage.restart()
    clock.advance(9.0)
    await serve(stage, stage.rollouts[1], 1)
    assert await durations(stage) == times


async def served(stage: Stage) -> list[Mapping[str, Any]]:
    events = await stage.gateway.store.events(stage.experiment.id, after=0, limit=99)
    return [each.data for each in events if each.type == "publication_served"]


async def test_nobody_waits_for_a_member_that_died_to_serve_the_version() -> None:
    clock = ManualClock()
    stage = await Stage.of(2, clock=clock)
    await stage.publish(1, 1)
    await serve(stage, stage.rollouts[0], 1)
    clock.advance(4.0)

    service = stage.gateway.registry.get(stage.rollouts[1])
    await stage.gone(service)

    assert (await durations(stage))["commit_seconds", 1] == 4.0
    assert [list(each["members"]) for each in await served(stage)] == [[stage.rollouts[0]]], "it did not serve it"


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_version_that_no_member_served_is_not_served_when_the_last_one_dies(is_killed: bool) -> None:
    stage = await Stage.of(2, clock=ManualClock())
    await stage.publish(1, 1)
    for rollout in stage.rollouts:
        if is_killed:
            await stage.restart()
        await stage.gone(stage.gateway.registry.get(rollout))

    assert await served(stage) == []
    assert set(await durations(stage)) == {("prepare_seconds", 1), ("transfer_seconds", 1)}
    await stage.restart()
    assert stage.gateway.publications.durations._committed == {}, "nothing of it is waited for"


async def test_the_last_version_of_an_experiment_is_timed_as_far_as_it_came() -> None:
    stage = await Stage.of(1, clock=ManualClock())
    await stage.publish(1, 1)

    await stage.close("training is over")

    assert set(await durations(stage)) == {("prepare_seconds", 1), ("transfer_seconds", 1)}
    events = await stage.gateway.store.events(stage.experiment.id, after=0, limit=99)
    assert "publication_served" not in {each.type for each in events}, "no member ever served it"


async def test_followers_and_web_hooks_hear_soon_that_a_version_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = await Stage.of(1, clock=ManualClock())
    await stage.publish(1, 1)
    log, told = stage.gateway.events, list[str]()
    tell = lambda change, _experiment, kind, *_: change.then(lambda: told.append(kind))  # noqa: E731
    monkeypatch.setattr(log.webhooks, "stage", tell)
    stored = await stage.gateway.store.events(stage.experiment.id, after=0, limit=99)
    followed = log.follow(stage.experiment.id, stored[-1].id, is_over=lambda: False, heartbeat_seconds=60.0)
    next_event = asyncio.ensure_future(anext(followed))
    await turns()

    await serve(stage, stage.rollouts[0], 1)

    async with asyncio.timeout(5):
        event = await next_event
    assert event is not None and event.type == "publication_served"
    assert told == ["publication_served"]
    await followed.aclose()  # type: ignore[attr-defined]


async def test_times_of_what_could_not_be_stored_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    stage = await Stage.of(1, clock=clock)
    await stage.announce()
    await stage.open(1)
    (rollout,) = stage.rollouts

    async def fails(_writes: object) -> list[Event]:
        raise Unavailable("the disk is full")

    async def is_lost(say_it: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(stage.gateway.store, "apply", fails)
            with pytest.raises(Unavailable):
                await say_it()

    for state in (ReceiveState.JOINED, ReceiveState.RECEIVED):
        await is_lost(lambda state=state: stage.report(rollout, state, 1))
        clock.advance(2.0)
        await stage.report(rollout, state, 1)
    await serve(stage, rollout, 1)
    await is_lost(lambda: durations(stage))
    assert stage.gateway.publications.durations.newest(stage.experiment.id) == {}
    clock.advance(0.5)
    await serve(stage, rollout, 1)
    await serve(stage, rollout, 1)
    clock.advance(0.25)

    parts = {"negotiate": 2.0, "transfer": 2.0, "commit": 0.5}
    events = await stage.gateway.store.events(stage.experiment.id, after=0, limit=99)
    assert stage.gateway.publications.durations.newest(stage.experiment.id) == {rollout: parts}
    assert [each.data for each in events if each.type == "publication_served"] == [
        {"version": 1, "members": {rollout: parts}}
    ]


async def test_an_aborted_publication_is_not_timed() -> None:
    stage = await Stage.of(1, clock=ManualClock())
    await stage.announce()

    await stage.close("stopped")

    assert await durations(stage) == {}


async def test_a_gateway_that_stood_still_closes_no_epoch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    stage = await Stage.of(1, clock=clock)
    rounds, standstills = 0, [60.0]
    await stage.announce()
    await stage.open(1)

    async def a_round() -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 2 and standstills:
            clock.advance(standstills.pop())

    monkeypatch.setattr(reconciler, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(stage.gateway.scheduler, "reconcile", a_round)
    async with running(stage.gateway.reconciler.run()):
        await until(lambda: not standstills)
        seen = rounds
        await until(lambda: rounds > seen + 1)

        assert await stage.phase() is PublicationPhase.PREPARING
        assert len(stage.gateway.registry) == 2
    await stop(stage.gateway)


async def test_what_a_member_reports_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = await Stage.of(8)
    await stage.announce()
    await stage.open(epoch=1)
    written, woken = list[int](), list[str]()
    store, registry = stage.gateway.store, stage.gateway.registry
    apply = store.apply

    async def counted(writes: Any) -> Any:
        written.append(len(writes))
        return await apply(writes)

    monkeypatch.setattr(store, "apply", counted)
    for name in stage.rollouts:
        registry.get(name).changed.next.add_done_callback(lambda _, name=name: woken.append(name))  # type: ignore[misc]

    for name in stage.rollouts[:-1]:
        await stage.report(name, ReceiveState.JOINED, epoch=1)
    await turns()
    assert (written, woken) == ([], []), "how far each of them is stands in no row, and is no order of anybody's"

    await stage.report(stage.rollouts[-1], ReceiveState.JOINED, epoch=1)
    await turns()
    assert len(written) == 1 and sorted(woken) == stage.rollouts, "all have joined: the next phase is everybody's"
