"""The algorithm section refuses what would have no effect, and says which way out."""

from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.shared.config.sections.algorithm import AlgorithmConfig

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"aggregation": {"mode": "token-mean", "fixed_length": 5}}, "fixed_length", "mode"),
    ({"aggregation": {"mode": "seq-mean-token-sum-norm"}}, "fixed_length", "mode"),
    ({"kl": {"placement": "loss", "horizon": 5}}, "horizon", "target"),
    ({"kl": {"placement": "loss", "estimator": "k1"}}, "k1", "gradient"),
    ({"kl": {"placement": "reward", "gradient": "k2"}}, "gradient", "Extra"),
    ({"kl": {"placement": "loss", "estimator": "k2", "log_ratio_bounds": (-5, 5)}}, "log_ratio_bounds", "estimator"),
    ({"kl": {"placement": "reward", "order": "after_baseline"}, "advantage": {"kind": "gae"}}, "order", "gae"),
    ({"kl": {"placement": "reward", "order": "after_baseline"}, "advantage": {"kind": "reinforce"}}, "order", "kind"),
    ({"kl": {"placement": "reward"}, "advantage": {"kind": "gdpo", "components": ["a"]}}, "order", "gdpo"),
    ({"advantage": {"kind": "grpo", "normalise_by_std": False, "epsilon": 1e-2}}, "epsilon", "normalise_by_std"),
    ({"value_loss": {"clip": 0.2}}, "value_loss", "advantage.kind"),
    ({"correction": {}}, "correction", "old_log_probs"),
    ({"old_log_probs": "recompute", "correction": {"numerator": "current"}}, "numerator", "policy_loss.kind"),
    (
        {"old_log_probs": "recompute", "correction": None, "policy_loss": {"kind": "policy_gradient"}},
        "old_log_probs",
        "policy_loss.kind",
    ),
    ({"old_log_probs": "recompute", "correction": {"weight": None}}, "weight", "rejections"),
    ({"old_log_probs": "recompute", "correction": {"denominators": "original"}}, "denominators", "rejections"),
    ({"old_log_probs": "recompute", "correction": {"rejections": [{}]}}, "lower", "upper"),
    (
        {"old_log_probs": "recompute", "correction": {"rejections": [{"upper": 2, "reduce": "sum"}]}},
        "reduce",
        "scope",
    ),
    (
        {"old_log_probs": "recompute", "correction": {"weight": {"upper": None, "outside": "zero"}}},
        "outside",
        "upper",
    ),
    ({"advantage": {"kind": "gae", "whiten": {"centre_only": True, "epsilon": 1e-3}}}, "epsilon", "centre_only"),
    ({"advantage": {"kind": "gdpo", "components": ["a"], "weights": [1, 2]}}, "weights", "components"),
    ({"sequence_weights": {}}, "length", "difficulty"),
    ({"policy_loss": {"kind": "clip_cov", "lower": 3, "upper": 2}}, "lower", "upper"),
]


@pytest.mark.parametrize(("section", "one", "other"), CASES)
def test_an_option_without_effect_is_refused_by_name(section: dict[str, Any], one: str, other: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig.model_validate(section)

    assert one in str(refused.value)
    assert other in str(refused.value)


def test_a_resolved_section_can_be_read_back() -> None:
    for section in ({}, {"kl": {"placement": "reward", "target": 0.1}, "advantage": {"kind": "gae"}}):
        config = AlgorithmConfig.model_validate(section)

        assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("section", "numerator"),
    [
        ({}, None),
        ({"old_log_probs": "recompute"}, "old"),
        ({"policy_loss": {"kind": "policy_gradient"}}, "current"),
        ({"correction": None, "old_log_probs": "recompute"}, None),
    ],
)
def test_auto_corrects_wherever_the_loss_does_not(section: dict[str, Any], numerator: str | None) -> None:
    correction = AlgorithmConfig.model_validate(section).resolved_correction

    assert (correction and correction.numerator) == numerator
