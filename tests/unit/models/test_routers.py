"""Routers that are told what to choose give what they would give had they chosen it, with the gradient of it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from flotilla.shared.errors import ModelError
from flotilla.shared.models.routers import UNKNOWN, Routing
from tests.integration.trainer.architectures import ARCHITECTURES, COMMON, EXPERTS

SIZES: dict[str, Any] = {**COMMON, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}
MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "Qwen3-MoE": ARCHITECTURES["Qwen3-MoE"],
    "Qwen3-MoE, normalised": lambda: ARCHITECTURES["Qwen3-MoE"](norm_topk_prob=True),
    "Mixtral": ARCHITECTURES["Mixtral"],
    "Qwen2-MoE": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=24)).eval(),
    "OLMoE": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES)).eval(),
}
IDS = torch.arange(1, 13).reshape(2, 6)


def hidden(model: Any) -> Tensor:
    found: Tensor = model.base_model(input_ids=IDS).last_hidden_state
    return found


def recorded(model: nn.Module, routing: Routing) -> Tensor:
    """Return what a model chooses for ``IDS`` by itself."""
    with routing.recording():
        hidden(model)
    return routing.taken(IDS.shape[0])


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    hidden(model).square().mean().backward()
    return [torch.zeros(()) if each.grad is None else each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_recorded_is_what_transformers_records_and_changes_nothing(name: str) -> None:
    model = MIXTURES[name]()
    expected = hidden(model)
    logits: Sequence[Tensor] = model(input_ids=IDS, output_router_logits=True).router_logits
    routing = Routing(model)

    chosen = recorded(model, routing)

    assert torch.equal(hidden(model), expected)
    assert chosen.dtype == torch.int16
    for layer, each in enumerate(logits):
        own = each.topk(2).indices.sort(-1).values.reshape(2, 6, 2)
        assert torch.equal(chosen[:, :, layer].long().sort(-1).values, own)


@pytest.mark.parametrize("name", MIXTURES)
def test_told_its_own_choice_a_model_gives_the_same_with_the_same_gradients(name: str) -> None:
    model = MIXTURES[name]()
    routing = Routing(model)
    expected, of_weights = hidden(model), gradients(model)
    chosen = recorded(model, routing)

    with routing.replaying(chosen):
        found, again = hidden(model), gradients(model)

    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for one, other in zip(again, of_weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    differing, told = routing.disagreement() or (None, None)
    assert (float(differing), float(told)) == (0.0, 2.0 * IDS.numel())


@pytest.mark.parametrize("name", MIXTURES)
def test_told_another_choice_it_uses_those_experts_and_counts_where_it_disagrees(name: str) -> None:
    model = MIXTURES[name]()
    routing = Routing(model)
    chosen = recorded(model, routing)
    # The two experts of each layer that were not chosen, for the first row's third token alone.
    others = [[each for each in range(4) if each not in layer] for layer in chosen[0, 2].tolist()]
    told = chosen.clone()
    told[0, 2] = torch.tensor(others, dtype=torch.int16)
    expected = hidden(model)

    with routing.replaying(told), routing.recording():
        found = hidden(model)

    used = routing.taken(2)
    assert (used != told)[0, 2].any()  # It records what it would have chosen itself.
    apart = (found - expected).abs().amax(-1)
    assert (apart[0, 2:] > 1e-4).all()
    assert apart[0, :2].max() < 1e-6
    assert apart[1].max() < 1e-6
    differing, counted = routing.disagreement() or (torch.zeros(()), torch.zeros(()))
    assert float(differing) >= 2
    assert float(counted) == 2.0 * IDS.numel()


def test_tokens_without_a_record_choose_for_themselves() -> None:
    model = MIXTURES["Qwen3-MoE"]()
    routing = Routing(model)
    expected, chosen = hidden(model), recorded(model, routing)
    chosen[1] = UNKNOWN

    with routing.replaying(chosen):
        found = hidden(model)

    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert float((routing.disagreement() or (0.0, 0.0))[1]) == 2.0 * 6
    with routing.replaying(None):
        hidden(model)
    assert routing.disagreement() is None


def test_routers_learn_from_what_they_were_told() -> None:
    model = MIXTURES["Qwen3-MoE"]()
    routing = Routing(model)
    told = torch.tensor([3, 1], dtype=torch.int16).expand(2, 6, 2, 2)

    with routing.replaying(told):
        gradients(model)

    of_gate = model.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert of_gate is not None
    assert of_gate.abs().max() > 0
    of_experts = model.get_parameter("model.layers.0.mlp.experts.down_proj").grad
    assert of_experts is not None
    assert [bool(each.abs().max() > 0) for each in of_experts] == [False, True, False, True]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (ARCHITECTURES["Qwen3"], "Qwen3ForCausalLM, which has no routers"),
        (lambda: GptOssForCausalLM(GptOssConfig(**COMMON, **EXPERTS, num_local_experts=4)), "GptOssTopKRouter"),
        (
            lambda: DeepseekV3ForCausalLM(
                DeepseekV3Config(
                    **COMMON | {"num_key_value_heads": 4}, **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1,
                    first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                    v_head_dim=8, moe_intermediate_size=16,
                )
            ),
            "DeepseekV3TopkRouter",
        ),
    ],
    ids=["dense", "GPT-OSS", "DeepSeek-V3"],
)  # fmt: skip
def test_other_models_are_refused_by_name(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        Routing(make())
