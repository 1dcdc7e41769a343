"""FlashAttention of older releases of torch, which read no block tables: each row is one page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flotilla.services.rollout.engines.decoders.architecture import architecture_of
from flotilla.services.rollout.engines.decoders.checkpoint import read_config
from flotilla.services.rollout.engines.decoders.flash_attention import (
    PAGE_TOKENS,
    FlashAttention,
    FlashAttentionByRow,
    attention_here,
)
from flotilla.services.rollout.engines.decoders.fused import FusedDecoder
from flotilla.services.rollout.engines.decoders.paged import PagedDecoder, works
from flotilla.shared.models.weight_files import safetensors_files
from tests.contract.engine.models import VOCAB, save_model

SIZES: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "num_rows": 6, "context_tokens": 32}


KERNEL = torch.ops.aten._flash_attention_forward.default


class KernelOnTheCpu(TorchDispatchMode):
    """Computes by sdpa what torch's kernel, which only GPUs have, would: torch binds each call to its schema."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not KERNEL:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        told = dict(zip((each.name for each in KERNEL._schema.arguments), args, strict=False)) | (kwargs or {})
        unused = torch.empty(0)
        return attended(**told), unused, unused, unused, unused


def attended(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, seqused_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend sequence by sequence. Lengths that are told go before the distance of two beginnings."""
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32 and len(cum_seq_q) == len(cum_seq_k)
    lengths = cum_seq_k.diff() if seqused_k is None else seqused_k
    assert lengths.dtype == torch.int32 and int(lengths.max()) <= max_k and int(cum_seq_q.diff().max()) <= max_q
    parts = []
    for number, length in enumerate(lengths.tolist()):
        begin = int(cum_seq_k[number])
        own = query[cum_seq_q[number] : cum_seq_q[number + 1]]
        q, k, v = (each.transpose(0, 1) for each in (own, key[begin : begin + length], value[begin : begin + length]))
        parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True))
    return torch.cat([each.transpose(0, 1) for each in parts])


@pytest.fixture
def kernel() -> Iterator[KernelOnTheCpu]:
    with KernelOnTheCpu() as mode:
        yield mode
    assert mode.num_calls


def old_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Has the signature of torch 2.10 and 2.11, which is all that is looked at."""
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen3"])
@pytest.mark.usefixtures("kernel")
def test_a_page_for_each_row_gives_the_logits_of_the_fused_forward(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    architecture, files = architecture_of(read_config(tmp_path)), safetensors_files(tmp_path)
    paged = PagedDecoder(architecture, files, **SIZES, attention=FlashAttentionByRow(), page_tokens=32)
    fused = FusedDecoder(architecture, files, **SIZES)
    assert works(paged)
    random = np.random.default_rng(0)
    lengths = np.zeros(6, dtype=np.int64)

    def compare(num_tokens: list[int], rows: list[list[int]], steps: int) -> None:
        sequences = [random.integers(0, VOCAB, num) for num in num_tokens]
        first, second = (decoder.prefill(sequences, rows) for decoder in (paged, fused))
        torch.testing.assert_close(first.log_softmax(-1), second.log_softmax(-1), atol=2e-5, rtol=1e-5)
        for num, group in zip(num_tokens, rows, strict=True):
            lengths[group] = num
        for _ in range(steps):
            num = int(np.flatnonzero(lengths)[-1]) + 1
            alive = np.flatnonzero(lengths[:num]).tolist()
            token_ids, held = torch.from_numpy(random.integers(0, VOCAB, num)), torch.from_numpy(lengths[:num].copy())
            found = [decoder.decode(token_ids, held, int(lengths.max()))[alive].clone() for decoder in (paged, fused)]
            torch.testing.assert_close(found[0].log_softmax(-1), found[1].log_softmax(-1), atol=2e-5, rtol=1e-5)
            lengths[:num] += lengths[:num] > 0

    compare([5, 8], [[0, 1, 2], [3]], 6)
    lengths[1] = 0
    for decoder in (paged, fused):
        decoder.move_rows([3], [1], int(lengths.max()))
    lengths[1], lengths[3] = lengths[3], 0
    compare([3], [[3, 4]], 5)


@pytest.mark.usefixtures("kernel")
def test_long_rows_take_memory_when_they_are_used(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    architecture, files = architecture_of(read_config(tmp_path)), safetensors_files(tmp_path)
    sizes = {**SIZES, "num_rows": 32, "context_tokens": 8192}
    paged = PagedDecoder(architecture, files, **sizes, attention=FlashAttentionByRow(), page_tokens=8192)
    prompt = np.arange(5)

    paged.prefill([prompt], [[0]])
    assert paged._keys.shape[1] * 8192 <= (1 + 2) * 8192
    paged.prefill([prompt], [list(range(1, 32))])
    assert paged._keys.shape[1] == 1 + 32


def test_the_installed_torch_says_how_rows_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, page_tokens = attention_here(4096)
    assert (type(attention), page_tokens) == (FlashAttention, PAGE_TOKENS)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old_varlen_attn)

    attention, page_tokens = attention_here(4096)
    assert (type(attention), page_tokens) == (FlashAttentionByRow, 4096)


def test_packed_and_paged_attention_are_dense_attention_of_each_row(kernel: KernelOnTheCpu) -> None:
    generator = torch.Generator().manual_seed(3)
    queries, keys, values = (torch.randn(9, heads, 8, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    cache = torch.zeros(3, 8, 2, 8), torch.zeros(3, 8, 2, 8)
    for page, (begin, end) in ((2, (0, 4)), (0, (4, 9))):
        cache[0][page, : end - begin], cache[1][page, : end - begin] = keys[begin:end], values[begin:end]
    table, lengths = torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)

    packed = FlashAttentionByRow().packed(queries, keys, values, starts, 5)
    bounds = FlashAttentionByRow().bounds(table, lengths, 8)
    paged = FlashAttentionByRow().paged(queries[[3, 8]], *cache, table, lengths, bounds)

    expected = torch.cat([dense(queries[b:e], keys[b:e], values[b:e]) for b, e in ((0, 4), (4, 9))])
    torch.testing.assert_close(packed, expected)
    torch.testing.assert_close(paged, expected[[3, 8]])
    assert kernel.num_calls == 2


def dense(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention written out: [T, H, D] of [T, H, D] and [T, Hkv, D]."""
    keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[-1] ** 0.5
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), values)
