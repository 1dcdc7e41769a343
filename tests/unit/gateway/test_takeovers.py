"""The gateway's side of a takeover: what it knows, what it tells, what it writes; the decision is tested by itself."""

import pytest

from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.publications.takeovers import Takeovers
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.writes import PutCheckpoint
from flotilla.shared.checkpoints.takeover import RefusedIncarnation, StandingPoint, TakeoverAnswer, TakeoverRequest
from flotilla.shared.errors import ActionNotAllowed, Conflict, Unavailable
from flotilla.shared.schemas.experiment import CheckpointView, ExperimentState
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.plans import WORKERS_PER_EPOCH
from tests.unit.gateway.builders import a_gateway, a_request, add_experiment, add_service, say, spec_document

STEPS = {"steps": 100, "groups_per_mini_batch": 2}


class Stage:
    """A gateway whose experiment has version 32, of step 32."""

    gateway: GatewayState
    experiment: Experiment
    trainer: str
    rollout: str

    @classmethod
    async def of(cls, **record: object) -> "Stage":
        stage = cls()
        stage.gateway = a_gateway()
        facts: dict[str, object] = {"policy_version": 32, "published_step": 32, "step": 32, "trainer_epoch": 1}
        spec = spec_document(optimisation=STEPS)
        stage.experiment = await add_experiment(stage.gateway, spec=spec, **(facts | record))
        stage.trainer = await add_service(stage.gateway, ServiceKind.TRAINER, "t", stage.experiment.id)
        stage.rollout = await add_service(stage.gateway, ServiceKind.ROLLOUT, "r", stage.experiment.id)
        return stage

    @property
    def takeovers(self) -> Takeovers:
        gateway = self.gateway
        return Takeovers(
            gateway.repository, gateway.registry, gateway.store, gateway.events, gateway.commands.live.stage_restored
        )

    async def serve(self, version: int) -> None:
        observed = ObservedState(experiment_id=self.experiment.id, state=WorkState.RUNNING, policy_version=version)
        await say(self.gateway, self.rollout, observed)

    async def take_over(self, step: int) -> TakeoverAnswer:
        point = StandingPoint(version=step, step=step)
        request = TakeoverRequest(step=step, published=point)
        return await self.takeovers.decide(self.experiment.id, self.trainer, request)

    async def events(self) -> list[str]:
        return [event.type for event in await self.gateway.store.events(self.experiment.id, after=0, limit=100)]


async def test_a_version_that_nobody_can_give_is_lost_and_told_of() -> None:
    stage = await Stage.of(is_trained=True)
    await stage.serve(32)

    answer = await stage.take_over(30)

    assert [(point.version, point.step) for point in answer.points] == [(30, 30), (33, 30)]
    assert answer.lost == 32
    record = stage.experiment.record
    assert (record.policy_version, record.step, record.is_trained) == (32, 30, False)
    assert "rolled_back" in await stage.events()


async def test_numbers_that_were_announced_or_are_served_are_used() -> None:
    stage = await Stage.of()
    await stage.serve(40)

    assert (await stage.take_over(30)).points[-1].version == 41

    await stage.serve(32)
    await stage.gateway.publications.announce(stage.experiment.id, stage.trainer, a_request(50))
    assert (await stage.take_over(30)).points[-1].version == 51


async def test_a_trainer_that_lost_nothing_is_told_so() -> None:
    stage = await Stage.of()
    await stage.serve(32)

    answer = await stage.take_over(32)

    assert ([point.version for point in answer.points], answer.lost) == ([32], None)
    assert "rolled_back" not in await stage.events()


async def test_nothing_is_decided_before_every_rollout_was_heard() -> None:
    stage = await Stage.of()
    stage.gateway.registry.get(stage.rollout).is_observed = False

    with pytest.raises(Unavailable, match="not yet heard"):
        await stage.take_over(30)


async def test_only_the_trainer_of_an_active_experiment_takes_over() -> None:
    stage = await Stage.of()
    await stage.serve(32)
    point = StandingPoint(version=0, step=0)

    with pytest.raises(Conflict, match="not the trainer"):
        await stage.takeovers.decide(stage.experiment.id, stage.rollout, TakeoverRequest(step=0, published=point))
    await stage.gateway.commands.fail(stage.experiment, "trainer", "broken")
    with pytest.raises(Conflict, match="failed"):
        await stage.take_over(30)


@pytest.mark.parametrize(("recorded", "epoch"), [(3 * WORKERS_PER_EPOCH + 5, 4), (WORKERS_PER_EPOCH + 2, 2), (7, 1)])
async def test_a_database_that_is_older_than_the_data_plane_appoints_its_trainer_again(
    recorded: int, epoch: int
) -> None:
    stage = await Stage.of()
    refused = RefusedIncarnation(recorded=recorded)

    await stage.takeovers.raise_epoch(stage.experiment.id, stage.trainer, refused)

    assert stage.experiment.record.trainer_epoch == epoch


async def test_what_failed_is_resumed_once_it_has_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check", lambda *_spec: None)
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_args, **_named: None)
    stage = await Stage.of()
    gateway, experiment = stage.gateway, stage.experiment
    await gateway.commands.fail(experiment, "trainer", "the disk was full")

    with pytest.raises(ActionNotAllowed, match="coming to rest"):
        await gateway.commands.act(experiment.id, Action.RESUME)
    await gateway.repository.update(experiment, final_ledger={"train": {}})
    await gateway.commands.act(experiment.id, Action.RESUME)

    record = experiment.record
    assert record.state is ExperimentState.STARTING
    assert (record.problem, record.outcome, record.final_ledger) == (None, None, None)
    assert record.policy_version == 32, "it is the trainer that finds out what is left of it"


async def test_checkpoints_after_the_one_that_training_goes_on_from_are_listed_no_more() -> None:
    stage = await Stage.of()
    await stage.serve(32)
    views = [CheckpointView(step=step, version=step, path=f"/c/{step}", at="now") for step in (20, 30, 32)]
    await stage.gateway.store.apply([PutCheckpoint(stage.experiment.id, view) for view in views])

    await stage.take_over(30)

    assert [view.step for view in await stage.gateway.store.checkpoints(stage.experiment.id)] == [20, 30]
