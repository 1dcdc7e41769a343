"""An experiment's file becomes one that only measures."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.evaluation_spec import evaluation_of, model_at, rollouts_of
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, ModelError


def an_experiment(**sections: Any) -> ExperimentSpec:
    training: dict[str, Any] = {
        "name": "sums",
        "seed": 3,
        "model": {"path": "/models/a"},
        "data": {"path": "/rows/train.jsonl", "label_column": "answer", "max_rows": 7, "overlong": {"kind": "filter"}},
        "reward": {"components": [{"kind": "numeric"}], "filter_zero_spread": True},
        "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 12, "temperature": 0.5}},
        "algorithm": {"entropy_coefficient": 0.01},
        "optimisation": {"steps": 50, "learning_rate": 1e-3},
        "asynchrony": {"staleness_threshold": 0.5},
        "checkpoint": {"every_steps": 5},
        "parallelism": {"threads": 1},
        "evaluation": {"path": "/rows/held_out.jsonl", "max_rows": 9, "every_versions": 5},
    }
    return validate_spec(training | sections)


def a_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def a_checkpoint(checkpoints: Path, step: int) -> Path:
    folder = checkpoints / f"step-{step:08d}"
    a_model(folder / "model")
    state = {
        "experiment_id": "sums-1", "step": step, "version": step, "updates": step, "trained": [], "seed": 0,
        "kl_coefficient": None, "totals": {}, "spec": {}, "software": {}, "files": {"model/config.json": 2},
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_problems_are_answered_and_graded_as_in_the_experiment_and_nothing_is_trained() -> None:
    experiment = an_experiment()

    spec = evaluation_of(experiment)

    assert not spec.trains and spec.samples_answers and spec.finished_job is None
    same = ("name", "seed", "model", "rollout", "reward", "resources")
    assert [getattr(spec, section) for section in same] == [getattr(experiment, section) for section in same]
    assert spec.evaluation is not None
    assert (spec.evaluation.path, spec.evaluation.max_rows) == ("/rows/held_out.jsonl", 9)
    assert (spec.data.path, spec.data.label_column) == ("/rows/held_out.jsonl", "answer")
    assert validate_spec(spec.model_dump(mode="json")) == spec


def test_several_sets_stay_several() -> None:
    sets = [{"name": "easy", "path": "/rows/a.jsonl"}, {"name": "hard", "path": "/rows/b.jsonl", "max_rows": 3}]

    spec = evaluation_of(an_experiment(evaluation={"sets": sets, "greedy": False, "group_size": 4}))

    assert spec.evaluation is not None and [each.path for each in spec.evaluation.all_sets] == [
        "/rows/a.jsonl", "/rows/b.jsonl",
    ]  # fmt: skip
    assert spec.evaluation.group_size == 4
    assert evaluation_of(spec) == spec


def test_other_rows_and_another_model_are_taken(tmp_path: Path) -> None:
    spec = evaluation_of(an_experiment(evaluation=None), model=a_model(tmp_path / "b"), rows=tmp_path / "mine.jsonl")

    assert spec.evaluation is not None and spec.evaluation.path == str(tmp_path / "mine.jsonl")
    assert spec.model.path == str(tmp_path / "b")
    with pytest.raises(InvalidSpec, match="--rows"):
        evaluation_of(an_experiment(evaluation=None))


def test_a_model_is_found_in_a_checkpoint_an_experiment_and_a_run(tmp_path: Path) -> None:
    experiment = tmp_path / "run" / "fleet" / "experiments" / "sums-1"
    a_checkpoint(experiment / CHECKPOINTS, 5)
    newest = a_checkpoint(experiment / CHECKPOINTS, 10)

    for place in (newest / "model", newest, experiment / CHECKPOINTS, experiment, tmp_path / "run"):
        assert model_at(place) == newest / "model"
    with pytest.raises(ModelError, match="neither a model nor a checkpoint"):
        model_at(tmp_path)
    a_checkpoint(tmp_path / "run" / "fleet" / "experiments" / "sums-2" / CHECKPOINTS, 1)
    with pytest.raises(ModelError, match="choose one"):
        model_at(tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"optimisation": {"steps": 2}}, "optimisation.steps"),
        ({"algorithm": {"entropy_coefficient": 0.1}}, "algorithm.entropy_coefficient"),
        ({"checkpoint": {"every_steps": 2}}, "checkpoint.every_steps"),
        ({"parallelism": {"ranks": 2}}, "parallelism.ranks"),
        ({"evaluation": {"path": "/rows/a.jsonl", "every_versions": 2}}, "every_versions"),
        ({"evaluation": None}, "evaluation.path"),
        ({"data": {"path": "/rows/train.jsonl"}}, "data.path"),
    ],
)
def test_what_has_no_effect_without_training_is_refused(sections: dict[str, Any], named: str) -> None:
    minimal: dict[str, Any] = {
        "name": "e",
        "job": {"kind": "evaluation"},
        "model": {"path": "/models/a"},
        "data": {},
        "reward": {"components": [{"kind": "numeric"}]},
        "evaluation": {"path": "/rows/a.jsonl"},
    }
    assert not validate_spec(minimal).trains
    with pytest.raises(InvalidSpec, match=named):
        validate_spec(minimal | sections)


def test_answers_that_were_written_are_graded_without_what_a_model_answers_with() -> None:
    evaluation = {"path": "/rows/held_out.jsonl", "greedy": False, "group_size": 4, "pass_reward": 0.5}

    spec = evaluation_of(an_experiment(evaluation=evaluation), answers="written")

    assert spec.written_answers == "written"
    assert not spec.needs_rollouts
    assert spec.evaluation is not None
    assert (spec.evaluation.group_size, spec.evaluation.pass_reward) == (1, 0.5)
    assert spec.reward == an_experiment().reward
    assert validate_spec(spec.model_dump(mode="json")) == spec


def test_training_rows_are_answered_once_as_training_samples_them() -> None:
    experiment = an_experiment()

    spec = rollouts_of(experiment, model=None)

    assert not spec.trains and spec.evaluation is not None
    assert (spec.evaluation.path, spec.evaluation.max_rows) == ("/rows/train.jsonl", 7)
    assert (spec.evaluation.greedy, spec.evaluation.group_size) == (False, 4)
    assert spec.evaluation.sampling(spec.rollout.sampling) == experiment.rollout.sampling
    assert validate_spec(spec.model_dump(mode="json")) == spec


def test_sources_of_training_become_sets() -> None:
    rows = {"sources": [{"path": "/rows/a.jsonl", "weight": 3}, {"path": "/rows/b.jsonl", "weight": 1}]}

    spec = rollouts_of(an_experiment(data=rows | {"label_column": "answer"}))

    assert spec.evaluation is not None
    assert [each.path for each in spec.evaluation.all_sets] == ["/rows/a.jsonl", "/rows/b.jsonl"]


def test_what_holds_answers_is_not_sampled() -> None:
    with pytest.raises(InvalidSpec, match=r"data\.dump or data\.from holds groups"):
        rollouts_of(an_experiment(data={"dump": "/runs/mine"}))
    with pytest.raises(InvalidSpec, match="set max_rows of each source"):
        rollouts_of(an_experiment(data={"sources": [{"path": "/rows/a.jsonl"}], "max_rows": 3}))
