"""FlashAttention of older releases of torch, which read no block tables: each row is one page."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.architecture import architecture_of
from flotilla.services.rollout.engines.decoders.checkpoint import read_config, safetensors_files
from flotilla.services.rollout.engines.decoders.flash_attention import (
    PAGE_TOKENS,
    FlashAttention,
    FlashAttentionByRow,
    attention_here,
)
from flotilla.services.rollout.engines.decoders.fused import FusedDecoder
from flotilla.services.rollout.engines.decoders.paged import PagedDecoder, works
from tests.contract.engine.models import VOCAB, save_model

SIZES: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "num_rows": 6, "context_tokens": 32}
OLD_NAMES = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"]


def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, seqused_k: Tensor | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Compute what torch's kernel does: lengths that are told go before the distance of two beginnings."""
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32 and len(cum_seq_q) == len(cum_seq_k)
    lengths = cum_seq_k.diff() if seqused_k is None else seqused_k
    assert lengths.dtype == torch.int32 and int(lengths.max()) <= max_k and int(cum_seq_q.diff().max()) <= max_q
    parts = []
    for number, length in enumerate(lengths.tolist()):
        begin = int(cum_seq_k[number])
        own = query[cum_seq_q[number] : cum_seq_q[number + 1]]
        q, k, v = (each.transpose(0, 1) for each in (own, key[begin : begin + length], value[begin : begin + length]))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    return (torch.cat(parts),)


def old_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Has the signature of torch 2.10 and 2.11, which is all that is looked at."""
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen3"])
def test_a_page_for_each_row_gives_the_logits_of_the_fused_forward(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
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


def test_long_rows_take_memory_when_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
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


def test_torch_has_the_kernel_under_these_names() -> None:
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]

    assert names[:10] == ["query", "key", "value", *OLD_NAMES]
    assert "seqused_k" in names
    assert list(inspect.signature(forward).parameters)[:10] == names[:10]
