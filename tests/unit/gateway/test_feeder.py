"""The feeder over the data plane in memory."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.loading import load_training
from flotilla.services.gateway.feeder import feeder as feeding
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.lifecycle.drain_outstanding import drain_outstanding
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PointRecord
from flotilla.shared.clock import Clock, ManualClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.testing.builders import a_group
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, running, spec_document, until

ROWS = [{"prompt": f"p{n}", "label": str(n)} for n in range(3)]


class Rig:
    """A feeder and all that it was given."""

    def __init__(self, experiment: Experiment, store: Store, clock: Clock, status: FeederStatus) -> None:
        self.experiment, self.store, self.clock, self.status = experiment, store, clock, status
        self.feeder = self.another(store=store, status=status)
        self.feed = self.feeder.feed

    def another(
        self,
        dataset: Dataset | None = None,
        store: Store | None = None,
        status: FeederStatus | None = None,
    ) -> Feeder:
        """Make one of the same experiment, as a gateway does that knows nothing of the first unless it is told."""
        dataset = dataset or Dataset(ROWS, self.experiment.spec.data, self.experiment.spec.seed)
        return Feeder(
            self.experiment,
            RowOrder(self.experiment, dataset),
            store or MemoryStore(),
            self.clock,
            status or FeederStatus(),
        )

    def record(self, **changes: object) -> None:
        """Change the experiment's record, as commands and publications do."""
        self.experiment.record = replace(self.experiment.record, **changes)  # type: ignore[arg-type]

    def commit(self, version: int) -> None:
        """Commit a publication."""
        self.record(policy_version=version, published_step=version)

    async def ledger(self) -> Ledger:
        return await self.experiment.train.ledger()

    async def points(self) -> list[PointRecord]:
        """Read what was stored of the experiment's series."""
        return [point for _, point in await self.store.metrics(self.experiment.id, names=[], after=0, limit=9)]


async def a_rig(
    clock: ManualClock | None = None, *, asynchrony: Mapping[str, object] = MappingProxyType({}), **spec: object
) -> Rig:
    """Open one of an experiment that is on-policy, unless ``asynchrony`` says otherwise."""
    gateway = a_gateway(clock=clock)
    asynchrony = {"staleness_threshold": 0, **asynchrony}
    document = a_spec(asynchrony=asynchrony, **spec).model_dump(mode="json")
    experiment = await add_experiment(gateway, spec=document)
    return Rig(experiment, gateway.store, clock or ManualClock(), gateway.feeder_status.of(experiment))


async def test_it_fills_the_budget_and_waits() -> None:
    rig = await a_rig(
        optimisation={"steps": 10, "groups_per_mini_batch": 2},
        asynchrony={"trigger_parameter_sync_step": 2, "staleness_threshold": 0.5},
    )

    assert await rig.feed() > 0.0, "nothing more is admitted, and no second look is needed to know it"
    assert await rig.feed() > 0.0

    ledger = await rig.ledger()
    assert (ledger.issued, ledger.waiting.tasks) == (6, 6), "R * T * (1 + eta) = 2 * 2 * 1.5"


async def test_the_next_group_is_asked_for_once_and_found_again_after_a_lost_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = await a_rig(optimisation={"steps": 9, "groups_per_mini_batch": 2})
    admission = rig.experiment.train.admission
    asked = 0
    original = admission.next_group_id

    async def counted() -> int:
        nonlocal asked
        asked += 1
        return await original()

    monkeypatch.setattr(admission, "next_group_id", counted)
    await rig.feed()
    hop = rig.experiment.train.hop(HopName.TASKS, "r")
    for claim in await hop.claim(2, wait_seconds=0):
        await hop.resolve(claim, Resolution.FILTERED, "same_reward")
    await rig.feed()
    assert (asked, (await rig.ledger()).issued) == (1, 4)

    await rig.experiment.train.remove()
    await rig.feed()
    await rig.feed()

    assert (await rig.ledger()).issued == 2, "the server's own next group, from the beginning"


async def test_epochs_repeat_and_the_end_is_not_over_generated() -> None:
    rig = await a_rig(
        optimisation={"steps": 3, "groups_per_mini_batch": 3},
        asynchrony={"trigger_parameter_sync_step": 9},
    )

    await rig.feed()
    await rig.feed()

    hop = rig.experiment.train.hop(HopName.TASKS, "r")
    claims = await hop.claim(100, wait_seconds=0.01)
    assert [claim.header.group_id for claim in claims] == list(range(9)), "3 steps of 3 groups, not a budget of 27"
    rows = [claim.task().row for claim in claims]
    assert [sorted(rows[3 * epoch : 3 * epoch + 3]) for epoch in range(3)] == [[0, 1, 2]] * 3


async def test_on_policy_tasks_bear_the_version_that_will_sample_them() -> None:
    rig = await a_rig(optimisation={"steps": 3, "groups_per_mini_batch": 2})
    experiment = rig.experiment
    await rig.feed()
    queue = experiment.train.trainer("t")
    await queue.take_over()
    for hop in (experiment.train.hop(HopName.TASKS, "r"), experiment.train.hop(HopName.GENERATED, "w")):
        for claim in await hop.claim(2, wait_seconds=0.01):
            await hop.forward(claim, a_group(claim.task(), version=0))
    await queue.plan(1, await queue.hop.claim(2, wait_seconds=0.01), 0)

    await rig.feed()
    assert (await rig.ledger()).issued == 2, "what was consumed counts until the publication"

    rig.commit(version=1)
    await rig.feed()
    tasks = [claim.task() for claim in await experiment.train.hop(HopName.TASKS, "r").claim(9, wait_seconds=0.01)]
    assert [(task.group_id, task.min_version) for task in tasks] == [(2, 1), (3, 1)]


async def test_what_is_filtered_is_replaced() -> None:
    rig = await a_rig(optimisation={"steps": 1, "groups_per_mini_batch": 2})
    await rig.feed()
    hop = rig.experiment.train.hop(HopName.TASKS, "r")
    [claim, _] = await hop.claim(2, wait_seconds=0.01)
    await hop.resolve(claim, Resolution.FILTERED, "same_reward")

    await rig.feed()

    ledger = await rig.ledger()
    assert (ledger.issued, ledger.outstanding, ledger.balanced) == (3, 2, True)


async def test_a_paused_experiment_issues_nothing_and_goes_on_when_it_is_resumed() -> None:
    rig = await a_rig()
    rig.record(state=ExperimentState.PAUSED)
    async with running(rig.feeder.run()):
        await until(lambda: rig.status.ledger is not None)
        assert (await rig.ledger()).issued == 0

        rig.record(state=ExperimentState.RUNNING)
        rig.experiment.changed.fire()

        await until(lambda: rig.status.ledger is not None and rig.status.ledger.issued == 2)


async def test_a_group_that_ends_wakes_a_blocked_feeder_that_asks_nothing_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeding, "TOLD_SECONDS", 3600.0)
    monkeypatch.setattr(feeding, "BLOCKED_SECONDS", 0.002)
    rig = await a_rig(optimisation={"steps": 9, "groups_per_mini_batch": 2})
    plane, asked = rig.experiment.train, 0
    ledger = plane.ledger

    async def counted() -> Ledger:
        nonlocal asked
        asked += 1
        return await ledger()

    monkeypatch.setattr(plane, "ledger", counted)
    hop = plane.hop(HopName.TASKS, "r")
    async with running(rig.feeder.run()):
        claims = await hop.claim(2, wait_seconds=5)
        await until(lambda: len(rig.experiment.train._store.followers) == 1)  # type: ignore[attr-defined]
        await asyncio.sleep(10 * feeding.BLOCKED_SECONDS)  # the looks of before it was told
        before = asked
        await asyncio.sleep(10 * feeding.BLOCKED_SECONDS)
        assert asked == before

        for claim in claims:
            await hop.resolve(claim, Resolution.FILTERED, "same_reward")

        assert len(await hop.claim(2, wait_seconds=5)) == 2, "both are replaced"
        assert asked == before, "what was told is enough while the end is far"


async def test_a_feeder_that_nobody_tells_anything_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "TOLD_SECONDS", 3600.0)
    rig = await a_rig(optimisation={"steps": 9, "groups_per_mini_batch": 2})

    async def refused(ended: Callable[[int], None]) -> None:
        ended(0)
        raise Unavailable("no permission to subscribe")

    monkeypatch.setattr(rig.experiment.train.admission, "follow_ends", refused)
    hop = rig.experiment.train.hop(HopName.TASKS, "r")
    async with running(rig.feeder.run()):
        [claim, _] = await hop.claim(2, wait_seconds=5)
        await hop.resolve(claim, Resolution.FILTERED, "same_reward")

        assert await hop.claim(1, wait_seconds=5)


async def test_a_publication_that_the_server_forgot_is_recorded_again() -> None:
    clock = ManualClock()
    rig = await a_rig(clock)
    rig.commit(version=4)
    await rig.feed()
    await rig.experiment.train.remove()

    clock.advance(2.0)
    await rig.feed()

    assert await rig.experiment.train.admission.published_version() == 4


async def test_what_the_budget_held_is_stored_with_the_version_that_ends() -> None:
    clock = ManualClock()
    rig = await a_rig(clock, optimisation={"steps": 3, "groups_per_mini_batch": 2})
    await rig.feed()
    clock.advance(5.0)  # the budget was full with what was just issued
    await rig.feed()
    clock.advance(1.5)
    await rig.feed()
    clock.advance(0.25)

    rig.commit(version=1)
    await rig.feed()

    [point] = await rig.points()
    assert (point.name, point.version, point.step, point.value) == ("admission/wait_seconds", 0, 1, 6.75)


async def test_a_killed_gateway_takes_no_versions_wait_with_it() -> None:
    clock = ManualClock()
    rig = await a_rig(clock)
    for _ in range(3):
        await rig.feed()
        clock.advance(2.0)
    await rig.feed()
    rig.commit(version=1)

    await rig.another(store=rig.store).feed()

    [point] = await rig.points()
    assert (point.name, point.version) == ("admission/wait_seconds", 0)
    assert point.value == 6.0, "from the issue that filled the budget"


async def test_a_feeder_that_has_issued_everything_is_not_held_by_the_budget() -> None:
    clock = ManualClock()
    rig = await a_rig(clock, optimisation={"steps": 1, "groups_per_mini_batch": 2})
    for _ in range(3):
        await rig.feed()
        clock.advance(4.0)

    rig.commit(version=1)
    await rig.feed()

    [point] = await rig.points()
    assert point.value == 0.0


async def test_the_next_gateway_goes_on_with_the_next_group() -> None:
    rig = await a_rig()
    await rig.feed()

    await rig.another().feed()

    ledger = await rig.ledger()
    assert (ledger.issued, ledger.balanced) == (2, True)


@pytest.mark.parametrize("lane", list(Lane))
async def test_leftovers_of_every_hop_are_resolved_as_dropped(lane: Lane) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, spec=a_spec(**spec_document()).model_dump(mode="json"))
    plane = experiment.train if lane is Lane.TRAIN else experiment.evaluation
    dataset = Dataset(ROWS, experiment.spec.data, 0)
    await plane.admission.issue_many([dataset.task(n, group_size=2) for n in range(4)], limit=9)
    rollout, reward = plane.hop(HopName.TASKS, "r"), plane.hop(HopName.GENERATED, "w")
    held, *others = await rollout.claim(3, wait_seconds=0.01)
    for claim in others:
        await rollout.forward(claim, a_group(claim.task()))
    [claim] = await reward.claim(1, wait_seconds=0.01)
    await reward.forward(claim, a_group(claim.task(), rewards=[0.0, 1.0]))

    ledger = await drain_outstanding(experiment, lane, "experiment_ended")

    assert ledger.dropped == {"experiment_ended": 4}
    assert (ledger.outstanding, ledger.balanced) == (0, True)
    assert not await rollout.forward(held, a_group(held.task())), "the late rollout has lost its claim"


async def test_a_flood_stops_at_the_bound_and_says_so_until_there_is_room_again() -> None:
    clock = ManualClock()
    long = [{"prompt": "p" * 100_000, "label": "1"}]
    rig = await a_rig(
        clock,
        optimisation={"steps": 10_000, "groups_per_mini_batch": 2},
        asynchrony={"staleness_threshold": 10_000},
        resources={"stream_bytes": 1024**2},
    )
    experiment = rig.experiment
    feeder = rig.another(Dataset(long, experiment.spec.data, 0), status=rig.status)

    for _ in range(5):
        await feeder.feed()
        clock.advance(1.1)
    full = rig.status.full_stream
    issued = (await rig.ledger()).issued

    assert issued == 64, "one batch, issued before the stream was full"
    assert full is not None
    assert full.cause == (
        "stream tasks has reached resources.stream_bytes (1 MiB): nothing is issued, and nothing that would go there "
        "is claimed, until it is emptied"
    )
    rig.record(state=ExperimentState.PAUSED)  # it looks, and issues nothing
    hop = experiment.train.hop(HopName.TASKS, "r")
    claims = await hop.claim(100, wait_seconds=0)
    for claim in claims[8:]:
        await hop.resolve(claim, Resolution.FAILED, "timeout")
    clock.advance(1.1)
    await feeder.feed()
    assert rig.status.full_stream == full, "8 of 10 entries that fit are no real room"
    for claim in claims[:8]:
        await hop.resolve(claim, Resolution.FAILED, "timeout")
    clock.advance(1.1)
    await feeder.feed()
    assert rig.status.full_stream is None


async def test_leftovers_of_a_full_lane_are_resolved() -> None:
    rig = await a_rig(resources={"stream_bytes": 1024**2})
    experiment = rig.experiment
    await rig.feed()
    rollout = experiment.train.hop(HopName.TASKS, "r")
    for claim in await rollout.claim(2, wait_seconds=0):
        await rollout.forward(claim, a_group(claim.task(), sampled_tokens=100_000))
    assert (await experiment.train.admission.bound(1024**2))[HopName.GENERATED] > 1024**2

    ledger = await drain_outstanding(experiment, Lane.TRAIN, "experiment_ended")

    assert (ledger.outstanding, ledger.dropped["experiment_ended"]) == (0, ledger.issued)


async def test_plans_of_an_ended_experiment_are_committed_up_to_its_last_checkpoint_and_dropped_after_it() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, spec=a_spec(**spec_document()).model_dump(mode="json"))
    plane = experiment.train
    dataset = Dataset(ROWS, experiment.spec.data, 0)
    await plane.admission.issue_many([dataset.task(n, group_size=2) for n in range(3)], limit=9)
    rollout, reward, trainer = plane.hop(HopName.TASKS, "r"), plane.hop(HopName.GENERATED, "w"), plane.trainer("t")
    await trainer.take_over()
    for claim in await rollout.claim(3, wait_seconds=0.01):
        await rollout.forward(claim, a_group(claim.task()))
    for claim in await reward.claim(3, wait_seconds=0.01):
        await reward.forward(claim, a_group(claim.task(), rewards=[0.0, 1.0]))
    for step, claim in enumerate(await trainer.hop.claim(3, wait_seconds=0.01), start=1):
        await trainer.plan(step, [claim], step - 1)

    ledger = await drain_outstanding(experiment, Lane.TRAIN, "experiment_ended", durable_step=2)

    assert (ledger.trained, ledger.planned, ledger.dropped) == (2, 0, {"no_checkpoint": 1})
    assert ledger.balanced


async def test_a_gateway_that_restarts_in_the_middle_of_an_epoch_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("a", 5), ("b", 3)):
        (tmp_path / f"{name}.csv").write_text("prompt,label\n" + "".join(f"{name}{n},1\n" for n in range(count)))
    sources = [{"path": str(tmp_path / f"{name}.csv"), "weight": weight} for name, weight in (("a", 2), ("b", 1))]
    rig = await a_rig(
        seed=11,
        data={"sources": sources},
        optimisation={"steps": 9, "groups_per_mini_batch": 4},
        asynchrony={"trigger_parameter_sync_step": 9},
    )
    experiment = rig.experiment

    for batch in (4, 3, 29):  # each by a gateway that knows nothing of the others, and loads the files again
        monkeypatch.setattr(feeding, "BATCH", batch)
        dataset = load_training(experiment.spec.data, seed=11)
        await rig.another(dataset).feed()

    claims = await experiment.train.hop(HopName.TASKS, "r").claim(99, wait_seconds=0.01)
    issued = [(claim.task().group_id, claim.task().messages[0].content) for claim in claims]
    whole = load_training(experiment.spec.data, seed=11)
    assert issued == [(n, whole.task(n, group_size=1).messages[0].content) for n in range(36)]
    own = [prompt for _, prompt in issued if prompt.startswith("a")]
    assert len(own) == 24 and all(len(set(own[n : n + 5])) == 5 for n in range(0, 20, 5)), "whole epochs of five rows"


async def test_redundant_groups_are_issued_beyond_the_budget() -> None:
    rig = await a_rig(
        optimisation={"steps": 3, "groups_per_mini_batch": 2},
        asynchrony={"redundant_groups": 3, "on_max_lag": "drop"},
    )

    assert await rig.feed() == 0.0
    assert await rig.feed() == 0.0
    assert await rig.feed() > 0.0

    assert (await rig.ledger()).issued == 3, "as many are sampled as that, and the budget is 2"
