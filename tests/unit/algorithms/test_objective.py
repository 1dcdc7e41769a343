"""The composed objective: what the trainer calls per micro-batch."""

from typing import Any

import pytest
import torch

from flotilla.services.trainer.algorithms.aggregation import Denominators
from flotilla.services.trainer.algorithms.metrics import combine, summarise
from flotilla.services.trainer.algorithms.objective import denominators_of, policy_objective
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import AlgorithmConfig
from tests.unit.algorithms.building import Batch, a_batch


def algorithm(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def run(config: AlgorithmConfig, batch: Batch, parts: list[list[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Train on the batch cut into micro-batches of these sequences: loss, gradient and metrics."""
    batch.log_probs.requires_grad_(True)
    batch.log_probs.grad = None
    cuts = [torch.isin(batch.sequences.index, torch.tensor(part)) for part in parts]
    static = ("old_log_probs", "rollout_log_probs", "sequences")
    counted = [{name: batch.tokens(cut)[name] for name in static} for cut in cuts]
    denominators = Denominators.total(denominators_of(config, **arguments) for arguments in counted)
    objectives = [policy_objective(config, denominators=denominators, **batch.tokens(cut)) for cut in cuts]
    for objective in objectives:
        objective.loss.backward()
    total = sum(float(objective.loss.detach()) for objective in objectives)
    assert batch.log_probs.grad is not None
    return total, batch.log_probs.grad.clone(), summarise(combine(objective.metrics for objective in objectives))


CONFIGS = {
    "defaults": algorithm(),
    "recompute with truncated weights": algorithm(old_log_probs="recompute"),
    "rejection": algorithm(
        old_log_probs="recompute",
        aggregation={"mode": "seq-mean-token-mean"},
        correction={
            "weight": {"level": "sequence", "upper": 3.0, "batch_normalise": True},
            "rejections": [{"scope": "sequence", "lower": 0.8, "upper": 1.2}],
            "veto": {"lower": 0.3},
        },
    ),
    "kl, entropy, supervised": algorithm(
        kl={"placement": "loss", "coefficient": 0.1}, entropy_coefficient=0.01, supervised={"coefficient": 0.2}
    ),
    "gspo": algorithm(policy_loss={"kind": "gspo"}, aggregation={"mode": "seq-mean-token-mean"}),
    "gmpo": algorithm(policy_loss={"kind": "gmpo"}, aggregation={"mode": "seq-mean-token-mean"}),
    "topr": algorithm(policy_loss={"kind": "topr"}, aggregation={"mode": "seq-mean-token-sum"}),
    "plain gradient, corrected": algorithm(policy_loss={"kind": "policy_gradient"}),
    "dr grpo's norm": algorithm(
        aggregation={"mode": "seq-mean-token-sum-norm", "fixed_length": 16}, advantage={"kind": "dr_grpo"}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shares_of_micro_batches_add_up_to_the_mini_batch(name: str) -> None:
    batch = a_batch([5, 9, 2, 7, 4, 1], mask_holes=True)

    whole = run(CONFIGS[name], batch, [[0, 1, 2, 3, 4, 5]])
    cut = run(CONFIGS[name], batch, [[3], [0, 5], [1, 2, 4]])

    assert cut[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-5, atol=1e-7)
    assert cut[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-5)


def test_the_policy_loss_alone_is_weighed_by_its_coefficient() -> None:
    others = {"kl": {"placement": "loss", "coefficient": 0.1}, "entropy_coefficient": 0.01}
    batch = a_batch([5, 9, 2])
    none, half, whole = (
        run(algorithm(policy_coefficient=weight, **others), batch, [[0, 1, 2]]) for weight in (0.0, 0.5, 1.0)
    )

    assert whole[0] != pytest.approx(none[0])
    assert half[0] == pytest.approx((none[0] + whole[0]) / 2)
    torch.testing.assert_close(half[1], (none[1] + whole[1]) / 2)
    assert half[2]["policy_loss"] == pytest.approx(whole[2]["policy_loss"])


def test_a_policy_loss_of_weight_0_wants_another_term() -> None:
    with pytest.raises(ValueError, match="no loss to train on"):
        algorithm(policy_coefficient=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_masked_positions_hold_does_not_matter(name: str) -> None:
    batch = a_batch([5, 9, 2, 7], mask_holes=True)
    expected = run(CONFIGS[name], batch, [[0, 1, 2, 3]])

    spoilt = a_batch([5, 9, 2, 7], mask_holes=True)
    for values in (spoilt.log_probs, spoilt.old_log_probs, spoilt.rollout_log_probs, spoilt.ref_log_probs):
        values[~spoilt.sequences.response_mask] = -torch.inf
    spoilt.advantages[~spoilt.sequences.response_mask] = torch.nan
    spoilt.entropy[~spoilt.sequences.response_mask] = torch.nan
    loss, gradient, _ = run(CONFIGS[name], spoilt, [[0, 1, 2, 3]])

    assert loss == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(gradient, expected[1])


def test_on_policy_grpo_is_the_policy_gradient() -> None:
    batch = a_batch([6, 3, 8])
    batch.log_probs.copy_(batch.old_log_probs)
    batch.rollout_log_probs.copy_(batch.old_log_probs)

    _, gradient, metrics = run(algorithm(), batch, [[0, 1, 2]])

    mask = batch.sequences.response_mask
    torch.testing.assert_close(gradient, torch.where(mask, -batch.advantages, 0.0) / mask.sum())
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == 0


def test_a_micro_batch_without_sampled_tokens_contributes_nothing() -> None:
    batch = a_batch([1, 1])

    loss, gradient, _ = run(algorithm(), batch, [[0, 1]])

    assert loss == 0
    assert not gradient.any()


def test_a_missing_reference_is_named() -> None:
    arguments = a_batch([4]).tokens(torch.ones(4, dtype=torch.bool))
    del arguments["ref_log_probs"]

    with pytest.raises(ValueError, match="ref_log_probs"):
        policy_objective(
            algorithm(kl={"placement": "loss"}),
            denominators=Denominators.of(num_tokens=3, num_sequences=1),
            **arguments,
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_branches_of_an_episode_weigh_together_what_one_trajectory_does(name: str) -> None:
    config = CONFIGS[name]
    one = a_batch([6, 4])
    episode = one.tokens(torch.ones(10, dtype=torch.bool))
    # The first sequence three times: three branches that say the same.
    thrice = torch.cat([torch.arange(6)] * 3 + [torch.arange(6, 10)])
    per_token = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
    branches = {each: episode[each][thrice] for each in per_token}
    mask = episode["sequences"].response_mask[thrice]
    index = torch.tensor([0] * 6 + [1] * 6 + [2] * 6 + [3] * 4)
    shares = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0])

    def loss(arguments: dict[str, Any]) -> float:
        static = ("old_log_probs", "rollout_log_probs", "sequences")
        counted = denominators_of(config, **{each: arguments[each] for each in static})
        return float(policy_objective(config, denominators=counted, **arguments).loss)

    branches["scores"] = episode["scores"][torch.tensor([0, 0, 0, 1])]
    joined = branches | {"sequences": PackedSequences(index, mask, 4, shares)}
    assert loss(joined) == pytest.approx(loss(episode), rel=1e-5, abs=1e-7)
    if config.aggregation.mode != "token-sum":
        unshared = branches | {"sequences": PackedSequences(index, mask, 4)}
        assert loss(unshared) != pytest.approx(loss(episode), rel=1e-3), "each counts without shares"
