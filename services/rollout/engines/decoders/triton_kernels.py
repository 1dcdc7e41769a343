"""Kernels in Triton for a decode step on a GPU. Only what needs them imports this: torch's build for CUDA brings it.

Roundings are where torch's operators round: after the normalisation, after its weight, and after the rotation.

Source: Tillet, Kung, Cox, Triton, MAPL 2019.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GATED_BLOCK = 1024
SAMPLED_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_keep(  # type: ignore[no-untyped-def]
    fused,
    norm,
    rotations,
    positions,
    slots,
    queries,
    keys,
    values,
    epsilon,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    dims: tl.constexpr,
    pairs: tl.constexpr,
    has_norm: tl.constexpr,
):
    """One head of one row: a query, a key or a value."""
    row, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, pairs)
    here = pair < dims // 2
    source = fused + (row * (num_heads + 2 * num_kv_heads) + head) * dims + 2 * pair
    first, second = tl.load(source, mask=here, other=0.0), tl.load(source + 1, mask=here, other=0.0)
    slot = tl.load(slots + row)
    if head < num_heads + num_kv_heads:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if has_norm:
            scale = 1.0 / tl.sqrt((tl.sum(x * x) + tl.sum(y * y)) / dims + epsilon)
            weight = norm + head * dims + 2 * pair
            kind = first.dtype
            x = (x * scale).to(kind).to(tl.float32) * tl.load(weight, mask=here, other=0.0).to(tl.float32)
            y = (y * scale).to(kind).to(tl.float32) * tl.load(weight + 1, mask=here, other=0.0).to(tl.float32)
            x, y = x.to(kind).to(tl.float32), y.to(kind).to(tl.float32)
        angle = rotations + tl.load(positions + row) * dims + 2 * pair
        cosine, sine = tl.load(angle, mask=here, other=0.0), tl.load(angle + 1, mask=here, other=0.0)
        if head < num_heads:
            target = queries + (row * num_heads + head) * dims + 2 * pair
        else:
            target = keys + (slot * num_kv_heads + head - num_heads) * dims + 2 * pair
        tl.store(target, (x * cosine - y * sine).to(first.dtype), mask=here)
        tl.store(target + 1, (x * sine + y * cosine).to(first.dtype), mask=here)
    else:
        target = values + (slot * num_kv_heads + head - num_heads - num_kv_heads) * dims + 2 * pair
        tl.store(target, first, mask=here)
        tl.store(target + 1, second, mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(source, target, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    here = at < width
    gate = tl.load(source + row * 2 * width + at, mask=here, other=0.0)
    up = tl.load(source + row * 2 * width + width + at, mask=here, other=0.0)
    x = gate.to(tl.float32)
    active = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(target + row * width + at, (active * up.to(tl.float32)).to(gate.dtype), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(logits, temperatures, largest, sums, vocabulary, block: tl.constexpr, has_temperatures: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of one row: its largest score, and the sum of the exponentials of the distances to that."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = number * block + tl.arange(0, block)
    x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    if has_temperatures:
        x = x / tl.load(temperatures + row)
    top = tl.max(x)
    place = row * tl.num_programs(1) + number
    tl.store(largest + place, top)
    tl.store(sums + place, tl.sum(tl.exp(x - top)))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    largest,
    sums,
    draws,
    tokens,
    log_probs,
    vocabulary,
    num_blocks,
    block: tl.constexpr,
    blocks: tl.constexpr,
    has_temperatures: tl.constexpr,
):
    """One row: the block in which the drawn share of the sum ends, and the token in it."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, blocks)
    known = each < num_blocks
    tops = tl.load(largest + row * num_blocks + each, mask=known, other=float("-inf"))
    top = tl.max(tops)
    share = tl.load(sums + row * num_blocks + each, mask=known, other=0.0)
    # A block of which nothing is possible has no largest score to measure from.
    weights = tl.where(tops == float("-inf"), 0.0, share * tl.exp(tops - top)).to(tl.float64)
    ends = tl.cumsum(weights)
    total = tl.sum(weights)
    aim = tl.load(draws + row) * total
    number = tl.minimum(tl.sum((known & (ends <= aim)).to(tl.int32)), num_blocks - 1)
    before = tl.sum(tl.where(each < number, weights, 0.0))
    inside = tl.arange(0, block)
    at = number * block + inside
    x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    if has_temperatures:
        x = x / tl.load(temperatures + row)
    p = tl.exp(x - top)
    reached = before + tl.cumsum(p.to(tl.float64))
    last = tl.max(tl.where(p > 0, inside, 0))
    index = tl.minimum(tl.sum((reached <= aim).to(tl.int32)), last)
    token = number * block + index
    tl.store(tokens + row, token.to(tl.int64))
    chosen = tl.sum(tl.where(inside == index, x, 0.0))
    tl.store(log_probs + row, (chosen - top).to(tl.float32) - tl.log(total).to(tl.float32))


def sample(logits: Tensor, draws: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sample one token per row from the softmax of its logits by temperature.

    Args:
        logits: [B, V], contiguous.
        draws: [B] float64 in [0, 1).
        temperatures: [B] float32; None: all are 1.

    Returns:
        Token ids [B] int64, and their log-probabilities [B] float32, not finite where logits are not.
    """
    rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, SAMPLED_BLOCK)
    largest, sums = logits.new_empty((2, rows, num_blocks), dtype=torch.float32)
    tokens, log_probs = draws.new_empty(rows, dtype=torch.int64), draws.new_empty(rows, dtype=torch.float32)
    has_temperatures = temperatures is not None
    divisors = temperatures if has_temperatures else largest
    weigh: Any = _weigh[(rows, num_blocks)]
    weigh(logits, divisors, largest, sums, vocabulary, SAMPLED_BLOCK, has_temperatures, num_warps=8)
    draw: Any = _draw[(rows,)]
    blocks = triton.next_power_of_2(num_blocks)
    draw(
        logits,
        divisors,
        largest,
        sums,
        draws,
        tokens,
        log_probs,
        vocabulary,
        num_blocks,
        SAMPLED_BLOCK,
        blocks,
        has_temperatures,
        num_warps=8,
    )
    return tokens, log_probs


def rotate_and_keep(
    fused: Tensor,
    norm: Tensor | None,
    epsilon: float,
    places: tuple[Tensor, Tensor, Tensor],
    queries: Tensor,
    pools: tuple[Tensor, Tensor],
) -> None:
    """Normalise and rotate queries and keys, and write keys and values to their places.

    Args:
        fused: [B, (H + 2 Hkv) * D], queries, keys and values; the two of a rotated pair are neighbours.
        norm: weights of the normalisation of each head, [H + Hkv, D]; None: there is none.
        epsilon: of the normalisation.
        places: rotations [P, D / 2, 2] float32, and of each row its position and its slot, [B] int64.
        queries: [B, H, D], written to.
        pools: of keys and values, [pages, page tokens, Hkv, D], written to.
    """
    (rows, num_heads, dims), num_kv_heads = queries.shape, pools[0].shape[2]
    grid = (rows, num_heads + 2 * num_kv_heads)
    kernel: Any = _rotate_and_keep[grid]
    kernel(
        fused,
        fused if norm is None else norm,
        *places,
        queries,
        *pools,
        epsilon,
        num_heads,
        num_kv_heads,
        dims,
        triton.next_power_of_2(dims // 2),
        norm is not None,
        num_warps=1,
    )


def gated(gate_up: Tensor) -> Tensor:
    """Multiply by the activation: rows [B, 2 * F] to ``silu(first half) * second half``, [B, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(rows, width)
    kernel: Any = _gated[(rows, triton.cdiv(width, GATED_BLOCK))]
    kernel(gate_up, result, width, GATED_BLOCK)
    return result
