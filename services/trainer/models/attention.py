"""Attention of packed rows, sequence by sequence: what a dense mask forbids is not computed at all.

A row may be as long as it likes then, so that answers to one prompt need no padding and no second copy of the prompt.
Queries, keys and values of each sequence, its prompt's included, are gathered from where they are in the rows;
sequences of about the same length are attended to in one call, under a plain causal mask; what they give goes back to
its place.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.trainer.data.places import SequencePlaces
from services.trainer.models.native.kernels import Kernels, kernels_for

ATTENTION = "flotilla_by_sequence"


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
    rows, heads, tokens, dims = query.shape
    flat = [each.transpose(1, 2).reshape(rows * tokens, -1) for each in (query, key, value)]
    taken = [_taken(each, places) for each in flat]
    results, start = [], 0
    for count, width in places.blocks:
        block = [each[start : start + count * width].view(count, width, -1, dims).transpose(1, 2) for each in taken]
        attended = nn.functional.scaled_dot_product_attention(
            block[0], block[1], block[2], is_causal=True, scale=scaling, enable_gqa=key.shape[1] != heads
        )
        results.append(attended.transpose(1, 2).reshape(count * width, heads * dims))
        start += count * width
    joined = results[0] if len(results) == 1 else torch.cat(results)
    return _put_back(joined, places).view(rows, tokens, heads, dims), None


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
