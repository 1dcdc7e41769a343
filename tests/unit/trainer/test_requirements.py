"""Each estimator says how many scored members a group needs, and whoever asks gets that answer."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from flotilla.importers.openrlhf.learning import ESTIMATORS as OPENRLHF
from flotilla.importers.openrlhf.learning import compares_members
from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.data.source import requirements_of
from flotilla.shared.config.sections.advantage import ESTIMATORS, AdvantageConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from tests.unit.algorithms.test_advantages import equal_groups
from tests.unit.trainer.builders import VOCABULARY, a_spec

COMPARING = {kind for kind, each in ESTIMATORS.items() if each.MIN_SCORED > 1}
GIVEN: dict[str, dict[str, Any]] = {"gdpo": {"components": ["exact"]}, "optimal_token_baseline": {"epsilon": 1e-3}}
ENVIRONMENT: dict[str, Any] = {
    "rollout": {"episodes": {"kind": "environment", "environments": [{"environment": "frozen_lake"}]}},
    "reward": {"components": [{"kind": "environment"}]},
}


def spec_of(kind: str, size: int = 4, **chosen: Any) -> ExperimentSpec:
    sections = ENVIRONMENT if kind in {"gigpo", "step_reinforce"} else {}
    rollout = {"group_size": size} | sections.get("rollout", {})
    advantage = {"kind": kind} | GIVEN.get(kind, {}) | chosen
    return a_spec(**(sections | {"rollout": rollout, "algorithm": {"advantage": advantage}}))


def min_scored(spec: ExperimentSpec) -> int:
    return requirements_of(spec, VOCABULARY).min_scored


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_group_is_trained_with_two_scored_members_exactly_where_they_are_compared(kind: str) -> None:
    config: AdvantageConfig = spec_of(kind, whiten=None).algorithm.advantage
    inputs = equal_groups([(4, 0.5)])

    def of_the_first(other: float) -> torch.Tensor:
        scores = torch.tensor([0.5, other, 0.25, 0.0])
        assert inputs.steps is not None
        steps = replace(inputs.steps, step_scores=scores, episode_scores=scores)
        rest = {"values": torch.zeros(inputs.sequences.index.numel()), "baselines": torch.zeros(4)}
        changed: AdvantageInputs = replace(
            inputs, scores=scores, component_scores=scores[:, None], steps=steps, **cast(Any, rest)
        )
        return compute_advantages(config, changed).advantages[inputs.sequences.index == 0]

    depends = not torch.equal(of_the_first(0.125), of_the_first(0.375))

    # It compares steps, of which one member has several.
    assert depends is (kind in COMPARING or kind == "step_reinforce")
    assert min_scored(spec_of(kind)) == (2 if kind in COMPARING else 1)


def test_estimators_that_were_left_out_need_two() -> None:
    assert {"reinforce_plus_plus_baseline", "gigpo"} <= COMPARING


@pytest.mark.parametrize("kind", sorted(COMPARING - {"grpo_passk", "optimal_token_baseline", "gigpo"}))
def test_a_group_of_one_is_refused_but_with_its_raw_reward(kind: str) -> None:
    with pytest.raises(InvalidSpec, match="nothing to compare"):
        spec_of(kind, 1)

    assert min_scored(spec_of(kind, 1, group_of_one="raw")) == 1


def test_a_group_of_one_is_refused_where_the_best_two_are_compared() -> None:
    with pytest.raises(InvalidSpec, match="nothing to compare"):
        spec_of("grpo_passk", 1)


@pytest.mark.parametrize("kind", ["optimal_token_baseline", "gigpo", "step_reinforce", "reinforce"])
def test_a_group_of_one_is_trained_by_what_needs_no_other(kind: str) -> None:
    assert min_scored(spec_of(kind, 1)) == 1


def test_an_importer_asks_the_estimator_that_it_translates_to() -> None:
    assert {theirs for theirs, (ours, _) in OPENRLHF.items() if compares_members(ours)} == {
        "reinforce_baseline",
        "group_norm",
        "rloo",
        "dr_grpo",
    }
