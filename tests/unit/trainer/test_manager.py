"""What a checkpoint holds is chosen; what is missing begins again, and is named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.services.gateway.lifecycle.origins import find, take
from flotilla.services.trainer.checkpoint.manager import (
    WITHOUT_OPTIMIZER,
    CheckpointManager,
    Progress,
    beginning,
    copy_alone,
    fill_alone,
)
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.live_changes import CurriculumState
from flotilla.shared.statistics.moments import NOTHING_SEEN
from tests.fleet import tiny_model
from tests.unit.trainer.builders import a_spec, uneven_groups

CPU = torch.device("cpu")
STEPS = 3
LINE = VersionLine.of([INITIAL], steps_per_version=1, total_steps=STEPS)


def spec_of(checkpoint: dict[str, Any], **sections: Any) -> ExperimentSpec:
    settings = {"steps": STEPS, "groups_per_mini_batch": 2, "learning_rate": 1e-2}
    own = {"model": {"path": str(tiny_model())}, "optimisation": settings, "checkpoint": checkpoint}
    return a_spec(**own | sections)


def tensors_in(directory: Path) -> set[str]:
    return {str(each.relative_to(directory)) for each in directory.rglob("*.safetensors")}


def test_a_checkpoint_has_the_rows_of_groups_that_a_fork_issues_again(tmp_path: Path) -> None:
    spec = spec_of({})
    manager = CheckpointManager("e", CheckpointStorage(tmp_path, keep=2))
    learner, progress = beginning(spec, CPU).learner, Progress.start()
    drawn = tuple((group_id, group_id % 5) for group_id in range(9))
    progress.curriculum = CurriculumState(group_id=9, rows=(), seen={}, drawn=drawn)
    progress.step = 2
    progress.trained.add_many([0, 1, 2, 5])

    manager.save(learner, progress, LINE)

    stored = find(tmp_path, 2)
    assert stored.state.curriculum is not None
    assert stored.state.curriculum.drawn == drawn[take(stored, spec, "f", tmp_path / "f").first_group_id :]


@pytest.mark.parametrize("is_copied", [False, True], ids=["at once", "copied"])
def test_the_last_checkpoint_may_be_the_weights_alone(tmp_path: Path, *, is_copied: bool) -> None:
    spec = spec_of({"final_contents": ["model"]})
    manager = CheckpointManager("e", CheckpointStorage(tmp_path, keep=2))
    learner, progress = beginning(spec, CPU).learner, Progress.start()

    for step in (STEPS - 1, STEPS):
        learner.train(uneven_groups(2, seed=step), step)
        progress.step = step
        copied = manager.copy(learner, progress, LINE) if is_copied else None
        if copied is not None:
            manager.write(copied)
        else:
            manager.save(learner, progress, LINE)

    weights = "model/model.safetensors"
    assert tensors_in(tmp_path / "step-00000002") == {weights, "optimizer.safetensors"}
    assert tensors_in(tmp_path / "step-00000003") == {weights}


def test_without_the_optimiser_training_goes_on_with_new_moments_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of({"contents": ["model"]})
    manager = CheckpointManager("e", CheckpointStorage(tmp_path, keep=2))
    learner, progress = manager.restore(spec).learner, Progress.start()
    learner.train(uneven_groups(2, seed=1), 1)
    progress.step = 1
    manager.save(learner, progress, LINE)

    with caplog.at_level(logging.WARNING):
        restored = manager.restore(spec).learner

    assert WITHOUT_OPTIMIZER in caplog.messages
    assert restored.optimizer.updates == 1
    assert restored.optimizer.state() == {}
    theirs = restored.loaded.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in learner.loaded.model.state_dict().items())
    restored.train(uneven_groups(2, seed=2), 2)


def test_a_run_that_compares_rewards_with_all_before_goes_on_from_a_checkpoint_as_it_would_have(tmp_path: Path) -> None:
    advantage = {"kind": "reinforce", "baseline": "batch_mean", "divide_by_std": True, "compared_with": "run"}
    spec = spec_of({}, algorithm={"advantage": advantage})
    manager = CheckpointManager("e", CheckpointStorage(tmp_path, keep=2))
    learner, progress = beginning(spec, CPU).learner, Progress.start()
    for step in (1, 2):
        learner.train(uneven_groups(2, seed=step), step)
    progress.step = 2
    manager.save(learner, progress, LINE)

    restored = manager.restore(spec).learner
    forgetful = manager.restore(spec).learner
    forgetful.reward_moments = NOTHING_SEEN
    for each in (learner, restored, forgetful):
        each.train(uneven_groups(2, seed=3), 3)

    assert restored.reward_moments == learner.reward_moments
    expected, forgot = (each.loaded.model.state_dict() for each in (learner, forgetful))
    assert all(torch.equal(weight, expected[name]) for name, weight in restored.loaded.model.state_dict().items())
    assert not all(torch.equal(weight, expected[name]) for name, weight in forgot.items())


def test_a_critic_is_weights_with_or_without_their_moments(tmp_path: Path) -> None:
    learner = beginning(spec_of({}, algorithm={"advantage": {"kind": "gae"}}), CPU).learner
    learner.train(uneven_groups(2, seed=1), 1)
    for name, contents in (("whole", ("model", "optimizer")), ("weights", ("model",))):
        (tmp_path / name).mkdir()
        fill_alone(learner, tmp_path / name, contents)

    whole, weights = ((tmp_path / name / "critic.safetensors").stat().st_size for name in ("whole", "weights"))
    assert weights < whole / 2
    assert not (tmp_path / "weights" / "optimizer.safetensors").exists()


@pytest.mark.parametrize("sections", [{"model": {"lora": {"rank": 4}}}, {"algorithm": {"advantage": {"kind": "gae"}}}])
def test_bfloat16_weights_that_are_loaded_later_go_on_as_they_were_written(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    model = {"path": str(tiny_model()), "dtype": "bfloat16"} | sections.get("model", {})
    spec = spec_of({"contents": ["model"]}, **sections | {"model": model})
    manager = CheckpointManager("e", CheckpointStorage(tmp_path, keep=2))
    learner, progress = beginning(spec, CPU).learner, Progress.start()
    learner.train(uneven_groups(2, seed=1), 1)
    progress.step = 1
    manager.save(learner, progress, LINE)

    restored = manager.restore(spec).learner

    for own, theirs in ((learner, restored), (learner.critic, restored.critic)):
        if own is None or theirs is None:
            continue
        for name, master in theirs.optimizer.masters.items():
            assert torch.equal(master, own.optimizer._parameters[name].float()), name


def test_a_critic_begins_with_the_weights_of_a_checkpoint_alone(tmp_path: Path) -> None:
    algorithm = {"advantage": {"kind": "gae"}}
    before = beginning(spec_of({}, algorithm=algorithm), CPU).learner
    before.train(uneven_groups(2, seed=1), 1)
    progress = Progress.start()
    progress.step = 1
    old = CheckpointStorage(tmp_path / "old" / "checkpoints", keep=2)
    CheckpointManager("old", old).save(before, progress, LINE)
    begins = {"resume_from": str(tmp_path / "old"), "load_contents": ["model", "extra"]}
    spec = spec_of(begins, algorithm=algorithm)

    take(find(tmp_path / "old", None), spec, "new", tmp_path / "new")
    new = CheckpointStorage(tmp_path / "new" / "checkpoints", keep=2)
    learner = CheckpointManager("new", new).restore(spec).learner

    assert learner.critic is not None
    assert before.critic is not None
    weights = before.critic.state(with_optimizer=False)
    assert all(torch.equal(each, weights[name]) for name, each in learner.critic.state().items())
    assert learner.critic.optimizer.updates == before.critic.optimizer.updates == 1
    learner.train(uneven_groups(2, seed=2), 2)


def test_copies_hold_what_was_chosen() -> None:
    learner = beginning(spec_of({}), CPU).learner
    copy = copy_alone(learner, ("model",))

    assert copy is not None
    assert set(copy.paths) == {"model/model.safetensors"}
    copy.close()


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"checkpoint": {"contents": ["optimizer"]}}, "model among them"),
        ({"checkpoint": {"contents": ["model", "model"]}}, "names each of its parts once"),
        ({"checkpoint": {"load_contents": ["model"]}}, "no effect without resume_from"),
        (
            {"checkpoint": {"contents": ["model"]}, "algorithm": {"old_log_probs": "recompute_at_version"}},
            "contents leaves out extra",
        ),
        (
            {
                "checkpoint": {"load_contents": ["model", "optimizer"], "resume_from": "/runs/a"},
                "algorithm": {"old_log_probs": "recompute_at_version"},
            },
            "load_contents leaves out extra",
        ),
        (
            {
                "checkpoint": {"contents": ["model", "optimizer"]},
                "optimisation": {"steps": 3, "groups_per_mini_batch": 2, "average_decay": 0.9},
            },
            "average_decay has no effect",
        ),
    ],
    ids=["no model", "twice", "nothing to load", "versions", "versions to load", "average"],
)
def test_what_cannot_be_left_out_is_refused(sections: dict[str, Any], problem: str) -> None:
    document = a_spec().model_dump(mode="json") | sections
    with pytest.raises(InvalidSpec, match=problem):
        validate_spec(document)
