"""An experiment that trains the groups of another: what it takes, and when it ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.feeder.opening import open_subscribed, unsubscribe
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.feeder.subscribed import LOOK_SECONDS
from flotilla.services.gateway.lifecycle import unusable
from flotilla.services.gateway.lifecycle.drain_outstanding import drain_outstanding
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.records.repository import Experiment, check_not_subscribed
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.runtime.work import ExperimentWork
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PutRecord
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import ActionNotAllowed, DataError, InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.plans import TrainerQueue
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, a_spec, add_experiment, add_service, say, spec_document


def subscribing(**changes: Any) -> dict[str, Any]:
    """Make the spec of two steps, with two groups each, of what another experiment samples."""
    return spec_document(**{"data": {"from": "tiny-1"}} | changes)


class Rig:
    """A source, a subscriber and its feeder, in memory."""

    def __init__(
        self,
        gateway: GatewayState,
        source: Experiment,
        taker: Experiment,
        planes: MemoryPlanes,
        clock: ManualClock | None = None,
    ) -> None:
        self.planes = planes
        self.gateway, self.source, self.taker, self.ended = gateway, source, taker, list[str]()
        self.clock = ManualClock() if clock is None else clock
        self.num_scored = self.num_trainers = 0

        async def end(experiment: Experiment) -> None:
            self.ended.append(experiment.id)

        self.feeder = open_subscribed(
            taker,
            MemoryStore(),
            self.clock,
            FeederStatus(),
            source=lambda: gateway.repository.find("tiny-1"),
            has_caught_up=lambda since: ExperimentWork(gateway)._has_caught_up(taker, since),
            on_end=end,
        )

    async def score(self, count: int, version: int = 0) -> None:
        """Let the source sample and grade groups."""
        tasks = [a_task(self.num_scored + number, min_version=version) for number in range(count)]
        self.num_scored += count
        await self.source.train.admission.issue_many(tasks, limit=1000)
        for name in (HopName.TASKS, HopName.GENERATED):
            hop = self.source.train.hop(name, name.value)
            for claim in await hop.claim(count, wait_seconds=0):
                made = a_group(claim.task(), version=version) if name is HopName.TASKS else claim.group()
                assert await hop.forward(claim, made if name is HopName.TASKS else graded(made, [0.0, 1.0]))

    async def end_source(self) -> None:
        """Let the source have come to rest."""
        self.source.record = replace(self.source.record, state=ExperimentState.COMPLETED, final_ledger={"train": {}})

    async def trains(self, step: int | None) -> LiveService:
        """Let another trainer work for the subscriber, and say how many steps it has done."""
        self.num_trainers += 1
        service_id = await add_service(self.gateway, ServiceKind.TRAINER, f"trainer {self.num_trainers}", "taker-1")
        observed = ObservedState(experiment_id="taker-1", state=WorkState.RUNNING, step=step)
        await say(self.gateway, service_id, observed)
        return self.gateway.registry.get(service_id)

    async def counts(self) -> tuple[int, int]:
        """Count what the subscriber was issued, and has outstanding."""
        ledger = await self.taker.train.ledger()
        assert ledger.balanced
        return ledger.issued, ledger.outstanding


async def drain(queue: TrainerQueue) -> None:
    """End all that a trainer finds."""
    await queue.take_over()
    for claim in await queue.hop.claim(9, wait_seconds=0):
        await queue.hop.resolve(claim, Resolution.FILTERED, "too_long")


async def a_rig(**changes: Any) -> Rig:
    planes, clock = MemoryPlanes(), ManualClock()
    gateway = a_gateway(planes=planes, clock=clock)
    source = await add_experiment(gateway)
    document = validate_spec(subscribing(**changes)).model_dump(mode="json")
    return Rig(gateway, source, await add_experiment(gateway, "taker-1", spec=document), planes, clock)


async def upgraded(rig: Rig, *, refuses: str) -> GatewayState:
    """Start a gateway of another release, which refuses one of the two specs, on the same streams."""
    store = MemoryStore()
    for each in (rig.source, rig.taker):
        unknown = {"key_of_before": 1} if each.id == refuses else {}
        await store.apply([PutRecord(replace(each.record, spec={**each.record.spec, **unknown}))])
    gateway = a_gateway(store, planes=rig.planes)
    await gateway.repository.load()
    return gateway


async def test_it_takes_what_is_scored_once_it_has_subscribed() -> None:
    rig = await a_rig()
    await rig.score(1)
    await rig.feeder.feed()
    await rig.score(3)

    await rig.feeder.feed()

    assert await rig.counts() == (3, 3)
    assert await rig.source.train.sharing.subscribers() == {"taker-1": 3}


async def test_it_notes_what_may_still_come_once_it_has_taken_all_that_was_offered() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(3)
    queue = rig.source.train.trainer("trainer")
    await queue.take_over()
    claims = await queue.hop.claim(3, wait_seconds=0)
    assert await queue.plan(1, claims[:2], version=0)
    await queue.commit([1])
    takers = rig.taker.train.trainer("taker")

    rig.clock.advance(LOOK_SECONDS)
    await rig.feeder.feed()  # takes them
    assert await takers.lowest_open(are_taken=True) == 0
    await drain(takers)
    rig.clock.advance(LOOK_SECONDS)
    await rig.feeder.feed()

    assert await takers.lowest_open(are_taken=True) == 2, "the source has not trained that one"


async def test_it_subscribes_before_it_runs_and_takes_when_it_does() -> None:
    rig = await a_rig()
    rig.taker.record = replace(rig.taker.record, state=ExperimentState.STARTING)
    await rig.feeder.feed()
    await rig.score(2)
    await rig.feeder.feed()
    assert await rig.counts() == (0, 0)

    rig.taker.record = replace(rig.taker.record, state=ExperimentState.RUNNING)
    await rig.feeder.feed()

    assert await rig.counts() == (2, 2)


async def test_no_more_is_taken_than_its_steps_need() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(7)

    await rig.feeder.feed()

    assert await rig.counts() == (4, 4)
    trainer = rig.taker.train.trainer("trainer")
    await trainer.take_over()
    claims = await trainer.hop.claim(1, wait_seconds=0)
    await trainer.hop.resolve(claims[0], Resolution.DROPPED, "stale")
    await rig.feeder.feed()
    assert await rig.counts() == (5, 4)


async def test_another_gateway_goes_on_where_the_first_one_was() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(2)
    await rig.feeder.feed()
    await rig.score(1)

    again = Rig(rig.gateway, rig.source, rig.taker, rig.planes)
    await again.feeder.feed()

    assert await rig.counts() == (3, 3)


async def test_it_ends_once_its_source_has_and_no_step_can_be_filled() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(3)
    await rig.end_source()
    await rig.feeder.feed()
    await rig.feeder.feed()
    assert rig.ended == []  # of three groups two make a step

    trainer = rig.taker.train.trainer("trainer")
    await trainer.take_over()
    claims = await trainer.hop.claim(2, wait_seconds=0)
    assert await trainer.plan(1, claims, version=0)
    await rig.feeder.feed()
    assert rig.ended == []  # it is planned, and not yet trained: a stop would come before it

    await rig.trains(step=1)
    await rig.feeder.feed()

    assert rig.ended == ["tiny-1"]


@pytest.mark.parametrize("died", ["given up", "cut off"])
async def test_it_does_not_end_before_the_steps_of_a_trainer_that_died_are_trained_again(died: str) -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(2)
    await rig.feeder.feed()
    await rig.end_source()
    trainer = rig.taker.train.trainer("trainer")
    await trainer.take_over()
    assert await trainer.plan(1, await trainer.hop.claim(2, wait_seconds=0), version=0)
    service = await rig.trains(step=1)
    if died == "given up":
        await rig.gateway.registry.assign(service, None)
    else:
        rig.gateway.registry.shorten(service)

    await rig.feeder.feed()
    assert rig.ended == []  # its checkpoint is older: there is nobody who has trained the step
    await rig.gateway.registry.assign(service, None)
    other = await rig.trains(step=None)
    await rig.feeder.feed()
    assert rig.ended == []
    await rig.gateway.registry.assign(other, None)
    again = await rig.trains(step=0)
    await rig.feeder.feed()
    assert rig.ended == []
    observed = ObservedState(experiment_id="taker-1", state=WorkState.RUNNING, step=1)
    await say(rig.gateway, again.id, observed)
    await rig.feeder.feed()

    assert rig.ended == ["tiny-1"]


async def test_it_does_not_end_before_a_trainer_that_may_hang_has_spoken_again() -> None:
    """The stop would find it hanging, and what it has trained since its last checkpoint would be lost."""
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(2)
    await rig.feeder.feed()
    trainer = rig.taker.train.trainer("trainer")
    await trainer.take_over()
    assert await trainer.plan(1, await trainer.hop.claim(2, wait_seconds=0), version=0)
    service = await rig.trains(step=1)
    rig.clock.advance(1.0)
    await rig.end_source()

    for _ in range(3):
        await rig.feeder.feed()
        rig.clock.advance(2.0)
    assert rig.ended == []
    await say(rig.gateway, service.id, ObservedState(experiment_id="taker-1", state=WorkState.RUNNING, step=1))
    await rig.feeder.feed()

    assert rig.ended == ["tiny-1"]


async def test_a_source_that_was_deleted_is_said() -> None:
    rig = await a_rig()
    async with rig.gateway.repository.transaction() as change:
        rig.gateway.repository.stage_removal(change, "tiny-1")

    with pytest.raises(DataError, match=r"data\.from: the experiment tiny-1 was deleted"):
        await rig.feeder.feed()


async def test_nothing_is_kept_for_one_that_has_ended() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.score(2)
    await rig.feeder.feed()

    await unsubscribe(rig.taker, rig.gateway.repository)
    ledger = await drain_outstanding(rig.taker, Lane.TRAIN, "experiment_ended")

    assert (ledger.issued, ledger.dropped) == (2, {"experiment_ended": 2})
    assert await rig.source.train.sharing.subscribers() == {}


async def test_nothing_is_kept_where_the_source_cannot_be_used_any_more() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    gateway = await upgraded(rig, refuses="tiny-1")
    taker = gateway.repository.get("taker-1")

    await unsubscribe(taker, gateway.repository)

    assert await rig.source.train.sharing.subscribers() == {}


async def test_nothing_is_kept_for_a_subscriber_that_cannot_be_used_any_more() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    await rig.source.train.sharing.subscribe("deleted-1")
    gateway = await upgraded(rig, refuses="taker-1")

    await gateway.cleaning.clean()

    assert await rig.source.train.sharing.subscribers() == {}


async def test_a_subscription_of_one_at_work_stays() -> None:
    rig = await a_rig()
    await rig.feeder.feed()

    await rig.gateway.cleaning.clean()

    assert await rig.source.train.sharing.subscribers() == {"taker-1": 0}
    rig.taker.record = replace(rig.taker.record, state=ExperimentState.STOPPED)
    await rig.gateway.cleaning.clean()
    assert await rig.source.train.sharing.subscribers() == {}


async def test_a_source_that_cannot_be_used_is_not_deleted_while_its_groups_are_trained() -> None:
    rig = await a_rig()
    gateway = await upgraded(rig, refuses="tiny-1")

    with pytest.raises(ActionNotAllowed, match="cannot delete tiny-1: taker-1, which is running, trains its groups"):
        await unusable.delete("tiny-1", gateway.commands, gateway.repository)


async def test_groups_that_are_all_refused_end_it() -> None:
    rig = await a_rig()
    await rig.feeder.feed()
    trainer = rig.taker.train.trainer("trainer")
    await trainer.take_over()
    with pytest.raises(DataError, match="none of 64 groups could be trained: invalid_tokens 64"):
        for _ in range(40):
            await rig.score(2)
            await rig.feeder.feed()
            for claim in await trainer.hop.claim(4, wait_seconds=0):
                await trainer.hop.resolve(claim, Resolution.FAILED, "invalid_tokens")


async def test_a_source_is_not_deleted_while_its_groups_are_trained() -> None:
    rig = await a_rig()
    await rig.end_source()

    with pytest.raises(ActionNotAllowed, match="cannot delete tiny-1: taker-1, which is running, trains its groups"):
        await rig.gateway.commands.act("tiny-1", Action.DELETE)

    rig.taker.record = replace(rig.taker.record, state=ExperimentState.STOPPED)
    check_not_subscribed("tiny-1", rig.gateway.repository)


async def test_it_resumes_though_its_source_samples_otherwise_since_a_live_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each group carries the temperature that it was sampled at."""
    monkeypatch.setattr(checks, "check", lambda *_: None)
    rig = await a_rig()
    rig.source.spec = a_spec(rollout={"group_size": 2, "sampling": {"temperature": 0.8}})
    left = {"state": ExperimentState.STOPPED, "final_ledger": {"train": {}}, "directory": str(tmp_path / "taker-1")}
    rig.taker.record = replace(rig.taker.record, **left)

    resumed = await rig.gateway.commands.act("taker-1", Action.RESUME)

    assert resumed.state in {ExperimentState.STARTING, ExperimentState.RUNNING}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"rollout": {"group_size": 4}}, {}, "rollout.group_size is 4, and the groups of s-1 are made with 2"),
        ({"rollout": {"group_size": 2, "sampling": {"temperature": 0.5}}}, {}, "temperature is 0.5"),
        ({"algorithm": {"advantage": {"kind": "remax"}}}, {}, "advantage.kind is remax, and the groups"),
        ({}, {"data": {"dump": "/somewhere"}}, "s-1 samples no groups"),
        ({}, {"data": {"from": "other"}}, "s-1 samples no groups"),
    ],
)
def test_groups_that_mean_another_thing_are_refused(ours: dict[str, Any], theirs: dict[str, Any], said: str) -> None:
    source, spec = a_spec(**theirs), validate_spec(subscribing(**ours))

    with pytest.raises(InvalidSpec, match=said):
        checks.subscribed(spec, "s-1", source)


def test_a_name_becomes_the_id() -> None:
    assert checks.subscribed(validate_spec(subscribing()), "tiny-7", a_spec()).data.subscribes_to == "tiny-7"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"from": "s", "dump": "/x"}}, "dump has no effect beside from s"),
        ({"data": {"from": "s", "max_rows": 3}}, "max_rows has no effect beside from s"),
        ({"asynchrony": {"redundant_groups": 2, "on_max_lag": "drop"}}, "redundant_groups 2 has no effect beside"),
        ({"algorithm": {"old_log_probs": "recompute_at_version"}}, "which data.from does not hold"),
        ({"job": {"kind": "sft"}, "rollout": {}, "reward": {}}, "tiny-1 holds groups with rewards, which job.kind sft"),
        ({"resources": {"sharing": "time"}}, "training from data.from needs no rollouts"),
    ],
)  # fmt: skip
def test_keys_that_would_mean_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        validate_spec(subscribing(**changes))


def test_it_needs_no_rollouts_but_for_evaluations_of_its_own() -> None:
    spec = validate_spec(subscribing())
    evaluated = validate_spec(subscribing(evaluation={"path": "/nowhere/held.jsonl", "every_versions": 1}))

    assert not spec.needs_rollouts
    assert evaluated.needs_rollouts
    assert spec.data.subscribes_to == "tiny-1"
    assert validate_spec(spec.model_dump(mode="json")) == spec
