"""What holds for every batch: nothing depends on cutting, packing, padding or order, and nothing overflows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.aggregation import Denominators
from flotilla.services.trainer.algorithms.objective import denominators_of, policy_objective, selected_tokens
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import AlgorithmConfig
from tests.unit.algorithms.building import Batch, a_batch

LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 3.0},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "gmpo": {},
    "cispo": {"drop_outside": True},
    "sapo": {},
    "dppo": {"penalty": 0.1},
    "dro": {},
    "topr": {},
    "clip_cov": {"fraction": 0.2, "lower": 0.1},
    "kl_cov": {"fraction": 0.2},
    "policy_gradient": {},
}
CORRECTIONS: dict[str, Any] = {
    "none": None,
    "truncated": {"weight": {"upper": 1.5}},
    "icepop, normalised": {"weight": {"lower": 0.5, "upper": 2.0, "outside": "zero", "batch_normalise": True}},
    "sequence, rejecting": {
        "weight": {"level": "sequence", "batch_normalise": True},
        "rejections": [{"statistic": "k3", "upper": 0.5}, {"scope": "segment", "lower": 0.7, "upper": 1.4}],
        "veto": {"lower": 0.1},
    },
    "keeping denominators": {
        "weight": {"level": "geometric"},
        "rejections": [{"statistic": "tv", "scope": "sequence", "reduce": "max", "upper": 0.3}],
        "denominators": "original",
    },
}
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

quick = settings(max_examples=8, deadline=None, derandomize=True)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=6)
seeds = st.integers(0, 10_000)


def algorithm(kind: str, correction: str = "none", mode: str = "token-mean") -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {
            "policy_loss": {"kind": kind, **LOSSES[kind]},
            "aggregation": {"mode": mode, "fixed_length": 7 if mode.endswith("-norm") else None},
            "kl": {"placement": "loss", "coefficient": 0.05, "gradient": "weighted_k2"},
            "entropy_coefficient": 0.01,
            "supervised": {"coefficient": 0.1},
            "old_log_probs": "recompute",
            "correction": CORRECTIONS[correction],
        }
    )


def train(config: AlgorithmConfig, batch: Batch, ranks: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """Train on the batch cut into ranks and micro-batches: summed loss and gradient [T]."""
    leaf = batch.log_probs.clone().requires_grad_(True)
    selected = selected_tokens(
        config,
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages,
        response_mask=batch.sequences.response_mask,
        generator=torch.Generator().manual_seed(3),
    )
    cuts = [[torch.isin(batch.sequences.index, torch.tensor(part)) for part in rank] for rank in ranks]
    static = ("old_log_probs", "rollout_log_probs", "sequences")
    of_ranks = [
        Denominators.total(
            denominators_of(config, **{name: batch.tokens(cut)[name] for name in static}) for cut in rank
        ).as_tensor()
        for rank in cuts
    ]
    denominators = Denominators.from_tensor(torch.stack(of_ranks).sum(0))
    total = torch.zeros(())
    for cut in [cut for rank in cuts for cut in rank]:
        arguments = batch.tokens(cut) | {"log_probs": leaf[cut]}
        chosen = None if selected is None else selected[cut]
        loss = policy_objective(config, denominators=denominators, selected=chosen, **arguments).loss
        loss.backward()
        total = total + loss.detach()
    assert leaf.grad is not None
    return total, leaf.grad


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@quick
@given(shape=shapes, seed=seeds, correction=st.sampled_from(list(CORRECTIONS)), mode=st.sampled_from(MODES))
def test_micro_batches_and_ranks_do_not_matter(
    kind: str, shape: list[int], seed: int, correction: str, mode: str
) -> None:
    config, batch = algorithm(kind, correction, mode), a_batch(shape, seed=seed, mask_holes=True)
    everything = list(range(len(shape)))

    whole = train(config, batch, [[everything]])
    cut = train(config, batch, [[[number] for number in everything[::2]], [everything[1::2]]])

    assert_same(cut, whole)


@pytest.mark.parametrize("kind", LOSSES)
@quick
@given(shape=shapes, seed=seeds, correction=st.sampled_from(list(CORRECTIONS)), padding=st.integers(1, 5))
def test_padding_does_not_matter(kind: str, shape: list[int], seed: int, correction: str, padding: int) -> None:
    config, batch = algorithm(kind, correction), a_batch(shape, seed=seed, mask_holes=True)
    padded, places = with_padding(batch, padding)
    everything = [[list(range(len(shape)))]]

    loss, gradient = train(config, batch, everything)
    padded_loss, padded_gradient = train(config, padded, everything)

    if kind != "clip_cov":  # whose draw depends on the number of tokens
        assert_same((padded_loss, padded_gradient[places]), (loss, gradient))
    elsewhere = torch.ones(len(padded_gradient), dtype=torch.bool)
    elsewhere[places] = False
    assert not padded_gradient[elsewhere].any()


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "clip_cov"])
@quick
@given(shape=shapes, seed=seeds, correction=st.sampled_from(list(CORRECTIONS)), data=st.data())
def test_the_order_of_sequences_does_not_matter(
    kind: str, shape: list[int], seed: int, correction: str, data: st.DataObject
) -> None:
    config, batch = algorithm(kind, correction), a_batch(shape, seed=seed, mask_holes=True)
    order = data.draw(st.permutations(range(len(shape))))
    shuffled, places = reordered(batch, order)
    everything = [[list(range(len(shape)))]]

    loss, gradient = train(config, batch, everything)
    other_loss, other_gradient = train(config, shuffled, everything)

    assert_same((other_loss, other_gradient), (loss, gradient[places]))


@pytest.mark.parametrize("kind", LOSSES)
@quick
@given(
    shape=shapes,
    seed=seeds,
    correction=st.sampled_from(list(CORRECTIONS)),
    lowest=st.sampled_from([-1.0, -40.0, -5_000.0]),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_extreme_inputs_stay_finite(
    kind: str, shape: list[int], seed: int, correction: str, lowest: float, scale: float
) -> None:
    config, batch = algorithm(kind, correction), a_batch(shape, seed=seed)
    random = torch.Generator().manual_seed(seed)
    for values in (batch.log_probs, batch.old_log_probs, batch.rollout_log_probs, batch.ref_log_probs):
        values.copy_(torch.where(torch.rand(len(values), generator=random) < 0.5, lowest, -1e-7))
    batch.advantages.mul_(scale)

    loss, gradient = train(config, batch, [[list(range(len(shape)))]])

    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "gpg", "opo"])
@quick
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=seeds)
def test_advantages_of_a_group_sum_to_zero(kind: str, sizes: list[int], seed: int) -> None:
    group_index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    batch = a_batch([3] * len(group_index), seed=seed)
    config = AlgorithmConfig.model_validate({"advantage": {"kind": kind}}).advantage

    found = compute_advantages(config, AdvantageInputs(batch.sequences, batch.scores, group_index))

    per_sequence = batch.sequences.mean(found.advantages)
    sums = torch.zeros(len(sizes)).index_add(0, group_index, per_sequence)
    torch.testing.assert_close(sums, torch.zeros(len(sizes)), rtol=0, atol=1e-4)


@quick
@given(shape=st.lists(st.integers(2, 9), min_size=2, max_size=6), seed=seeds)
def test_whitened_advantages_have_mean_0_and_variance_1(shape: list[int], seed: int) -> None:
    batch = a_batch(shape, seed=seed, group_size=len(shape))
    config = AlgorithmConfig.model_validate({"advantage": {"kind": "reinforce_plus_plus"}}).advantage
    rewards = torch.randn(sum(shape), generator=torch.Generator().manual_seed(seed))

    found = compute_advantages(config, AdvantageInputs(batch.sequences, batch.scores, token_rewards=rewards))

    inside = found.advantages[batch.sequences.response_mask]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-4)
    assert float(inside.var()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "advantage",
    [
        {"kind": "gae", "gamma": 0.9},
        {"kind": "gae", "gamma": 0.9, "masked_tokens": "step", "whiten": None},
        {"kind": "reinforce", "gamma": 0.9},
        {"kind": "reinforce_plus_plus_baseline"},
        {"kind": "turn_reinforce", "gamma": 0.5},
        {"kind": "grpo"},
        {"kind": "rloo"},
        {"kind": "opo"},
        {"kind": "optimal_token_baseline"},
        {"kind": "optimal_token_baseline", "positions": "sampled"},
    ],
)
@quick
@given(shape=st.lists(st.integers(2, 8), min_size=2, max_size=6), seed=seeds, data=st.data())
def test_advantages_do_not_depend_on_padding_or_order(
    advantage: dict[str, Any], shape: list[int], seed: int, data: st.DataObject
) -> None:
    batch = a_batch(shape, seed=seed, mask_holes=True)
    order = data.draw(st.permutations(range(len(shape))))
    config = AlgorithmConfig.model_validate({"advantage": advantage}).advantage
    kl = AlgorithmConfig.model_validate({"kl": {"placement": "reward", "coefficient": 0.1}}).kl
    shuffled, places = reordered(batch, order)
    padded, kept = with_padding(shuffled, 3)

    expected = compute_advantages(config, inputs_of(batch), kl=kl)  # type: ignore[arg-type]
    actual = compute_advantages(config, inputs_of(padded), kl=kl)  # type: ignore[arg-type]

    torch.testing.assert_close(actual.advantages[kept], expected.advantages[places], rtol=1e-3, atol=1e-4)
    assert not actual.advantages[~padded.sequences.response_mask].any()


def inputs_of(batch: Batch) -> AdvantageInputs:
    return AdvantageInputs(
        sequences=batch.sequences,
        scores=batch.scores,
        group_index=batch.group_index,
        values=batch.entropy,
        old_log_probs=batch.old_log_probs,
        ref_log_probs=batch.ref_log_probs,
        sum_pi_squared=batch.old_log_probs.exp() ** 2 + 0.1,
    )


def with_padding(batch: Batch, padding: int) -> tuple[Batch, Tensor]:
    """Append masked tokens of garbage to every sequence; also say where the real ones went [T]."""
    index = batch.sequences.index
    places = torch.arange(len(index)) + index * padding
    total = len(index) + padding * batch.sequences.count

    def padded(values: Tensor, filler: float) -> Tensor:
        result = torch.full((total,), filler, dtype=values.dtype)
        result[places] = values
        return result

    owner = torch.zeros(total, dtype=torch.long)
    owner[places] = index
    gaps = torch.ones(total, dtype=torch.bool)
    gaps[places] = False
    owner[gaps] = torch.arange(batch.sequences.count).repeat_interleave(padding)
    return (
        Batch(
            PackedSequences(owner, padded(batch.sequences.response_mask, False), batch.sequences.count),
            padded(batch.log_probs, -7.0),
            padded(batch.old_log_probs, -1.0),
            padded(batch.rollout_log_probs, -30.0),
            padded(batch.ref_log_probs, -3.0),
            padded(batch.advantages, 1e6),
            padded(batch.entropy, 9.0),
            batch.scores,
            batch.group_index,
        ),
        places,
    )


def reordered(batch: Batch, order: list[int]) -> tuple[Batch, Tensor]:
    """Lay the sequences out in another order; also say where each token came from [T]."""
    places = torch.cat([(batch.sequences.index == number).nonzero().flatten() for number in order])
    lengths = torch.bincount(batch.sequences.index, minlength=len(order))[torch.tensor(order)]
    index = torch.repeat_interleave(torch.arange(len(order)), lengths)
    return (
        Batch(
            PackedSequences(index, batch.sequences.response_mask[places], len(order)),
            batch.log_probs[places],
            batch.old_log_probs[places],
            batch.rollout_log_probs[places],
            batch.ref_log_probs[places],
            batch.advantages[places],
            batch.entropy[places],
            batch.scores[torch.tensor(order)],
            batch.group_index[torch.tensor(order)],
        ),
        places,
    )


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_nothing_is_read_back_from_the_device(kind: str, correction: str) -> None:
    """Tensors without data: whatever looks at a value, or mixes devices, fails."""
    config = algorithm(kind, correction)
    on_device: dict[str, Tensor] = {
        name: torch.rand(12, device="meta")
        for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
    }
    layout = PackedSequences(
        torch.zeros(12, dtype=torch.long, device="meta"), torch.ones(12, dtype=torch.bool, device="meta"), 3
    )
    log_probs = torch.rand(12, device="meta", requires_grad=True)
    old, rollout = on_device["old_log_probs"], on_device["rollout_log_probs"]

    denominators = denominators_of(config, old_log_probs=old, rollout_log_probs=rollout, sequences=layout)
    selected = selected_tokens(
        config, old_log_probs=old, advantages=on_device["advantages"], response_mask=layout.response_mask
    )
    objective = policy_objective(
        config,
        log_probs=log_probs,
        denominators=Denominators.total([denominators]),
        scores=torch.rand(3, device="meta"),
        sequence_weights=torch.rand(3, device="meta"),
        selected=selected,
        sequences=layout,
        **on_device,
    )
    objective.loss.backward()

    assert log_probs.grad is not None
    assert log_probs.grad.device.type == objective.loss.device.type == "meta"
