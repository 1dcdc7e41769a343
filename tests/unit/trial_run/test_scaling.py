import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.trial_run.edits import Edits
from flotilla.trial_run.scaling import scale_down
from tests.unit.trial_run.recipes import FILES, imported, trial_of

LENGTHS = {"fixed_length", "warmup_steps", "path"}


def meaning(node: Any) -> Any:
    """Leave out of a section what says how long or how much, and which file."""
    if isinstance(node, dict):
        return {key: meaning(value) for key, value in node.items() if key not in LENGTHS}
    return [meaning(each) for each in node] if isinstance(node, list) else node


def test_there_is_a_file_of_each_of_16_classes() -> None:
    assert len(FILES) == 16


@pytest.mark.parametrize("name", FILES)
def test_a_scaled_recipe_is_a_valid_spec_of_two_small_steps(name: str, tmp_path: Path) -> None:
    trial = trial_of(name, tmp_path)

    spec = validate_spec(trial.document)
    assert spec.optimisation.steps == 2
    assert spec.groups_per_step <= 4
    assert spec.rollout.group_size <= 8
    assert spec.parallelism.ranks == 1


@pytest.mark.parametrize("name", FILES)
def test_what_makes_meaning_stays(name: str, tmp_path: Path) -> None:
    found = imported(name)
    assert found.spec is not None
    before, after = found.spec.model_dump(mode="json"), trial_of(name, tmp_path).document

    assert meaning(after["algorithm"]) == meaning(before["algorithm"])
    for key in ("learning_rate", "schedule", "betas", "weight_decay", "max_grad_norm", "shuffle", "packing"):
        assert after["optimisation"][key] == before["optimisation"][key]
    for key in ("staleness_threshold", "on_weight_update", "on_max_lag"):
        assert after["asynchrony"][key] == before["asynchrony"][key]
    for key in ("filter_zero_spread", "group_filter"):
        assert after["reward"][key] == before["reward"][key]
    for key in ("temperature", "top_p", "top_k"):
        assert after["rollout"]["sampling"][key] == before["rollout"]["sampling"][key]
    assert meaning(after["job"]).keys() == meaning(before["job"]).keys()
    assert [each["kind"] for each in after["reward"]["components"]] == [
        each["kind"] for each in before["reward"]["components"]
    ]


@pytest.mark.parametrize("name", FILES)
def test_each_difference_is_listed_with_its_reason(name: str, tmp_path: Path) -> None:
    found = imported(name)
    assert found.spec is not None
    before, trial = Edits(found.spec.model_dump(mode="json")), trial_of(name, tmp_path)
    keys = {each.key for each in trial.changes}

    changed = {
        path
        for path in leaves(trial.document) | leaves(before.document)
        if at(trial.document, path) != at(before.document, path)
    }
    assert {path for path in changed if not any(path == key or path.startswith(f"{key}.") for key in keys)} == set()
    assert all(each.why for each in trial.changes)


def leaves(node: Any, above: str = "") -> set[str]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return {path for key, value in items for path in (leaves(value, f"{above}{key}.") or {f"{above}{key}"})}


def at(document: dict[str, Any], path: str) -> Any:
    return Edits(document).at(path)


def test_lengths_keep_their_proportion(tmp_path: Path) -> None:
    overlong = trial_of("verl_dapo.sh", tmp_path).document["reward"]["shaping"]["overlong"]

    assert (overlong["max_length"], overlong["buffer"]) == (24, 6)


def test_nothing_leaves_the_machine(tmp_path: Path) -> None:
    sets = ("tracking.trackers=[{kind: wandb, project: p}]", "checkpoint.upload_to=s3://bucket/folder",
            "reward.components=[{kind: judge, name: j, url: http://judge.example.com/v1, model: m}]")  # fmt: skip

    trial = trial_of("verl_grpo.sh", tmp_path, *sets)

    text = json.dumps(trial.document)
    assert "wandb" not in text
    assert "://" not in text
    assert trial.document["reward"]["components"][0]["name"] == "j"


def test_the_scale_of_adapters_stays(tmp_path: Path) -> None:
    lora = trial_of("verl_sft.sh", tmp_path).document["model"]["lora"]

    assert (lora["rank"], lora["alpha"]) == (4, 2.0)


def test_a_grader_that_is_here_is_used_and_one_that_is_not_has_a_stand_in(tmp_path: Path) -> None:
    absent = trial_of("openrlhf_reinforce.sh", tmp_path)
    (tmp_path / "rewards").mkdir()
    own = tmp_path / "rewards" / "check.py"
    own.write_text("def reward_func(queries, prompts, labels): return [1.0]\n")

    present = trial_of("openrlhf_reinforce.sh", tmp_path)

    adapter = next(name for name in present.files if name.endswith("_adapter.py"))
    assert str(own) in present.files[adapter]
    assert "stand_in_0.py" in absent.files and "stand_in_0.py" in absent.files[adapter]
    assert any("rewards/check.py" in each.before and "same signature" in each.why for each in absent.changes)


def test_models_are_of_the_architecture_that_is_named(tmp_path: Path) -> None:
    models = trial_of("openrlhf_ppo.sh", tmp_path).models

    assert [(each.directory, each.family, each.scores) for each in models] == [
        ("model", "llama", False),
        ("critic", "llama", False),
        ("reward_model_0", "llama", True),
    ]


def test_a_teacher_of_rows_with_images_takes_some(tmp_path: Path) -> None:
    spec = validate_spec(
        {
            "name": "pictures",
            "model": {"path": "/models/student"},
            "data": {"path": "rows.jsonl", "images": {}, "label_column": None},
            "rollout": {"group_size": 1},
            "algorithm": {"distillation": {"path": "/models/teacher", "pure": True}},
            "optimisation": {"steps": 3},
        }
    )

    trial = scale_down(spec, {}, tmp_path)

    assert [each.family for each in trial.models] == ["qwen2_5_vl", "qwen2_5_vl"]
