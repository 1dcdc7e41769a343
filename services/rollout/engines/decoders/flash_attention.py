"""torch's FlashAttention-2 over packed sequences, and from one token of each row to what the cache holds of it.

How a cache may lie depends on the release of torch: with block tables a row is scattered over pages; before, the kernel
is told where each row begins and how much of it counts, so a row is one page that is as long as the longest.

Sources: Dao, FlashAttention-2, arXiv:2307.08691; torch.nn.attention.varlen.
"""

import inspect
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

PAGE_TOKENS = 256
"""FlashAttention-2 takes pages of multiples of this."""
BY_TABLE = frozenset({"enable_gqa", "seqused_k", "block_table", "num_splits"})
"""What torch's ``varlen_attn`` takes where it reads pages."""


Bounds = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention over packed sequences, and over pages."""

    def packed(self, queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Attend causally within sequences.

        Args:
            queries, keys, values: [T, H, D] and [T, Hkv, D].
            starts: [N + 1] int32, where each sequence begins, and the end of the last.
            longest: tokens of the longest.

        Returns:
            [T, H, D].
        """

    def bounds(self, table: Tensor, lengths: Tensor, page_tokens: int) -> Bounds:
        """Compute what ``paged`` needs in every layer, of ``table`` and ``lengths`` as it takes them.

        Args:
            page_tokens: tokens of a page.

        Returns:
            [B + 1] int32 each: the ends of the rows' queries, and where their keys begin.
        """

    def paged(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, bounds: Bounds
    ) -> Tensor:
        """Attend from one token of each row to all that its pages hold.

        Args:
            queries: [B, H, D].
            keys, values: [pages, page tokens, Hkv, D].
            table: [B, P] int32.
            lengths: [B] int32, tokens of each row, at least 1.
            bounds: from ``bounds``.

        Returns:
            [B, H, D].
        """


class FlashAttention:
    """``Attention`` by torch's ``varlen_attn`` with block tables, which needs a GPU and 16 bits."""

    def packed(self, queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Attend causally within sequences; see ``Attention.packed``."""
        from torch.nn.attention.varlen import varlen_attn

        mixed = varlen_attn(
            queries,
            keys,
            values,
            starts,
            starts,
            longest,
            longest,
            window_size=(-1, 0),
            enable_gqa=queries.shape[1] != keys.shape[1],
            num_splits=1,
        )
        assert isinstance(mixed, Tensor)
        return mixed

    def bounds(self, table: Tensor, lengths: Tensor, page_tokens: int) -> Bounds:
        """Add the lengths up, which nothing reads where there are tables; see ``Attention.bounds``."""
        return _one_each(lengths), functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def paged(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, bounds: Bounds
    ) -> Tensor:
        """Attend from one token of each row; see ``Attention.paged``.

        One split: more are not the same to the bit for other neighbours, and gave NaN in FlashAttention-2 over pages.
        """
        from torch.nn.attention.varlen import varlen_attn

        mixed = varlen_attn(
            queries,
            keys,
            values,
            *bounds,
            1,
            table.shape[1] * keys.shape[1],
            enable_gqa=queries.shape[1] != keys.shape[2],
            seqused_k=lengths,
            block_table=table,
            num_splits=1,
        )
        assert isinstance(mixed, Tensor)
        return mixed


class FlashAttentionByRow:
    """``Attention`` where each row is one page: torch's kernel takes its offset, without block tables."""

    def packed(self, queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Attend causally within sequences; see ``Attention.packed``."""
        attend = torch.ops.aten._flash_attention_forward
        mixed: Tensor = attend(queries, keys, values, starts, starts, longest, longest, 0.0, True, False)[0]
        return mixed

    def bounds(self, table: Tensor, lengths: Tensor, page_tokens: int) -> Bounds:
        """Find where pages begin; see ``Attention.bounds``."""
        # The last of N + 1 ends the last row, which is not needed: lengths are given.
        return _one_each(lengths), functional.pad(table[:, 0] * page_tokens, (0, 1))

    def paged(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, bounds: Bounds
    ) -> Tensor:
        """Attend from one token of each row; see ``Attention.paged``. ``table`` is [B, 1]."""
        mixed: Tensor = torch.ops.aten._flash_attention_forward(
            queries,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            *bounds,
            1,
            keys.shape[1],
            0.0,
            False,
            False,
            seqused_k=lengths,
        )[0]
        return mixed


def reads_tables() -> bool:
    """Whether the torch that is installed reads pages by a table."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return inspect.signature(varlen_attn).parameters.keys() >= BY_TABLE


def attention_here(context_tokens: int) -> tuple[Attention, int]:
    """Choose how the torch that is installed attends, and the tokens of a page for it.

    Args:
        context_tokens: the longest row.
    """
    return (FlashAttention(), PAGE_TOKENS) if reads_tables() else (FlashAttentionByRow(), context_tokens)


def _one_each(lengths: Tensor) -> Tensor:
    """Bounds of sequences of one query each: [B + 1] int32."""
    return torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
