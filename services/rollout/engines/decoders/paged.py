"""The forward of the Llama family for a GPU: keys and values in pages, prompts packed, decode steps as CUDA graphs.

All that changes from step to step is in tensors whose addresses stay, so a graph per number of rows serves until the
pool grows.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, arXiv:2309.06180.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.adapted import BaseWeights, open_staged
from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.decoders.base import KeepsNothing, KeptRow, Tokens
from flotilla.services.rollout.engines.decoders.flash_attention import PAGE_TOKENS, Attention
from flotilla.services.rollout.engines.decoders.fused_weights import FusedWeights
from flotilla.services.rollout.engines.decoders.host_arrays import on_device
from flotilla.services.rollout.engines.decoders.step_layers import StepLayers, TritonStep, step_layers
from flotilla.services.rollout.engines.decoders.torch_layers import TorchLayers, rotations

WARM_UPS = 2
"""Runs before a capture, in which libraries choose their kernels and allocate their workspaces."""


Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Pages that must be copied: ``sources[i]`` to ``targets[i]``."""

    sources: list[int]
    targets: list[int]


class PageTable:
    """Assigns pages to rows.

    Args:
        num_rows: rows.
        row_pages: the most pages of a row.
        page_tokens: tokens of a page.

    Attributes:
        table: [num_rows, row_pages] int32, the pages of each row in order, 0 beyond.
        version: grows whenever the table changes.
    """

    def __init__(self, num_rows: int, row_pages: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.table = np.zeros((num_rows, row_pages), dtype=np.int32)
        self._held = np.zeros(num_rows, dtype=np.int64)
        self._uses = np.ones(1, dtype=np.int64)
        self._free: list[int] = []
        self.version = 0

    @property
    def num_pages(self) -> int:
        """Count the pages of the pool, page 0 included."""
        return self._uses.size

    @property
    def num_free(self) -> int:
        """Count the pages that no row holds."""
        return len(self._free)

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool."""
        more = range(self.num_pages, num_pages)
        self._uses = np.concatenate([self._uses, np.zeros(len(more), dtype=np.int64)])
        self._free.extend(reversed(more))

    def pages_of(self, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
        """Count the pages that ``start`` takes at most, for each of several sequences."""
        full = sum(-(-length // self._page_tokens) for length in lengths)
        return full + sum(len(group) - 1 for group in rows)

    def start(self, rows: Sequence[int], length: int) -> Copies:
        """Let rows begin with the same tokens; they share all pages that these fill.

        Returns:
            The last page of the first row, which the others have copies of, once it is written.
        """
        for row in rows:
            self.release(row)
        filled, rest = divmod(length, self._page_tokens)
        pages = [self._take() for _ in range(filled + bool(rest))]
        self._hold(rows[0], pages)
        copies = Copies([], [])
        for row in rows[1:]:
            shared = pages[:filled]
            self._uses[shared] += 1
            own = [self._take()] if rest else []
            self._hold(row, shared + own)
            copies.sources.extend(pages[filled:])
            copies.targets.extend(own)
        return copies

    def missing_for(self, lengths: Lengths) -> npt.NDArray[np.int64]:
        """List the first rows that need another page for their next token; rows of length 0 hold none."""
        for row in np.flatnonzero((lengths == 0) & (self._held[: lengths.size] > 0)).tolist():
            self.release(row)
        held: npt.NDArray[np.int64] = self._held[: lengths.size] * self._page_tokens
        return np.flatnonzero((lengths > 0) & (lengths >= held)).astype(np.int64)

    def extend(self, rows: npt.NDArray[np.int64]) -> None:
        """Give each of the rows one more page."""
        for row in rows.tolist():
            self.table[row, self._held[row]] = self._take()
            self._held[row] += 1
        self.version += int(rows.size > 0)

    def places(self, lengths: Lengths) -> npt.NDArray[np.int64]:
        """Find where the next token of each of the first rows goes, counted in tokens from the pool's start."""
        rows = np.arange(lengths.size)
        pages = self.table[rows, np.minimum(lengths // self._page_tokens, self.table.shape[1] - 1)].astype(np.int64)
        places: npt.NDArray[np.int64] = np.where(
            lengths > 0, pages * self._page_tokens + lengths % self._page_tokens, 0
        )
        return places

    def places_of(self, row: int, length: int) -> npt.NDArray[np.int64]:
        """Find where the first tokens of a row are, likewise."""
        tokens = np.arange(length)
        pages: npt.NDArray[np.int64] = self.table[row, tokens // self._page_tokens].astype(np.int64)
        return pages * self._page_tokens + tokens % self._page_tokens

    def move(self, source: int, target: int) -> None:
        """Give one row's pages to another."""
        self.release(target)
        self.table[target], self._held[target] = self.table[source], self._held[source]
        self.table[source], self._held[source] = 0, 0
        self.version += 1

    def release(self, row: int) -> None:
        """Take a row's pages from it."""
        held = self.table[row, : self._held[row]]
        if held.size:
            self._uses[held] -= 1
            self._free.extend(int(page) for page in held if not self._uses[page])
            self.table[row], self._held[row] = 0, 0
            self.version += 1

    def _hold(self, row: int, pages: list[int]) -> None:
        self.table[row, : len(pages)], self._held[row] = pages, len(pages)
        self.version += 1

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page


class Graphs:
    """Captures a computation once per shape, and replays it.

    Each captured computation reads and writes the same addresses at every replay, so what it is given and what it
    gives are overwritten by the next.

    Args:
        device: of the tensors; on anything but CUDA the computation is simply called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[Hashable, tuple[Any, Tensor]] = {}
        self._pool: Any = None

    def run(self, shape: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Compute, under a graph that was captured for ``shape`` before or is now."""
        if self._device.type != "cuda":
            return compute()
        if shape not in self._captured:
            self._captured[shape] = self._capture(compute)
            log.debug("captured a CUDA graph", extra={"shape": str(shape), "graphs": len(self._captured)})
        graph, output = self._captured[shape]
        graph.replay()
        return output

    def clear(self) -> None:
        """Forget all that was captured, since tensors it names are gone."""
        if self._captured:
            # One that is still computing is not taken apart.
            torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._pool = None

    def _capture(self, compute: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may allocate meanwhile, where it reads new weights: that is none of this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return graph, output


log = logging.getLogger(__name__)

GROWTH = 1.5


class PagedDecoder(KeepsNothing):
    """A ``Decoder`` for the architectures that ``reason_not_fused`` accepts, on a GPU.

    Args:
        architecture: the sizes.
        files: the safetensors files of the initial weights.
        dtype, device: of weights, activations and cache.
        num_rows: rows of the cache.
        context_tokens: the longest row.
        attention: how queries meet keys.
        page_tokens: tokens of a page.

    Raises:
        WeightTransferFailed: the files do not fit the architecture.
    """

    def __init__(
        self,
        architecture: Architecture,
        files: list[Path],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int,
        context_tokens: int,
        attention: Attention,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.vocab_size = architecture.vocab_size
        self.max_positions = min(context_tokens, architecture.max_positions)
        self.description = f"paged forward, pages of {page_tokens} tokens"
        if device.type == "cuda":
            self.description += ", CUDA graphs"
        self.device = device
        self._sizes, self._dtype = architecture, dtype
        self.base = BaseWeights(files, dtype, device)
        self._layers = TorchLayers(architecture, dtype)
        self._attention = attention
        self.page_tokens = page_tokens
        self._rotations = rotations(architecture, self.max_positions).to(device)
        self.num_rows, self._row_pages = num_rows, -(-context_tokens // page_tokens)
        self._graphs = Graphs(device)
        # What a step reads, at addresses that stay: tokens, positions, places of the new keys; lengths; pages.
        self._inputs = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        self._lengths = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((num_rows, self._row_pages), dtype=torch.int32, device=device)
        self._logits: Tensor | None = None
        self._beside: Any = None
        self._spare: FusedWeights | None = None
        self._weights: FusedWeights | None = None
        self._is_discarded = False
        self._sent = -1
        self._empty()
        self.restore()
        assert self._weights is not None
        self._steps: StepLayers = step_layers(architecture, self._rotations, dtype, self._weights.layers[0])
        if isinstance(self._steps, TritonStep):
            self.description += ", Triton"

    def stage(self, image: Path, arrival: Arrival | None = None) -> None:
        """Read a weight image into the spare weights; see ``Decoder.stage``."""
        self._spare = None
        spare = self._memory()
        with open_staged(image, arrival, self.base) as source, self._beside_steps():
            spare.fill(source)
        self._spare = spare

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Let what is copied to a GPU not stand between the steps that are launched meanwhile."""
        if self.device.type != "cuda":
            yield
            return
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # The memory of the spare weights may be one that steps under way still read.
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._beside):
                yield
        finally:
            self._beside.synchronize()

    def switch(self) -> None:
        """Make the staged weights serve: copied to the addresses that graphs know, if there are such."""
        assert self._spare is not None
        if self._weights is None:
            self._weights = self._spare
        elif self._weights is not self._spare:
            with torch.inference_mode():
                for serving, new in zip(self._weights.tensors(), self._spare.tensors(), strict=True):
                    serving.copy_(new)
        self._spare, self._is_discarded = None, False

    def digests(self) -> Iterator[tuple[str, int]]:
        """Digest what serves; see ``Decoder.digests``."""
        assert self._weights is not None
        return self._weights.digests()

    def discard(self) -> None:
        """Have the next weights read to the addresses that graphs know; see ``Decoder.discard``."""
        self._spare, self._is_discarded = None, True

    def _memory(self) -> FusedWeights:
        if self._is_discarded and self._weights is not None:
            return self._weights
        return FusedWeights(self._sizes, self._dtype, self.device)

    def release(self) -> None:
        """Free weights, cache and graphs; see ``Decoder.release``."""
        self._graphs.clear()
        self._weights = self._spare = self._logits = None
        self._empty()

    def restore(self) -> None:
        """Read the initial weights; see ``Decoder.restore``."""
        weights = self._memory()
        with self.base.open() as source:
            weights.fill(source)
        self._spare = weights
        self.switch()

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Give rows' pages to other rows; nothing is copied."""
        for source, target in zip(sources, targets, strict=True):
            self._table.move(source, target)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Free the pages of rows: free pages are not read, except for the null page."""
        for row in rows:
            self._table.release(row)
        self._keys[:, 0], self._values[:, 0] = 0, 0

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences, packed one after the other; see ``Decoder.prefill``."""
        assert self._weights is not None
        lengths = [sequence.shape[0] for sequence in sequences]
        for row in (row for group in rows for row in group):
            # Before pages are counted: what is computed again after an update has its own to begin with.
            self._table.release(row)
        self._reserve(self._table.pages_of(lengths, rows))
        copies = [self._table.start(group, length) for group, length in zip(rows, lengths, strict=True)]
        firsts = [group[0] for group in rows]
        places = np.concatenate(
            [self._table.places_of(row, length) for row, length in zip(firsts, lengths, strict=True)]
        )
        packed = np.stack([np.concatenate(sequences), np.concatenate([np.arange(n) for n in lengths]), places])
        token_ids, positions, slots = torch.from_numpy(packed).to(self.device)
        ends = np.cumsum(lengths)
        starts = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(self.device)
        hidden = functional.embedding(token_ids, self._weights.embedding)
        rotation = self._rotations[positions].view(1, -1, 1, self._rotations.shape[1])
        for number, layer in enumerate(self._weights.layers):
            queries_keys, values = self._layers.project(hidden, layer, rotation, (1, token_ids.shape[0]))
            queries, keys = queries_keys[0].tensor_split((self._sizes.num_heads,), dim=1)
            self._write(number, slots, keys, values[0])
            mixed = self._attention.packed(queries, keys, values[0], starts, max(lengths))
            self._layers.feed(hidden, mixed.reshape(token_ids.shape[0], -1), layer)
        self._copy([page for each in copies for page in each.sources], [p for each in copies for p in each.targets])
        return self._layers.logits(hidden[torch.from_numpy(ends - 1).to(self.device)], self._weights)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows; see ``Decoder.decode``. The logits last until the next call."""
        num, held = token_ids.shape[0], lengths.numpy()
        missing = self._table.missing_for(held)
        self._reserve(missing.size)
        self._table.extend(missing)
        rows = min(_bucket(num), self.num_rows)
        self._inputs[0, :num] = token_ids
        steps = np.zeros((2, rows), dtype=np.int64)
        steps[0, :num], steps[1, :num] = held, self._table.places(held)
        self._inputs[1:, :rows] = on_device(steps, self.device)
        self._lengths[:rows] = self._inputs[1, :rows] + 1
        if self._sent != self._table.version:
            self._tables.copy_(on_device(self._table.table, self.device))
            self._sent = self._table.version
        if self._logits is None:
            self._logits = torch.empty((self.num_rows, self.vocab_size), dtype=self._dtype, device=self.device)
        pages = min(1 << (longest // self.page_tokens).bit_length(), self._row_pages)
        return self._graphs.run((rows, pages), lambda: self._step(rows, pages))[:num]

    def _step(self, rows: int, pages: int) -> Tensor:
        """Compute a step of ``rows`` rows of at most ``pages`` pages from the fixed tensors."""
        assert self._weights is not None and self._logits is not None
        token_ids, positions, slots = self._inputs[:, :rows]
        table, lengths = self._tables[:rows, :pages], self._lengths[:rows]
        hidden = functional.embedding(token_ids, self._weights.embedding)
        bounds = self._attention.bounds(table, lengths, self.page_tokens)
        for layer, keys, values in zip(self._weights.layers, self._keys, self._values, strict=True):
            queries = self._steps.project(hidden, layer, positions, slots, (keys, values))
            mixed = self._attention.paged(queries, keys, values, table, lengths, bounds)
            self._steps.feed(hidden, mixed.reshape(rows, -1), layer)
        # One place for all graphs: of each its own would be kept as long as the graph.
        return self._layers.logits(hidden, self._weights, self._logits[:rows])

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for pool, new in ((self._keys, keys), (self._values, values)):
            pool[layer].view(-1, *pool.shape[3:]).index_copy_(0, slots, new)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            source, target = (torch.tensor(pages, device=self.device) for pages in (sources, targets))
            for pool in (self._keys, self._values):
                for layer in pool:
                    layer.index_copy_(0, target, layer[source])

    def _empty(self) -> None:
        """Begin with a pool that has only the null page."""
        self._table = PageTable(self.num_rows, self._row_pages, self.page_tokens)
        self._sent = -1
        self._keys, self._values = self._pool(1), self._pool(1)

    def _pool(self, num_pages: int) -> Tensor:
        sizes = self._sizes
        shape = (sizes.num_layers, num_pages, self.page_tokens, sizes.num_kv_heads, sizes.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self.device)

    def _reserve(self, num_pages: int) -> None:
        """Make the pool large enough to lend so many more pages; graphs that know the old one are forgotten."""
        lacking = num_pages - self._table.num_free
        if lacking <= 0:
            return
        old = self._table.num_pages
        most = 1 + self.num_rows * self._row_pages
        # To begin with two pages for each row, or as many tokens in longer ones.
        first = 1 + min(2 * self.num_rows, -(-2 * self.num_rows * PAGE_TOKENS // self.page_tokens))
        new = max(old + lacking, min(int(GROWTH * old), most), min(first, most))
        self._graphs.clear()
        for name in ("_keys", "_values"):
            pool = self._pool(new)
            pool[:, :old] = getattr(self, name)
            setattr(self, name, pool)
        self._table.grow(new)


PROBE_STEPS = 3
PROBE_LONGEST = 1024
PROBE_TOLERANCE = 0.15
"""Root mean square of what log-probabilities differ by, in their own standard deviations: rounding to 16 bits gives
about 0.01, one position too few in a row of five 0.3."""


@torch.inference_mode()
def works(decoder: PagedDecoder) -> bool:
    """Find out by trying: steps over the end of a page give what whole sequences give, to rounding."""
    generator = np.random.default_rng(0)
    lengths = np.array([decoder.page_tokens - 1, 5][: decoder.num_rows])
    lengths = np.minimum(lengths, min(decoder.max_positions, PROBE_LONGEST) - PROBE_STEPS - 1)
    sequences = [generator.integers(0, decoder.vocab_size, length + PROBE_STEPS) for length in lengths]
    rows = [[row] for row in range(lengths.size)]

    def whole(more: int) -> Tensor:
        return decoder.prefill([each[: n + more] for each, n in zip(sequences, lengths, strict=True)], rows)

    expected = [whole(step + 1).float().log_softmax(-1) for step in range(PROBE_STEPS)]
    whole(0)
    worst = 0.0
    for step, wanted in enumerate(expected):
        token_ids = torch.tensor([int(each[n + step]) for each, n in zip(sequences, lengths, strict=True)])
        found = decoder.decode(
            token_ids.to(decoder.device), torch.from_numpy(lengths + step), int(lengths.max()) + step
        )
        difference = (found.float().log_softmax(-1) - wanted).square().mean(-1).sqrt() / wanted.std(-1)
        worst = max(worst, float(difference.nan_to_num(nan=torch.inf).max()))
    decoder.clear_rows(range(lengths.size))
    if worst >= PROBE_TOLERANCE:
        log.warning("pages give other logits than whole sequences", extra={"largest_difference": worst})
    return worst < PROBE_TOLERANCE


def _bucket(rows: int) -> int:
    """Round a number of rows up to one that a graph is captured for: 1, 2, 4, and multiples of 8."""
    return next((few for few in (1, 2, 4) if rows <= few), -(-rows // 8) * 8)
