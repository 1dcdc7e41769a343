"""A step computed again from its samples and a checkpoint gives the same figures, and tells each token's."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flotilla.services.trainer.checkpoint.manager import CheckpointManager, Progress, beginning
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.models.loading import check_device
from flotilla.services.trainer.replay.replay import TOLERANCE, StepRecord, replay, start_of
from flotilla.services.trainer.replay.tokens import explain, take_apart
from flotilla.services.trainer.worker.samples import StepSamples
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.load.live import with_applied
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, NotFound
from flotilla.shared.samples.recorder import SampleRecorder
from flotilla.shared.schemas.live_changes import ChangedKey, Effect, LiveChange, held_at
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.plans import Plan
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

STEPS = 4
CHECKPOINT = 2


def train(
    directory: Path,
    judge: Callable[[list[Group]], list[Group]] = lambda groups: groups,
    changes: Sequence[LiveChange] = (),
    **sections: Any,
) -> ExperimentSpec:
    """Train a few steps as the loop does, with a checkpoint in the middle, and keep every step."""
    model = directory / "model"
    a_model().save_pretrained(model)
    (model / "tokenizer_config.json").write_text("{}")  # no tokenizer that could be loaded: tokens are numbers
    optimisation = {"steps": STEPS, "groups_per_mini_batch": 2, "learning_rate": 1e-2}
    spec = a_spec(
        model={"path": str(model)},
        optimisation=optimisation | sections.pop("optimisation", {}),
        checkpoint={"every_steps": CHECKPOINT},
        **sections,
    )
    learner, progress = beginning(spec, check_device("cpu")).learner, Progress.start()
    line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=STEPS)
    assert spec.samples is not None
    recorder = SampleRecorder(directory, spec.samples, writer="trainer").start()
    recorder.keep_spec(spec.model_dump_json())
    manager = CheckpointManager("tiny", CheckpointStorage(directory / CHECKPOINTS, keep=9))
    for step in range(1, STEPS + 1):
        groups = tuple(judge(uneven_groups(spec.groups_per_step, seed=1000 * step)))
        plan = Plan(step, step - 1, tuple(group.task.group_id + 10 * step for group in groups), (), 0, 0, 0, ())
        held = held_at(changes, step - 1)
        learner.follow(with_applied(spec, held))
        result = learner.train(groups, step)
        planned = StepGroups(plan, groups, False, 0.0, 0.0)
        StepSamples(recorder).trained(planned, result, step - 1, progress.lineage, partial(sub, step - 1), held)
        progress.add(plan)
        progress.changes = held
        learner.keep_version(step, 0)
        if step == CHECKPOINT:
            manager.save(learner, progress, line)
    recorder.close(wait_seconds=60.0)
    return spec


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "algorithm": {"old_log_probs": "recompute", "kl": {"placement": "loss"}, "entropy_coefficient": 0.01},
            "optimisation": {"shuffle": True, "epochs_per_step": 2},
            "asynchrony": {"require_batches": 2},
        },
    ],
    ids=["as it is", "corrected, shuffled, twice over"],
)
def test_a_step_gives_the_recorded_losses_and_gradients_again(tmp_path: Path, sections: dict[str, Any]) -> None:
    train(tmp_path, **sections)

    for step, start in ((STEPS, CHECKPOINT), (CHECKPOINT, 0)):
        found = replay(tmp_path, step)

        assert (found.start, found.is_equal) == (start, True)
        assert found.worst_before <= TOLERANCE
        names = {each.name for each in found.figures}
        assert {"loss/total", "grad_norm/1"} <= names
        assert all(each.recorded != 0 for each in found.figures if each.name == "loss/total")


def a_change(path: str, before: float, after: float, version: int) -> LiveChange:
    key = ChangedKey(path=path, before=before, after=after)
    at = f"2026-01-01T00:00:0{version}Z"
    return LiveChange(id=f"{version}", at=at, actor="a", effect=Effect.TRAINER, keys=(key,), version=version)


@pytest.mark.parametrize("step", [CHECKPOINT, STEPS])
def test_each_step_is_computed_again_with_the_settings_of_its_version(tmp_path: Path, step: int) -> None:
    rate = "optimisation.learning_rate"
    entropy = a_change("algorithm.entropy_coefficient", 0.0, 0.05, 2)
    train(tmp_path, changes=[a_change(rate, 1e-2, 2e-2, 1), entropy, a_change(rate, 2e-2, 4e-2, 3)])

    found = replay(tmp_path, step)

    assert (found.is_equal, found.worst_before <= TOLERANCE) == (True, True)
    assert found.spec.optimisation.learning_rate == {CHECKPOINT: 2e-2, STEPS: 4e-2}[step]


def test_samples_that_were_changed_give_other_figures(tmp_path: Path) -> None:
    train(tmp_path, algorithm={"advantage": {"kind": "reinforce"}})
    path = tmp_path / "samples" / f"step-{STEPS:08d}.parquet"
    table = parquet.read_table(path)
    rewards = pa.array([reward + 1.0 for reward in table.column("reward").to_pylist()])
    changed = table.set_column(table.schema.get_field_index("reward"), "reward", rewards)
    parquet.write_table(changed, path)

    assert not replay(tmp_path, STEPS).is_equal


def test_a_sample_is_taken_apart_token_by_token(tmp_path: Path) -> None:
    train(tmp_path)
    found = replay(tmp_path, STEPS)
    kept = found.groups[0]
    group_id, trajectory = kept.group.task.group_id, kept.group.trajectories[0]

    rows = take_apart(found, group_id, 0)

    assert len(rows) == trajectory.num_sampled
    assert [row.token_id for row in rows] == trajectory.token_ids[trajectory.loss_mask.astype(bool)].tolist()
    assert all(row.lag == STEPS - 1 and row.version == 0 for row in rows)
    assert all(row.ratio is not None and row.advantage for row in rows)
    assert all(("more" if row.advantage > 0 else "less") in row.why for row in rows)  # type: ignore[operator]
    with pytest.raises(NotFound, match="its groups are 0, 1"):
        take_apart(found, 99, 0)


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"advantage": None}, "not trained"),
        ({"advantage": 0.0}, "same reward"),
        ({"weight": 0.0}, "rejected"),
        ({"clipped": True, "ratio": 1.5}, "clipped: it already is more likely than when it was sampled, 1.500 times"),
        ({"advantage": -1.0, "clipped": True, "ratio": 0.5}, "clipped: it already is less likely"),
        ({"weight": 0.25}, "made more likely, with 0.250 of its weight"),
        ({"advantage": -2.0}, "made less likely"),
    ],
)
def test_the_words_say_what_the_figures_did(figures: dict[str, Any], why: str) -> None:
    usual: dict[str, Any] = {"advantage": 1.0, "now": -1.0, "ratio": 1.0, "weight": 1.0, "clipped": False}

    assert why in explain(**(usual | figures))


def chain(*steps: int, whole: tuple[int, ...] = ()) -> dict[int, StepRecord]:
    return {step: StepRecord(f"l{step - 1}", f"l{step}", step in whole or not whole) for step in steps}


def test_the_newest_checkpoint_before_a_step_is_taken() -> None:
    starts = {0: "l0", 2: "l2", 4: "l4"}

    assert [start_of(step, chain(1, 2, 3, 4, 5, 6), starts) for step in (1, 2, 3, 4, 5, 6)] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("records", "starts", "why"),
    [
        (chain(1, 2), {0: "l0"}, "step 6 has no samples: steps that can be: 1 to 2"),
        (chain(5, 6), {0: "l0"}, "step 1 after the checkpoint of step 0 has no samples. No step can be"),
        (chain(5, 6, whole=(5,)), {4: "l4"}, r"of step 6 only some groups are kept .*Steps that can be: 5"),
        (chain(5, 6), {4: "another"}, "the samples of step 5 continue other weights than those of step 4"),
        (chain(6), {8: "l8"}, "there is no checkpoint before it"),
    ],
)
def test_a_step_that_cannot_be_computed_again_says_why_and_which_can(
    records: dict[int, StepRecord], starts: dict[int, str], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        start_of(6, records, starts)
