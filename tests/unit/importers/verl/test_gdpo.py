"""verl's GDPO becomes components of one function, each compared by itself, as its manager keeps the rewards apart."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.importers.adapter import verl_keys_adapter
from flotilla.importers.verl.gdpo import BY_KEY, ESTIMATOR, KEYS, MANAGER, WEIGHTS
from flotilla.services.reward.verifiers.custom_process import grade_of, load_function
from flotilla.shared.schemas.grading import GradingSample
from tests.unit.importers.sources import BASES, import_flat

PLAIN = 'def compute_score(**given):\n    return {"score": 3.0, "accuracy": 2, "format": True}\n'


def test_each_reward_is_a_component_and_the_score_stays_what_is_reported() -> None:
    found = import_flat("verl", {**BASES["verl"], **BY_KEY, WEIGHTS: [2, 1]})

    assert found.spec is not None, found.report.problems
    assert [(each.name, each.weight) for each in found.spec.reward.components] == [
        ("score", 1.0), ("accuracy", 0.0), ("format", 0.0),
    ]  # fmt: skip
    advantage = found.spec.algorithm.advantage.model_dump()
    assert advantage["components"] == ("accuracy", "format")
    assert (advantage["weights"], advantage["epsilon"], advantage["group_of_one"]) == ((2.0, 1.0), 1e-6, "raw")
    assert advantage["whiten"]["variance"] == "unbiased"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({KEYS: None}, KEYS),
        ({KEYS: ["accuracy", "accuracy"]}, KEYS),
        ({KEYS: ["score", "format"]}, KEYS),
        ({WEIGHTS: [1.0]}, WEIGHTS),
        ({MANAGER: "naive"}, MANAGER),
        ({ESTIMATOR: "grpo"}, MANAGER),
        ({"custom_reward_function.path": None}, ESTIMATOR),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, "algorithm.norm_adv_by_std_in_grpo"),
    ],
)  # fmt: skip
def test_what_gdpo_lacks_is_refused(values: dict[str, Any], name: str) -> None:
    found = import_flat("verl", {**BASES["verl"], **BY_KEY, **values})

    assert [entry.name for entry in found.report.refused] == [name]


def test_a_filter_takes_its_metric_from_the_component_with_the_score() -> None:
    filtered = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}

    found = import_flat("verl", {**BASES["verl"], **BY_KEY, **filtered})

    assert found.spec is not None, found.report.problems
    assert found.document["reward"]["group_filter"]["metric"] == "score/acc"


@pytest.mark.parametrize("start", ["", "async "])
async def test_the_file_gives_each_number_of_the_function(tmp_path: Path, start: str) -> None:
    (tmp_path / "grade.py").write_text(start + PLAIN)
    (tmp_path / "a.py").write_text(verl_keys_adapter("grade.py", "compute_score", ["accuracy", "format"]))
    sample = GradingSample(id="1/0", prompt="2+2=", response="4", label="4", data_source="x", metadata={})

    made = [load_function(f"{tmp_path / 'a.py'}:{name}")(sample) for name in ("score", "score_0", "score_1")]

    assert [grade_of(await each if start else each).reward for each in made] == [3.0, 2.0, 1.0]
