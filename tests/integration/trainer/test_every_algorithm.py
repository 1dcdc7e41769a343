"""Every algorithm trains through the learner, and how a mini-batch is cut does not change what it learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.testing.builders import a_group
from tests.integration.trainer.test_critic import a_model

DECOUPLED = {
    "old_log_probs": "recompute",
    "correction": {
        "weight": {"level": "sequence", "upper": 1.5, "batch_normalise": True},
        "rejections": [{"scope": "sequence", "statistic": "k3", "upper": 5.0}],
        "veto": {"lower": 1e-4},
    },
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "gspo": {"policy_loss": {"kind": "gspo"}, "aggregation": {"mode": "seq-mean-token-mean"}},
    "gmpo": {"policy_loss": {"kind": "gmpo"}, "aggregation": {"mode": "seq-mean-token-mean"}},
    "cispo": {"policy_loss": {"kind": "cispo"}},
    "sapo": {"policy_loss": {"kind": "sapo"}},
    "dppo": {"policy_loss": {"kind": "dppo", "divergence": "binary_kl"}},
    "dro": {"policy_loss": {"kind": "dro"}, "aggregation": {"mode": "seq-mean-token-sum"}},
    "topr": {"policy_loss": {"kind": "topr"}},
    "clip_cov": {"policy_loss": {"kind": "clip_cov", "fraction": 0.3, "lower": -5, "upper": 5}},
    "kl_cov": {"policy_loss": {"kind": "kl_cov", "fraction": 0.3}},
    "policy_gradient": {"policy_loss": {"kind": "policy_gradient"}},
    "decoupled, corrected": DECOUPLED,
    "entropy and supervised": {"entropy_coefficient": 0.01, "supervised": {"coefficient": 0.1}},
    "sequence weights": {"sequence_weights": {"length": True, "difficulty": "difficulty"}},
    "rloo": {"advantage": {"kind": "rloo"}},
    "reinforce++": {"advantage": {"kind": "reinforce_plus_plus", "gamma": 0.9}},
    "reinforce++-baseline": {"advantage": {"kind": "reinforce_plus_plus_baseline"}},
    "opo": {"advantage": {"kind": "opo"}},
    "pass@k": {"advantage": {"kind": "grpo_passk"}},
    "optimal token baseline": {"advantage": {"kind": "optimal_token_baseline"}},
    "critic": {"advantage": {"kind": "gae"}},
}


def groups() -> list[Group]:
    """Make three groups of unlike lengths, sampled by nearly the policy that is trained."""
    made = [
        a_group(0, rewards=[1.0, 0.0], sampled_tokens=4),
        a_group(1, rewards=[0.5, 2.0], sampled_tokens=9),
        a_group(2, rewards=[-1.0, 1.0], sampled_tokens=2),
    ]
    return [
        replace(
            group,
            task=replace(group.task, metadata={"difficulty": group.task.group_id / 2}),
            trajectories=tuple(_likely(t) for t in group.trajectories),
        )
        for group in made
    ]


def _likely(trajectory: Any) -> Any:
    # The random model gives every one of its 1000 tokens about the same probability.
    return replace(trajectory, log_probs=(trajectory.loss_mask * -6.9).astype("float32"))


def trained(algorithm: dict[str, Any], micro_batch_tokens: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    spec = validate_spec(
        {
            "name": "every",
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "reward": {"components": [{"kind": "exact"}]},
            "optimisation": {
                "steps": 1,
                "groups_per_mini_batch": 3,
                "learning_rate": 1e-2,
                "micro_batch_tokens": micro_batch_tokens,
            },
            "algorithm": algorithm,
        }
    )
    learner = Learner(spec, LoadedModel(a_model(), Path("unused")))
    metrics = learner.train(groups(), 1).metrics
    return dict(metrics), [parameter.detach() for parameter in learner.loaded.model.parameters()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_cut_of_a_mini_batch_does_not_matter(name: str) -> None:
    metrics, weights = trained(ALGORITHMS[name], micro_batch_tokens=4096)
    cut_metrics, cut_weights = trained(ALGORITHMS[name], micro_batch_tokens=8)

    start = [parameter.detach() for parameter in a_model().parameters()]
    assert any(not torch.equal(after, before) for after, before in zip(weights, start, strict=True))
    assert cut_metrics["loss/total"] == pytest.approx(metrics["loss/total"], abs=1e-5)
    assert cut_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)
    # AdamW's first step has the gradient's sign alone: where that is rounding noise, weights may differ.
    differences = torch.cat([(a - b).abs().flatten() for a, b in zip(cut_weights, weights, strict=True)])
    assert float((differences < 1e-4).float().mean()) > 0.99


def test_a_difficulty_that_is_no_number_is_named() -> None:
    with pytest.raises(DataError, match="hardness"):
        trained({"sequence_weights": {"difficulty": "hardness"}}, micro_batch_tokens=64)


def test_difficulty_changes_what_is_learned() -> None:
    plain, weighted = (
        trained(section, micro_batch_tokens=64)[0]
        for section in ({}, {"sequence_weights": {"difficulty": "difficulty"}})
    )

    assert weighted["loss/total"] != pytest.approx(plain["loss/total"], abs=1e-4)
