"""Groups of a dump are issued to the trainer as they were kept, in their order, epoch after epoch."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.datasets.loading import load_dump
from flotilla.services.gateway.datasets.made import FROM_DUMP, DumpedGroups, open_maker
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.scheduler.demands import quotas_of
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import HopName, Resolution
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment
from tests.unit.samples.builders import a_step
from tests.unit.samples.test_dump import a_run, an_evaluation


def spec_of(run: Path, **sections: Any) -> ExperimentSpec:
    return a_spec(data={"dump": str(run)}, **sections)


def groups_of(spec: ExperimentSpec, ids: range) -> list[Group]:
    assert spec.data.dump is not None
    return DumpedGroups(Path(spec.data.dump)).groups(load_dump(spec.data, spec.reward, seed=0), ids, issued_at=9.0)


def test_ids_count_what_is_issued_and_the_rest_is_as_it_was_kept(tmp_path: Path) -> None:
    spec = spec_of(a_run(tmp_path / "run", a_step(3, num_groups=3, first=40)))

    first, *_, again = groups_of(spec, range(4))

    assert (first.task.group_id, first.task.min_version, first.task.issued_at) == (0, 0, 9.0)
    assert again.task.group_id == 3, "the dump begins again"
    kept = a_step(3, num_groups=3, first=40).groups[0].group
    for group in (first, again):
        assert group.task.metadata[FROM_DUMP] == {"file": "step-00000003.parquet", "group_id": 40}
        assert (group.task.row, group.task.seed, group.task.messages) == (
            kept.task.row, kept.task.seed, kept.task.messages,
        )  # fmt: skip
        assert [t.reward for t in group.trajectories] == [t.reward for t in kept.trajectories]
        assert [t.versions for t in group.trajectories] == [t.versions for t in kept.trajectories]


def test_a_link_that_leads_to_anothers_later_is_not_followed(tmp_path: Path) -> None:
    mine = a_run(tmp_path / "mine", a_step(1, num_groups=2), a_step(2, num_groups=2))
    theirs = a_run(tmp_path / "theirs", a_step(1, num_groups=2), a_step(2, num_groups=2))
    link = tmp_path / "link"
    link.symlink_to(mine)
    spec = spec_of(link)

    def refuse(path: str) -> None:
        if Path(path).resolve().is_relative_to(theirs):
            raise DataError("it is another owner's")

    dumped, dataset = DumpedGroups(link, refuse), load_dump(spec.data, spec.reward, seed=0)
    assert len(dumped.groups(dataset, range(2))) == 2
    link.unlink()
    link.symlink_to(theirs)

    with pytest.raises(DataError, match="another owner's"):
        dumped.groups(dataset, range(2, 4))


def test_only_the_first_groups_may_be_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_step(1, num_groups=3))
    spec = a_spec(data={"dump": str(run), "max_rows": 2})

    assert [group.task.metadata[FROM_DUMP]["group_id"] for group in groups_of(spec, range(4))] == [0, 1, 0, 1]


async def test_the_feeder_issues_them_to_the_trainer_whatever_its_version(tmp_path: Path) -> None:
    spec = spec_of(
        a_run(tmp_path / "run", a_step(1, num_groups=3)), optimisation={"steps": 30, "groups_per_mini_batch": 2}
    )
    experiment = await add_experiment(a_gateway(), spec=spec.model_dump(mode="json"))
    dataset = checks.train_dataset(spec)
    feeder = Feeder(
        experiment, RowOrder(experiment, dataset), MemoryStore(), ManualClock(), FeederStatus(), open_maker(spec)
    )

    await feeder.feed()
    await feeder.feed()

    trainer = experiment.train.trainer("trainer")
    await trainer.take_over()
    claims = await trainer.hop.claim(100, wait_seconds=0.0)
    assert [claim.header.group_id for claim in claims] == list(range(8)), "four steps of two groups ahead"
    assert [claim.group().task.metadata[FROM_DUMP]["group_id"] for claim in claims] == [0, 1, 2, 0, 1, 2, 0, 1]
    for step in range(4):
        assert await trainer.plan(step + 1, claims[2 * step : 2 * step + 2], version=0)
    await feeder.feed()
    assert (await experiment.train.ledger()).waiting.scored == 8, "it goes on before a version is published"


async def test_a_dump_of_which_nothing_can_be_trained_fails_the_experiment(tmp_path: Path) -> None:
    spec = spec_of(a_run(tmp_path / "run", a_step(1, num_groups=3)))
    experiment = await add_experiment(a_gateway(), spec=spec.model_dump(mode="json"))
    rows = RowOrder(experiment, checks.train_dataset(spec))
    feeder = Feeder(experiment, rows, MemoryStore(), ManualClock(), FeederStatus(), open_maker(spec))
    await feeder.feed()
    hop = experiment.train.trainer("trainer")
    await hop.take_over()
    for claim in await hop.hop.claim(3, wait_seconds=0.0):
        await hop.hop.resolve(claim, Resolution.FAILED, "invalid_tokens")

    with pytest.raises(DataError, match="none of 3 groups could be trained: invalid_tokens 3"):
        await feeder.feed()
    assert (await experiment.train.hop(HopName.TASKS, "r").claim(1, wait_seconds=0.0)) == []


def test_a_trainer_is_all_that_it_needs_unless_it_is_evaluated(tmp_path: Path) -> None:
    alone = spec_of(tmp_path)
    evaluated = spec_of(tmp_path, evaluation={"path": "/nowhere/held_out.jsonl"})

    assert set(quotas_of(alone)) == {ServiceKind.TRAINER}
    assert {ServiceKind.ROLLOUT, ServiceKind.REWARD} < set(quotas_of(evaluated))


def test_rewards_that_were_to_be_changed_are_not_trained_as_graded(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", an_evaluation())
    shaped = {"components": [{"kind": "numeric"}], "filter_zero_spread": True}

    with pytest.raises(DataError, match=r"reward\.filter_zero_spread changes what the trainer sees"):
        checks.train_dataset(spec_of(run, reward=shaped))
    assert len(checks.train_dataset(spec_of(run)).rows) == 1
    trained = a_run(tmp_path / "trained", a_step(1))
    assert len(checks.train_dataset(spec_of(trained, reward=shaped)).rows) == 2, "they were trained with it"


def test_a_dump_is_read_only_where_the_operator_lets_data_be_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "elsewhere" / "run", a_step(1))

    with pytest.raises(DataError, match="FLOTILLA_DATA_FOLDERS"):
        checks.train_dataset(spec_of(run), Places(data=(tmp_path / "data",)))


def test_a_dump_that_has_grown_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_step(1))
    spec = spec_of(run)
    dataset = load_dump(spec.data, spec.reward, seed=0)
    a_run(run, a_step(2))

    with pytest.raises(DataError, match="has 4 groups now, and had 2"):
        DumpedGroups(run).groups(dataset, range(1))


@pytest.mark.parametrize("where", ["data.dump", "recorded engine", "recorded reward"])
def test_every_dump_is_where_the_operator_allows_data(tmp_path: Path, where: str) -> None:
    secret, rows = a_run(tmp_path / "secret", a_step(1)), tmp_path / "ok" / "t.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"prompt": "1?", "label": "1"}\n' * 8)
    changes: dict[str, Any] = {
        "data.dump": {"data": {"dump": str(secret)}},
        "recorded engine": {"rollout": {"engine": {"recorded": {"dump": str(secret)}}}},
        "recorded reward": {"reward": {"components": [{"name": "r", "kind": "recorded", "dump": str(secret)}]}},
    }
    spec = a_spec(**({"data": {"path": str(rows)}} | changes[where]))

    with pytest.raises(DataError, match=r"secret/samples is in no folder that this fleet reads data from"):
        checks.check_code(spec, Places(data=(rows.parent,)))
    checks.check_code(spec, Places(data=(tmp_path,)))
    checks.check_code(spec, Places())
