"""Attention that goes sequence by sequence gives what a dense mask gives."""

import copy
import inspect
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flotilla.services.trainer.data.packing import MicroLayout, ModelInput, Prompt, build_input, lay_out
from flotilla.services.trainer.data.places import places_of
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models import attention
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.models.native.kernels import kernels_for
from flotilla.services.trainer.models.traits import arguments_of
from flotilla.services.trainer.parallel.layers import recompute_activations
from tests.unit.trainer.builders import a_spec, uneven_groups

pytestmark = pytest.mark.skipif(kernels_for() is None, reason="no C compiler")

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48,
}  # fmt: skip
MODELS = [(Qwen3ForCausalLM, Qwen3Config), (LlamaForCausalLM, LlamaConfig)]
LENGTHS, PROMPT = [30, 12, 25, 9, 28, 6], 5


def make(kinds: tuple[type, type]) -> PreTrainedModel:
    torch.manual_seed(0)
    model, config = kinds
    made: PreTrainedModel = model(config(**SHAPE)).eval()
    return made


def inputs(*, attends_apart: bool, width: int = 80) -> ModelInput:
    random = np.random.default_rng(0)
    prompts = random.integers(0, 64, (2, PROMPT))
    ids = [np.concatenate([prompts[n // 3], random.integers(0, 64, length)]) for n, length in enumerate(LENGTHS)]
    layout = MicroLayout(((0, 1, 2), (3, 4, 5)), width, is_packed=True, shared={1: 5, 2: 5, 4: 5, 5: 5})
    sampled = {number: np.arange(PROMPT, len(tokens)) for number, tokens in enumerate(ids)}
    return build_input(layout, ids, sampled, attends_apart=attends_apart)


def gradients(policy: Policy, made: ModelInput) -> list[Tensor]:
    policy.model.zero_grad()
    found = policy.statistics(made, with_entropy=True)
    assert found.entropy is not None
    weights = torch.linspace(-1, 1, len(made.labels))
    torch.autograd.backward((found.log_probs * weights + found.entropy).sum())
    return [found.log_probs, *(each.grad.clone() for each in policy.model.parameters())]


@pytest.mark.parametrize("kinds", MODELS)
def test_values_and_gradients_are_those_of_a_dense_mask(kinds: tuple[type, type]) -> None:
    policy = Policy(make(kinds), temperature=1.0)

    assert policy.attends_apart
    apart, dense = inputs(attends_apart=True), inputs(attends_apart=False)
    assert (apart.attention_mask, dense.places) == (None, None)
    for found, expected in zip(gradients(policy, apart), gradients(policy, dense), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_torch_alone_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(make(MODELS[0]), temperature=1.0)
    expected = gradients(policy, inputs(attends_apart=True))
    monkeypatch.setattr(attention, "kernels_for", lambda *_: None)

    found = gradients(policy, inputs(attends_apart=True))

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_activations_that_are_computed_again_go_the_same_way() -> None:
    policy = Policy(make(MODELS[0]), temperature=1.0)
    expected = gradients(policy, inputs(attends_apart=True))
    recompute_activations(policy.model)

    found = gradients(policy, inputs(attends_apart=True))

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_without_sdpa_keeps_its_mask() -> None:
    model = make(MODELS[0])
    model.set_attn_implementation("eager")

    assert not Policy(model, temperature=1.0).attends_apart
    assert model.config._attn_implementation == "eager"


def test_a_copy_and_a_saved_model_are_as_before(tmp_path: Path) -> None:
    policy = Policy(make(MODELS[0]), temperature=1.0)
    made = inputs(attends_apart=True)

    other = copy.deepcopy(policy.base)
    policy.model.save_pretrained(tmp_path)

    torch.testing.assert_close(
        other(**arguments_of(made)).last_hidden_state, policy.base(**arguments_of(made)).last_hidden_state
    )
    assert "flotilla" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_every_position_of_a_sequence_has_one_result() -> None:
    sequences = [np.array([0, 1, 5, 6, 7]), np.array([0, 1, 2, 3, 4]), np.array([8])]

    places = places_of(sequences, 10)

    assert places.blocks == ((2, 5), (1, 1))
    assert places.position_of.tolist() == [0, 1, 5, 6, 7, 0, 1, 2, 3, 4, 8]
    assert places.slot_of.tolist() == [0, 1, 7, 8, 9, 2, 3, 4, 10, -1]
    assert places.result_of.tolist() == [0, 1, 5, 6, 7, -1, -1, 2, 3, 4, 8]
    assert places.row_starts.tolist() == [0, 5, 10, 11]
    held = [places.slots[start:end].tolist() for start, end in pairwise(places.starts.tolist())]
    assert held == [[0, 5], [1, 6], [7], [8], [9], [2], [3], [4], [10], []]


def test_rows_hold_whole_groups_where_their_length_costs_nothing() -> None:
    lengths, prompts = [88] * 32, [Prompt(number // 8, 24) for number in range(32)]

    layouts = lay_out(lengths, max_tokens=4096, packing="auto", prompts=prompts, hidden_size=512, attends_apart=True)

    assert sum(layout.positions for layout in layouts) == 4 * (24 + 8 * 64)


@pytest.mark.parametrize("kinds", MODELS)
def test_gathering_without_kernels_as_on_a_gpu_gives_the_same(
    kinds: tuple[type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, made = Policy(make(kinds), temperature=1.0), inputs(attends_apart=True)
    assert policy.attends_apart
    expected = gradients(policy, made)
    monkeypatch.setattr(attention, "kernels_for", lambda *_: None)

    found = gradients(policy, made)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_critic_with_weights_of_its_own_attends_as_the_policy_does() -> None:
    spec = a_spec(
        algorithm={"advantage": {"kind": "gae"}},
        optimisation={"steps": 3, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "packing": "packed"},
        asynchrony={"require_batches": 2},
    )
    found = []
    for own in (None, LoadedModel(make(MODELS[0]), Path())):
        learner = Learner(spec, LoadedModel(make(MODELS[0]), Path()), critic=own)
        assert learner.policy.attends_apart
        found.append([learner.train(uneven_groups(prompt=9, seed=step), step).metrics for step in (1, 2, 3)])

    assert found[1] == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in found[0]]


def one_call(calls: list[dict[str, object]]) -> object:
    """Attend as torch's ``varlen_attn`` does under a causal mask, and note how it is called."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int, key_longest: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert torch.equal(starts, key_starts) and longest == key_longest
        lengths = starts.diff()
        assert starts[0] == 0 and starts[-1] == len(query) and int(lengths.max()) == longest
        calls.append({"dtype": starts.dtype, "window": window_size, "gqa": enable_gqa, "sequences": len(lengths)})
        parts = []
        for start, end in pairwise(starts.tolist()):
            q, k, v = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def test_sequences_of_all_lengths_go_in_one_call_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, made = Policy(make(MODELS[0]), temperature=1.0), inputs(attends_apart=True)
    expected = gradients(policy, made)
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(attention, "takes_all_lengths", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_call(calls))

    found = gradients(policy, made)

    layers = SHAPE["num_hidden_layers"]
    assert calls == [{"dtype": torch.int32, "window": (-1, 0), "gqa": True, "sequences": len(LENGTHS)}] * layers
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_torch_that_is_not_told_of_fewer_heads_of_keys_gets_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, made = Policy(make(MODELS[0]), temperature=1.0), inputs(attends_apart=True)
    expected = gradients(policy, made)
    attend, calls = one_call([]), []

    def older(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        calls.append(key.shape[1])
        told = {"scale": scale, "window_size": window_size, "enable_gqa": True}
        return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **told)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(attention, "takes_all_lengths", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)

    found = gradients(policy, made)

    assert calls == [SHAPE["num_key_value_heads"]] * SHAPE["num_hidden_layers"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_torch_without_the_call_attends_length_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention, "_has_varlen", lambda: False)

    assert not attention.takes_all_lengths(torch.device("cuda"), torch.bfloat16, 128)


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "capability", "expected"),
    [
        ("cuda", torch.bfloat16, 128, (9, 0), True),
        ("cuda", torch.float16, 64, (8, 0), True),
        ("cuda", torch.float32, 128, (9, 0), False),
        ("cuda", torch.bfloat16, 128, (7, 5), False),
        ("cuda", torch.bfloat16, 288, (9, 0), False),
        ("cuda", torch.bfloat16, 20, (9, 0), False),
        ("cpu", torch.bfloat16, 128, (9, 0), False),
    ],
)
def test_one_call_is_taken_where_flash_attention_computes(
    device: str,
    dtype: torch.dtype,
    dims: int,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    assert attention.takes_all_lengths(torch.device(device), dtype, dims) == expected


def test_torch_has_the_call_under_these_names() -> None:
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)

    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(names)


def varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as flash attention does: without a mask, in one row sequence by sequence, as positions begin again."""
    assert attention_mask is None
    width = query.shape[2]
    starts = [0]
    if position_ids is not None and query.shape[0] == 1:
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    parts = []
    for start, end in pairwise([*starts, width]):
        q, k, v = (each[:, :, start:end] for each in (query, key, value))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def test_flash_attention_gets_packed_rows_as_one_row_and_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", varlen)
    found = []
    for name, packing in (("sdpa", "padded"), ("flash_attention_2", "packed"), ("flash_attention_2", "padded")):
        model = make(MODELS[0])
        model.config._attn_implementation_internal = name
        spec = a_spec(
            optimisation={
                "steps": 2, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "epsilon": 1.0, "packing": packing,
            },
            asynchrony={"require_batches": 2},
        )  # fmt: skip
        learner = Learner(spec, LoadedModel(model, Path()))
        assert learner.policy.can_pack and learner.policy.attends_apart == (name == "sdpa")
        assert learner.policy.can_share_prompts == (name == "sdpa")
        learner.train(uneven_groups(prompt=9), 1)
        found.append(learner.weights.copies(as_published=False)["float32"])

    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[2], found[0], atol=1e-5, rtol=0)
