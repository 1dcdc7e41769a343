"""TRL's RLOO becomes a spec whose gradient is that of TRL's formula, in float64 and token by token."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.importers.build import Imported, build
from flotilla.importers.systems import read, system_of
from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.objective import denominators_of, policy_objective
from flotilla.shared.config.sections.algorithm import AlgorithmConfig, KlRewardConfig
from tests.unit.algorithms.building import Batch, a_batch
from tests.unit.importers.sources import BASES

SCRIPT = """
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward
RLOOTrainer(
    model="owner/model", reward_funcs=accuracy_reward, train_dataset="owner/rows",
    args=RLOOConfig(num_generations=4, beta=0.1, max_steps=20, gradient_accumulation_steps=4),
).train()
"""


def imported(**more: Any) -> Imported:
    given = read("trl", json.dumps({**BASES["trl"], "trainer": "rloo", **more}), (), {}, source="rloo.yaml")
    return build(system_of("trl", given), given, rows=1000)


def algorithm_of(**more: Any) -> AlgorithmConfig:
    found = imported(**more)
    assert found.spec is not None and found.may_run(), found.report.render()
    return found.spec.algorithm


def naive_gradient(batch: Batch, beta: float) -> Tensor:
    """Take the gradient of TRL's loss by every log-probability, where old ones are the present ones."""
    leaf = batch.log_probs.double().requires_grad_()
    rows = [torch.nonzero(batch.sequences.index == row).flatten().tolist() for row in range(batch.sequences.count)]
    mask = batch.sequences.response_mask.tolist()
    rewards, present = [], leaf.detach()
    for row, tokens in enumerate(rows):
        kl = sum(float(present[t]) - float(batch.ref_log_probs[t]) for t in tokens if mask[t])
        rewards.append(float(batch.scores[row]) - beta * kl)
    loss = torch.zeros((), dtype=torch.float64)
    for row, tokens in enumerate(rows):
        group = [each for each in range(len(rows)) if batch.group_index[each] == batch.group_index[row]]
        others = [rewards[each] for each in group if each != row]
        advantage = rewards[row] - sum(others) / len(others)
        ratio = sum(leaf[t] - present[t] for t in tokens if mask[t]).exp()
        loss = loss - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / len(rows)
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_the_gradient_is_that_of_trls_formula(beta: float) -> None:
    config, batch = algorithm_of(beta=beta), a_batch([5, 3, 7, 2, 4, 6], group_size=3)
    batch.old_log_probs.copy_(batch.log_probs)
    inputs = AdvantageInputs(
        batch.sequences,
        batch.scores,
        batch.group_index,
        old_log_probs=batch.old_log_probs,
        ref_log_probs=batch.ref_log_probs,
    )
    kl = config.kl if isinstance(config.kl, KlRewardConfig) else None
    assert (kl is not None) is bool(beta)
    batch.advantages.copy_(compute_advantages(config.advantage, inputs, kl=kl).advantages)
    expected = naive_gradient(batch, beta)

    batch.log_probs.requires_grad_()
    arguments = batch.tokens(torch.ones_like(batch.sequences.response_mask))
    static = ("old_log_probs", "rollout_log_probs", "sequences")
    denominators = denominators_of(config, **{name: arguments[name] for name in static})
    policy_objective(config, denominators=denominators, **arguments).loss.backward()

    assert batch.log_probs.grad is not None
    torch.testing.assert_close(batch.log_probs.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_script_is_read_with_trls_defaults() -> None:
    given = read("trl", SCRIPT, (), {}, source="rloo.py")
    found = build(system_of("trl", given), given, rows=1000)

    assert found.spec is not None and found.may_run(), found.report.render()
    spec = found.spec
    assert (spec.rollout.group_size, spec.optimisation.groups_per_mini_batch, spec.optimisation.steps) == (4, 8, 20)
    assert spec.algorithm.advantage.kind == "rloo" and spec.algorithm.policy_loss.kind == "policy_gradient"
    assert isinstance(spec.algorithm.kl, KlRewardConfig) and spec.algorithm.kl.coefficient == 0.1
    assert spec.algorithm.aggregation.mode == "seq-mean-token-sum"
    assert spec.algorithm.resolved_correction is None


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"num_iterations": 2}, "num_iterations"),
        ({"steps_per_generation": 4}, "steps_per_generation"),
        ({"normalize_advantages": True}, "normalize_advantages"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions"),
        ({"reward_clip_range": [-1.0, 2.0]}, "reward_clip_range"),
    ],
)
def test_what_trl_computes_otherwise_is_refused_by_name(more: dict[str, Any], name: str) -> None:
    assert [each.name for each in imported(**more).report.refused] == [name]
