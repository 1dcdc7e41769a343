"""The trainer's log-probabilities are those of the plain Hugging Face model, however sequences are laid out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.shared.errors import ModelError
from tests.unit.trainer.builders import VOCABULARY, a_model, uneven_groups

CPU = torch.device("cpu")


def plain_log_probs(model: torch.nn.Module, groups: list, temperature: float) -> torch.Tensor:
    """Run the Hugging Face model on one sequence after the other, without padding: sampled tokens in order."""
    found = []
    for group in groups:
        for t in group.trajectories:
            ids = torch.from_numpy(t.token_ids.astype("int64"))[None]
            logits = model(input_ids=ids).logits[0].float() / temperature
            log_all = torch.log_softmax(logits, -1)
            found += [float(log_all[at - 1, ids[0, at]]) for at in t.loss_mask.nonzero()[0]]
    return torch.tensor(found)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("packing", "max_tokens"), [("padded", 10_000), ("padded", 70), ("packed", 10_000), ("packed", 70)]
)
def test_packed_padded_and_plain_agree(packing: str, max_tokens: int, temperature: float) -> None:
    groups = uneven_groups()
    policy = Policy(a_model(), temperature=temperature)
    batch = make_batch(groups)

    found = torch.zeros(len(batch.positions))
    for micro in make_micro_batches(
        batch, range(batch.num_sequences), RowRules(packing), max_tokens=max_tokens, device=CPU
    ):
        statistics = policy.statistics(micro.inputs, with_entropy=False)
        found[micro.tokens] = micro.spread(statistics.log_probs)

    expected = plain_log_probs(policy.model, groups, temperature)
    assert policy.can_pack
    torch.testing.assert_close(found[batch.sequences.response_mask], expected, atol=1e-5, rtol=0)
    assert (found[~batch.sequences.response_mask] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("is_plain", [True, False], ids=["head as a product", "logits computed whole"])
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_a_group_is_scored_at_the_temperature_it_was_sampled_at(packing: str, is_plain: bool) -> None:
    first, *others = uneven_groups()
    warm = replace(first, task=replace(first.task, settings={"rollout.sampling.temperature": 0.7}))
    policy = Policy(a_model(), temperature=1.3)
    if not is_plain:
        policy._traits = replace(policy.traits, has_plain_head=False)
    batch = make_batch([warm, *others]).take(torch.tensor([2, 0, 1, 0]))[0]

    found = torch.zeros(len(batch.positions))
    cut = make_micro_batches(batch, range(batch.num_sequences), RowRules(packing), max_tokens=10_000, device=CPU)
    for micro in cut:
        found[micro.tokens] = micro.spread(policy.statistics(micro.inputs, with_entropy=False).log_probs)

    of_others = plain_log_probs(policy.model, others, 1.3)
    of_first = plain_log_probs(policy.model, [first], 0.7)
    laid = [t for group in (first, *others) for t in group.trajectories]
    sizes = [int(t.loss_mask.sum()) for t in laid]
    parts = torch.cat([of_first, of_others]).split(sizes)
    expected = torch.cat([parts[number] for number in (2, 0, 1, 0)])
    torch.testing.assert_close(found[batch.sequences.response_mask], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_logits_that_are_no_plain_product_are_computed_whole() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    policy = Policy(Gemma2ForCausalLM(config).eval(), temperature=1.0)
    groups = uneven_groups(1)
    batch = make_batch(groups)

    [micro] = make_micro_batches(batch, range(batch.num_sequences), RowRules("padded"), max_tokens=10_000, device=CPU)
    found = torch.zeros(len(batch.positions))
    found[micro.tokens] = micro.spread(policy.statistics(micro.inputs, with_entropy=False).log_probs)

    assert not policy.has_plain_head
    expected = plain_log_probs(policy.model, groups, 1.0)
    torch.testing.assert_close(found[batch.sequences.response_mask], expected, atol=1e-5, rtol=0)


def test_a_model_with_learned_positions_packs_by_position_ids() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4)

    assert Policy(GPT2LMHeadModel(config).eval(), temperature=1.0).can_pack


def test_a_sliding_window_is_never_packed() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=64,
    )
    policy = Policy(MistralForCausalLM(config).eval(), temperature=1.0)

    assert policy.resolve_packing("auto") == "padded"
    with pytest.raises(ModelError, match="use auto or padded"):
        policy.resolve_packing("packed")


def test_the_temperature_is_part_of_the_policy() -> None:
    batch = make_batch(uneven_groups(1))
    [micro] = make_micro_batches(batch, range(batch.num_sequences), RowRules("padded"), max_tokens=10_000, device=CPU)
    model = a_model()

    hot, cold = (
        Policy(model, temperature=t).statistics(micro.inputs, with_entropy=True).entropy.mean() for t in (2.0, 0.5)
    )

    assert hot > cold


def test_a_device_that_does_not_exist_is_named(tmp_path: Path) -> None:
    from flotilla.services.trainer.models.loading import check_device

    with pytest.raises(ModelError, match="device banana cannot be used"):
        check_device("banana")
