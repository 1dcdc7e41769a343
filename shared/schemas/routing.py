"""Which experts the routers of a mixture chose, token by token and layer by layer: recorded by engines, replayed in
training.

A record is of the first tokens of a sequence, without gaps; the last token of a trajectory, which no pass of the engine
reads, has none. It stays compressed unless it is computed with. From outside it is not trusted:
its sizes are checked when it arrives, its ids before they reach a model.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, PlainSerializer


def _decoded(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


EncodedBytes = Annotated[bytes, BeforeValidator(_decoded), PlainSerializer(_encoded, return_type=str, when_used="json")]
"""Bytes that are base64 where they are written as JSON."""


MAX_EXPERTS = 1 << 15
MAX_RECORD_BYTES = 1 << 29
"""Of one sequence, uncompressed: 1.4 million tokens of 48 layers with 8 experts each."""
ROOM_FOR_FORMAT = 1024
"""Bytes that compression may add to what it cannot make smaller, beside a thousandth of it."""

Ids = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class RoutingSizes:
    """What a model's routers choose among.

    Attributes:
        num_layers: that have a router, in their order.
        top_k: experts chosen for a token in each.
        num_experts: that there are in each.
    """

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The smallest type that holds every id."""
        return np.dtype("u1" if self.num_experts <= 256 else "<u2")

    @property
    def bytes_per_token(self) -> int:
        """Of a record, uncompressed."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.top_k} of {self.num_experts} experts in {self.num_layers} layers"


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of the first tokens of a sequence.

    Attributes:
        num_tokens: that it is of.
        sizes: of the model that chose.
        data: zlib of the ids [num_tokens, num_layers, top_k], in ``sizes.dtype``.
    """

    num_tokens: int
    sizes: RoutingSizes
    data: EncodedBytes

    def __post_init__(self) -> None:
        sizes = self.sizes
        counts = (self.num_tokens, sizes.num_layers, sizes.top_k, sizes.num_experts)
        if not all(type(each) is int for each in counts) or self.num_tokens < 0 or sizes.num_layers < 1:
            raise ValueError(f"routed experts have impossible sizes: {self.num_tokens!r} tokens, {sizes}")
        if not 1 <= sizes.top_k <= sizes.num_experts <= MAX_EXPERTS:
            raise ValueError(f"routed experts have impossible sizes: {sizes}")
        if self.raw_bytes > MAX_RECORD_BYTES:
            raise ValueError(f"routed experts take {self.raw_bytes} bytes, more than {MAX_RECORD_BYTES}")
        if len(self.data) > self.raw_bytes + self.raw_bytes // 1000 + ROOM_FOR_FORMAT:
            raise ValueError(f"routed experts have {len(self.data)} bytes compressed, for {self.raw_bytes}")

    @property
    def raw_bytes(self) -> int:
        """Bytes of the ids, uncompressed."""
        return self.num_tokens * self.sizes.bytes_per_token

    @classmethod
    def of(cls, ids: npt.NDArray[Any], num_experts: int) -> "RoutedExperts":
        """Compress ids [N, L, K]."""
        sizes = RoutingSizes(ids.shape[1], ids.shape[2], num_experts)
        packed = np.ascontiguousarray(ids, dtype=sizes.dtype)
        return cls(ids.shape[0], sizes, zlib.compress(packed.data, 1))

    def ids(self) -> Ids:
        """Uncompress the ids [N, L, K].

        Raises:
            ValueError: the bytes are not what the sizes say, or an id is none of the experts, or stands twice.
        """
        reader = zlib.decompressobj()
        try:
            found = reader.decompress(self.data, self.raw_bytes + 1)
        except zlib.error as error:
            raise ValueError(f"routed experts cannot be uncompressed: {error}") from error
        if len(found) != self.raw_bytes or not reader.eof or reader.unused_data:
            raise ValueError(f"routed experts have {len(found)} bytes, {self.num_tokens} tokens take {self.raw_bytes}")
        sizes = self.sizes
        ids: Ids = np.frombuffer(found, sizes.dtype).reshape(self.num_tokens, sizes.num_layers, sizes.top_k)
        if ids.size and (largest := int(ids.max())) >= sizes.num_experts:
            raise ValueError(f"routed experts name expert {largest}, there are {sizes.num_experts}")
        if sizes.top_k > 1 and (np.diff(np.sort(ids, axis=-1).astype(np.int32), axis=-1) == 0).any():
            raise ValueError("routed experts name an expert twice for one token and layer")
        return ids

    def part(self, start: int, end: int) -> "RoutedExperts":
        """Cut out some tokens; itself if it has no others.

        Raises:
            ValueError: it ends earlier, or as of ``ids``.
        """
        if (start, end) == (0, self.num_tokens):
            return self
        if not 0 <= start <= end <= self.num_tokens:
            raise ValueError(f"routed experts are of {self.num_tokens} tokens, {start} to {end} are needed")
        return self.parts([(start, end)])[0]

    def parts(self, spans: Sequence[tuple[int, int]]) -> list["RoutedExperts"]:
        """Cut out spans of tokens, which it has; it is uncompressed once. Errors as of ``ids``."""
        ids = self.ids()
        return [RoutedExperts.of(ids[start:end], self.sizes.num_experts) for start, end in spans]

    def to_wire(self) -> list[Any]:
        """Make a plain list of it, for msgpack: tokens, layers, experts of a token, experts, bytes."""
        sizes = self.sizes
        return [self.num_tokens, sizes.num_layers, sizes.top_k, sizes.num_experts, self.data]

    @classmethod
    def from_wire(cls, wire: Any) -> "RoutedExperts":
        """Read what ``to_wire`` made; nothing is uncompressed.

        Raises:
            ValueError: it is no such list, a size is impossible, or there are more bytes than it takes.
        """
        if not isinstance(wire, list | tuple) or len(wire) != 5 or not isinstance(wire[4], bytes):
            raise ValueError("routed experts are four sizes and bytes")
        tokens, layers, top_k, experts, data = wire
        return cls(tokens, RoutingSizes(layers, top_k, experts), data)


@dataclass(frozen=True, slots=True)
class RoutedSpan:
    """Tokens of a sequence, and their experts.

    Attributes:
        start, end: of the tokens.
        experts: whose first tokens these are.
    """

    start: int
    end: int
    experts: RoutedExperts


def span_behind(num_known: int, more: RoutedExperts, start: int = 0) -> RoutedSpan | None:
    """Cut a record's entries for tokens that are not known yet.

    Args:
        num_known: first tokens of the sequence whose experts are known.
        more: of tokens from ``start`` on.
        start: where another prompt begins, behind a token that was not read.

    Returns:
        A span of the tokens behind those that are known; None where tokens before ``start`` are not known.

    Raises:
        ValueError: as of ``RoutedExperts.ids``.
    """
    if start and num_known < max(start - 1, 1):
        return None
    begins = max(num_known, start)
    end = max(start + more.num_tokens, begins)
    return RoutedSpan(begins, end, more.part(min(begins - start, more.num_tokens), more.num_tokens))


def laid_out(spans: Sequence[RoutedSpan], num_tokens: int) -> RoutedExperts:
    """Lay spans that follow each other behind each other; each is uncompressed once.

    Args:
        spans: at least one; a token between two has the experts of the one before.
        num_tokens: first ones of the sequence that are wanted, which all are known.

    Raises:
        ValueError: they are of other models, or as of ``RoutedExperts.ids``.
    """
    if len(spans) == 1:
        return spans[0].experts.part(0, num_tokens)
    sizes = spans[0].experts.sizes
    if other := next((each.experts.sizes for each in spans if each.experts.sizes != sizes), None):
        raise ValueError(f"routed experts of two models: {sizes}, and {other}")
    found: list[Ids] = []
    end = 0
    for span in spans:
        if span.start > end:
            found.append(found[-1][-1:])
        if span.end > span.start:
            found.append(span.experts.ids()[: span.end - span.start])
        end = span.end
    return RoutedExperts.of(np.concatenate(found)[:num_tokens], sizes.num_experts)


def joined(known: RoutedExperts | None, more: RoutedExperts) -> RoutedExperts:
    """Put behind what is known of a sequence's first tokens what another record has of the later ones.

    Raises:
        ValueError: they are of other models, or as of ``RoutedExperts.ids``.
    """
    if known is None or not known.num_tokens:
        return more
    if known.sizes != more.sizes:
        raise ValueError(f"routed experts of two models: {known.sizes}, and {more.sizes}")
    if known.num_tokens >= more.num_tokens:
        return known
    first, behind = RoutedSpan(0, known.num_tokens, known), span_behind(known.num_tokens, more)
    assert behind is not None
    return laid_out([first, behind], behind.end)
