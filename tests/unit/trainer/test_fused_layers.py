"""Layers that compute in single passes compute what they did."""

import copy
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from flotilla.services.trainer.models.fused_layers import fuse_layers
from flotilla.services.trainer.models.native.kernels import kernels_for

pytestmark = pytest.mark.skipif(kernels_for() is None, reason="no C compiler")

CONFIG = Qwen3Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48,
)  # fmt: skip


def gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    leaves = [each.clone().requires_grad_() for each in inputs]
    out = module(*leaves)
    (out * torch.randn_like(out)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None), *(p.grad for p in module.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("make", [lambda: Qwen3RMSNorm(32), lambda: Qwen3MLP(CONFIG)])
@pytest.mark.parametrize("shape", [(5, 32), (3, 7, 32), (2, 3, 4, 32)])
def test_values_and_gradients_are_those_of_the_plain_layer(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = make()
    fused, hidden = copy.deepcopy(plain), torch.randn(shape)
    with torch.no_grad():
        for each in (plain, fused):
            for parameter in each.parameters():
                parameter.copy_(torch.linspace(1, 99, parameter.numel()).view(parameter.shape).sin() / 5)

    assert fuse_layers(fused) == 1

    for found, expected in zip(gradients(fused, hidden), gradients(plain, hidden), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_a_norm_of_another_kind_stays_as_it_is() -> None:
    norm = GemmaRMSNorm(32)
    norm.variance_epsilon = norm.eps  # the name is right, and what it computes is not

    assert fuse_layers(norm) == 0
    assert type(norm) is GemmaRMSNorm


def test_a_copy_computes_with_its_own_weights() -> None:
    norm = Qwen3RMSNorm(32)
    fuse_layers(norm)
    other = copy.deepcopy(norm)

    with torch.no_grad():
        other.weight.fill_(2.0)

    rows = torch.randn(3, 32)
    torch.testing.assert_close(other(rows), 2 * norm(rows))


def test_what_the_kernels_cannot_compute_is_computed_as_before() -> None:
    model = Qwen3ForCausalLM(CONFIG)
    fuse_layers(model)

    logits = model.double()(torch.arange(6)[None]).logits

    assert logits.dtype == torch.float64
    assert logits.isfinite().all()


@pytest.mark.parametrize("make", [lambda: Qwen3RMSNorm(32), lambda: Qwen3MLP(CONFIG)])
def test_bfloat16_is_computed_in_float32_and_rounded_at_the_end(make: Any) -> None:
    torch.manual_seed(0)
    fused = make().bfloat16()
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.copy_(torch.linspace(1, 99, parameter.numel()).view(parameter.shape).sin() / 5)
    plain, hidden = copy.deepcopy(fused).float(), torch.randn(3, 7, 32).bfloat16()

    assert fuse_layers(fused) == 1

    for found, expected in zip(gradients(fused, hidden), gradients(plain, hidden.float()), strict=True):
        assert found.dtype == torch.bfloat16
        # Products with weights are torch's, and round between; a norm's result is the nearest number there is.
        scale = expected.abs().max().item()
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-6 * scale)
    if isinstance(fused, Qwen3RMSNorm):
        assert torch.equal(fused(hidden), plain(hidden.float()).bfloat16())


def test_bfloat16_keeps_what_is_no_number() -> None:
    norm = Qwen3RMSNorm(32).bfloat16()
    fuse_layers(norm)
    rows = torch.ones(3, 32, dtype=torch.bfloat16)
    rows[0, 3], rows[1, 4] = torch.nan, -torch.inf

    found = norm(rows)

    assert found[0].isnan().all() and found[1, 4].isnan()
    assert torch.equal(found[2], rows[2])


@pytest.mark.parametrize("size", [5, 256, 600])
def test_sums_of_rows_in_bfloat16_are_rounded_once(size: int) -> None:
    kernels = kernels_for()
    assert kernels is not None
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    sources, starts = torch.tensor([0, 4, 8, 1, 2, 2]), torch.tensor([0, 3, 3, 4, 6])

    found = kernels.sum_rows(x, sources, starts)

    parts = [x[sources[start:end]].float() for start, end in itertools.pairwise(starts)]
    assert torch.equal(found, torch.stack([part.sum(0) for part in parts]).bfloat16())
    index = torch.tensor([3, -1, 0])
    expected = torch.stack([x[3], torch.zeros(size).bfloat16(), x[0]])
    assert torch.equal(kernels.take_rows(x, index), expected)


def test_a_whole_model_is_fused_once_and_is_saved_as_before(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM(CONFIG)
    names, ids = [name for name, _ in model.named_parameters()], torch.arange(9)[None]
    expected = model(ids).logits

    assert fuse_layers(model) == 2 * (4 + 1) + 1
    assert fuse_layers(model) == 0

    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in model.named_parameters()] == names
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(Qwen3ForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)


def test_a_model_whose_weights_are_read_later_is_fused_too() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(CONFIG)
        gemma = GemmaRMSNorm(32)
    gemma.variance_epsilon = gemma.eps

    assert fuse_layers(model) == 2 * (4 + 1) + 1
    assert all(parameter.is_meta for parameter in model.parameters())
    assert fuse_layers(gemma) == 0


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    kernels, threads = kernels_for(), torch.get_num_threads()
    assert kernels is not None
    x, weight, of_out = torch.randn(103, 32), torch.randn(32), torch.randn(103, 32)
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, factors = kernels.rms_norm(x, weight, 1e-6)
            found.append((out, *kernels.rms_norm_backward(of_out, x, weight, factors), kernels.silu_mul(x, of_out)))
    finally:
        torch.set_num_threads(threads)

    for other in found[1:]:
        assert all(torch.equal(one, each) for one, each in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_turned_as_transformers_turns_them(dtype: torch.dtype) -> None:
    model = Qwen3ForCausalLM(CONFIG)
    plain = inspect.unwrap(modeling_qwen3.apply_rotary_pos_emb)
    fuse_layers(model)
    fused = modeling_qwen3.apply_rotary_pos_emb
    angles = torch.rand(2, 5, 4).repeat(1, 1, 2) * 6
    heads = [torch.randn(2, count, 5, 8).to(dtype) for count in (4, 2)]

    def turned(rotate: Any) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in heads]
        both = rotate(*leaves, angles.cos().to(dtype), angles.sin().to(dtype))
        sum((each * each.detach().cos()).sum() for each in both).backward()
        return [*both, *(leaf.grad for leaf in leaves)]

    bounds = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    for found, expected in zip(turned(fused), turned(plain), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, **bounds)
