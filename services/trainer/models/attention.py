"""Attention of packed rows, sequence by sequence: what a dense mask forbids is not computed at all.

A row may be as long as it likes then, so that answers to one prompt need no padding and no second copy of the prompt.
Queries, keys and values of each sequence, its prompt's included, are gathered from where they are in the rows;
sequences of about the same length are attended to in one call, under a plain causal mask; what they give goes back to
its place. On a GPU in 16 bits torch's FlashAttention takes sequences of all lengths in one call.
"""

import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flotilla.services.trainer.data.places import SequencePlaces
from flotilla.services.trainer.models.native.kernels import Kernels, kernels_for

ATTENTION = "flotilla_by_sequence"
LEAST_CAPABILITY = (8, 0)
LARGEST_HEAD = 256
"""What torch's FlashAttention over sequences of all lengths computes: GPUs from Ampere on, heads of so many numbers."""


def attend_by_sequence(body: nn.Module) -> None:
    """Let a model's attention take ``places``; without them it is what it was under ``sdpa``."""
    AttentionInterface.register(ATTENTION, _attention)
    body.set_attn_implementation(ATTENTION)  # type: ignore[operator]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    places: SequencePlaces | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as sdpa does: [B, H, T, D] to [B, T, H, D]."""
    if places is None:
        found, _ = sdpa_attention_forward(  # type: ignore[no-untyped-call]
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return found, None
    return attended_by_sequence(query, key, value, places, scaling), None


def attended_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, places: SequencePlaces, scaling: float | None
) -> Tensor:
    """Attend causally within each sequence.

    Args:
        query, key, value: [B, H, T, D]; keys and values may have fewer heads.
        places: where the sequences are in the B * T positions.
        scaling: of the products; None: as sdpa has it.

    Returns:
        [B, T, H, D]; what is in padding is not used.
    """
    rows, heads, tokens, dims = query.shape
    flat = [each.transpose(1, 2).reshape(rows * tokens, -1) for each in (query, key, value)]
    taken = [_taken(each, places).view(len(places.position_of), -1, dims) for each in flat]
    attend = _in_one_call if takes_all_lengths(query.device, query.dtype, dims) else _block_by_block
    joined = attend(taken[0], taken[1], taken[2], places, scaling).reshape(-1, heads * dims)
    return _put_back(joined, places).view(rows, tokens, heads, dims)


def takes_all_lengths(device: torch.device, dtype: torch.dtype, dims: int) -> bool:
    """Whether torch's FlashAttention computes sequences of all lengths in one call, for heads of so many numbers."""
    if device.type != "cuda" or dtype not in {torch.bfloat16, torch.float16} or not _has_varlen():
        return False
    return dims <= LARGEST_HEAD and dims % 8 == 0 and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def _has_varlen() -> bool:
    return find_spec("torch.nn.attention.varlen") is not None


def _in_one_call(query: Tensor, key: Tensor, value: Tensor, places: SequencePlaces, scaling: float | None) -> Tensor:
    """Attend in slots: [G, H, D] each. A sequence's padding comes after it, where no token of it looks."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = places.row_starts, max(width for _, width in places.blocks)
    told: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    # Up to torch 2.11 it does not ask: the kernels take fewer heads of keys and values in any case.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        told["enable_gqa"] = key.shape[1] != query.shape[1]
    found = varlen_attn(query, key, value, starts, starts, longest, longest, **told)
    assert isinstance(found, Tensor)
    return found


def _block_by_block(query: Tensor, key: Tensor, value: Tensor, places: SequencePlaces, scaling: float | None) -> Tensor:
    """Attend in slots: [G, H, D] each; sequences of about the same length in one call."""
    dtype = query.dtype
    if dtype == torch.bfloat16 and query.device.type == "cpu":
        # In bfloat16 torch's attention takes three times as long on a CPU.
        query, key, value = query.float(), key.float(), value.float()
    results, start = [], 0
    for count, width in places.blocks:
        slots = slice(start, start + count * width)
        block = [each[slots].view(count, width, *each.shape[1:]).transpose(1, 2) for each in (query, key, value)]
        attended = nn.functional.scaled_dot_product_attention(
            block[0], block[1], block[2], is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        results.append(attended.transpose(1, 2).flatten(0, 1))
        start += count * width
    return (results[0] if len(results) == 1 else torch.cat(results)).to(dtype)


def _taken(x: Tensor, places: SequencePlaces) -> Tensor:
    """Gather rows of positions into slots; what is in padding is not used."""
    kernels = kernels_for(x)
    if kernels is None:
        return x.index_select(0, places.position_of.clamp(min=0).to(x.device))
    found: Tensor = _Take.apply(x, places, kernels)  # type: ignore[no-untyped-call]
    return found


def _put_back(x: Tensor, places: SequencePlaces) -> Tensor:
    """Gather rows of slots into positions; what is in padding is not used."""
    kernels = kernels_for(x)
    if kernels is None:
        return x.index_select(0, places.slot_of.clamp(min=0).to(x.device))
    found: Tensor = _PutBack.apply(x, places, kernels)  # type: ignore[no-untyped-call]
    return found


class _Take(torch.autograd.Function):
    """From positions [P, N] to slots [G, N]; 0 in padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: SequencePlaces, kernels: Kernels) -> Tensor:
        ctx.known = places, kernels
        return kernels.take_rows(x.contiguous(), places.position_of)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        places, kernels = ctx.known
        return kernels.sum_rows(gradients[0].contiguous(), places.slots, places.starts), None, None


class _PutBack(torch.autograd.Function):
    """From slots [G, N] to positions [P, N]; 0 in padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: SequencePlaces, kernels: Kernels) -> Tensor:
        ctx.known = places, kernels
        return kernels.take_rows(x.contiguous(), places.slot_of)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        places, kernels = ctx.known
        return kernels.take_rows(gradients[0].contiguous(), places.result_of), None, None
