"""Which configurations the fused forward takes, and what it reads from them."""

from typing import Any

import pytest

from flotilla.services.rollout.engines.decoders.architecture import architecture_of, is_written_out, reason_not_fused
from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader, check_headers
from flotilla.shared.errors import WeightTransferFailed

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 428,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def test_a_complete_configuration_is_taken() -> None:
    architecture = architecture_of(QWEN3)

    assert is_written_out(QWEN3)
    assert reason_not_fused(QWEN3) is None
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (4, 2, 16)
    assert (architecture.has_qk_norm, architecture.has_qkv_bias, architecture.is_tied) == (True, False, True)


def test_an_older_configuration_names_theta_at_the_top() -> None:
    older = {key: value for key, value in QWEN3.items() if key != "rope_parameters"} | {"rope_theta": 5e5}

    assert is_written_out(older)
    assert architecture_of(older).rope_theta == 5e5


@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "rope_parameters", "head_dim"]
)
def test_a_configuration_that_relies_on_defaults_is_not_complete(key: str) -> None:
    assert not is_written_out({name: value for name, value in QWEN3.items() if name != key})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}, "rope_theta": 1e4}, "linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
        ({"attention_bias": True}, "bias"),
        ({"quantization_config": {}}, "quantised"),
    ],
)
def test_what_the_fused_forward_lacks_is_named(change: dict[str, Any], reason: str) -> None:
    assert reason in str(reason_not_fused({**QWEN3, **change}))


def test_a_window_that_is_not_used_does_not_matter() -> None:
    assert reason_not_fused({**QWEN3, "sliding_window": 64, "use_sliding_window": False}) is None


@pytest.mark.parametrize("change", [{"num_key_value_heads": 3}, {"head_dim": 15}])
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        architecture_of({**QWEN3, **change})


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "2 missing .first: a"),
        ({"a": TensorHeader("F32", (2,)), "b": TensorHeader("F32", (3,)), "c": TensorHeader("F32", ())}, "1 unknown"),
        ({"a": TensorHeader("F32", (3,)), "b": TensorHeader("F32", (3,))}, r"a has shape \[3\], the model needs \[2\]"),
        ({"a": TensorHeader("I32", (2,)), "b": TensorHeader("F32", (3,))}, "a has dtype I32"),
    ],
)
def test_headers_that_do_not_fit_are_named(headers: dict[str, TensorHeader], message: str) -> None:
    with pytest.raises(WeightTransferFailed, match=message):
        check_headers(headers, {"a": (2,), "b": (3,)}, optional=frozenset())


def test_optional_tensors_may_be_there_or_not() -> None:
    expected = {"a": (2,), "tied": (2,)}

    check_headers({"a": TensorHeader("BF16", (2,))}, expected, optional=frozenset({"tied", "table"}))
    check_headers(
        {"a": TensorHeader("F16", (2,)), "tied": TensorHeader("F32", (2,)), "table": TensorHeader("I64", (9,))},
        expected,
        optional=frozenset({"tied", "table"}),
    )
