"""From sequences to micro-batches: how many tokens are computed, and in which rows.

*padded*: one sequence per row, rows of a micro-batch as wide as its longest sequence; sequences are sorted by length
and cut where that saves the most padding. *packed*: several sequences per row, rows as wide as the longest sequence;
attention stays within a sequence. A row is not made longer than that for this alone: a dense attention mask pays for
its zeros. Sequences of one row that answer the same prompt share it: the prompt stands there once, and each answer
attends to it and to itself. For that rows may be longer, where computing a prompt once saves more than it costs.
Where attention goes sequence by sequence (``places``) a row of any length costs the same.

The gradient does not depend on any of this, since losses are divided by denominators of the whole mini-batch.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.balancing import balanced_partition, workload
from flotilla.services.trainer.data.illustrations import Illustration, PlacedRows
from flotilla.services.trainer.data.places import SequencePlaces, places_of
from flotilla.shared.schemas.routing import Ids
from flotilla.shared.vision.tower import PlacedImages

Packing = Literal["auto", "packed", "padded"]

MASKED_POSITION_COST = 1.05
"""Cost of a position under a dense attention mask relative to one without, attention itself apart (on a CPU)."""
LINEAR_OVER_ATTENTION = 4
"""A position costs as much in the linear layers as in attention to this many hidden sizes of positions. By floating
point operations it is 6 (24 H^2 against 4 W H per layer); measured on a CPU, 3 (H 512) to 7 (H 64)."""
CAUSAL_SHARE = 0.5
"""Of attention without a mask only the lower half is computed."""
SMALL_HIDDEN_SIZE = 64
LONGEST_SHARED_ROW = 4096
"""A dense mask takes five bytes per pair of positions."""
SHARED_WIDTHS = (1, 2, 4, 8)
"""Widths that rows with shared prompts are tried with, in lengths of the longest sequence."""
PASS_COST_TOKENS = {"cpu": 384, "cuda": 4096}
"""Fixed cost of one more forward and backward pass, in token positions: small models on one CPU core; 0.6 billion
parameters on an H200, where a pass of any size takes 0.1 s to be launched."""


@dataclass(frozen=True)
class MicroLayout:
    """Which sequences are in which row of one forward pass.

    Attributes:
        rows: per row, the numbers of its sequences from left to right.
        width: positions of a row.
        is_packed: whether rows may hold several sequences.
        shared: by number of a sequence, how many of its first tokens are not there, because the nearest sequence before
            it in its row without an entry here begins with them.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int
    is_packed: bool
    shared: Mapping[int, int] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """Token positions that are computed, padding included."""
        return len(self.rows) * self.width

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the sequences, row by row."""
        return tuple(number for row in self.rows for number in row)


@dataclass(frozen=True)
class Prompt:
    """How a sequence begins.

    Attributes:
        number: the same for sequences that begin alike.
        tokens: of the beginning that they have in common, all of it before their first sampled token.
    """

    number: int
    tokens: int


@dataclass(frozen=True)
class Unit:
    """Sequences that stand side by side in a row.

    Attributes:
        members: the first is there whole, the others without their first ``prefix`` tokens.
        length: positions of all.
    """

    members: tuple[int, ...]
    length: int
    prefix: int = 0

    def joined(self, number: int, length: int, prefix: int) -> "Unit":
        """Add a sequence that begins with the same ``prefix`` tokens."""
        return Unit((*self.members, number), self.length + length - prefix, prefix)


def units_of(lengths: Sequence[int], prompts: Sequence[Prompt], width: int) -> list[Unit]:
    """Put sequences with the same prompt together, as far as they fit into a row; longest first, first fit.

    Args:
        lengths: tokens of each sequence.
        prompts: how each begins.
        width: positions of a row, at least the longest length.
    """
    open_units: dict[Prompt, list[Unit]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        prompt, length = prompts[number], lengths[number]
        units = open_units.setdefault(prompt, [])
        fits = (at for at, unit in enumerate(units) if unit.length + length - prompt.tokens <= width)
        at = next(fits, None) if prompt.tokens else None
        if at is None:
            units.append(Unit((number,), length))
        else:
            units[at] = units[at].joined(number, length, prompt.tokens)
    return [unit for units in open_units.values() for unit in units]


def lay_out(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    packing: Packing,
    prompts: Sequence[Prompt] | None = None,
    hidden_size: int = SMALL_HIDDEN_SIZE,
    attends_apart: bool = False,
    pass_cost: int = PASS_COST_TOKENS["cpu"],
) -> tuple[MicroLayout, ...]:
    """Cut sequences into micro-batches of at most ``max_tokens`` positions; a longer sequence makes one of its own.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens: bound on rows times width.
        packing: ``auto`` takes whichever costs least.
        prompts: how each begins; None where no prompt may be shared.
        hidden_size: of the model: what attention costs beside the linear layers.
        attends_apart: whether attention goes sequence by sequence in packed rows.
        pass_cost: of one more pass, in positions.
    """
    if not lengths:
        return ()
    if packing == "padded":
        return _padded(lengths, max_tokens, pass_cost)
    candidates = [_packed([Unit((number,), length) for number, length in enumerate(lengths)], max(lengths), max_tokens)]
    if packing == "auto":
        candidates.append(_padded(lengths, max_tokens, pass_cost))
    for width in _shared_widths(lengths, max_tokens) if prompts is not None else ():
        units = units_of(lengths, prompts or (), width)
        if len(units) < len(lengths):
            candidates.append(_packed(units, width, max_tokens))
    longest = max(lengths) if attends_apart else None
    return min(candidates, key=lambda layouts: _cost(layouts, hidden_size, longest, pass_cost))


def _cost(layouts: Sequence[MicroLayout], hidden_size: int, longest: int | None, pass_cost: int) -> float:
    """Estimate the cost in positions of linear layers; ``longest`` sequence where attention goes one by one."""
    cost = float(pass_cost * len(layouts))
    for each in layouts:
        has_mask = each.is_packed and longest is None
        seen = each.width if has_mask or longest is None else min(each.width, longest)
        attention = seen / (LINEAR_OVER_ATTENTION * hidden_size)
        linear = MASKED_POSITION_COST if each.is_packed else 1.0
        cost += each.positions * (linear + attention * (1.0 if has_mask else CAUSAL_SHARE))
    return cost


def _shared_widths(lengths: Sequence[int], max_tokens: int) -> list[int]:
    longest = max(lengths)
    bound = max(longest, min(max_tokens, LONGEST_SHARED_ROW))
    return sorted({min(factor * longest, bound) for factor in SHARED_WIDTHS})


def _padded(lengths: Sequence[int], max_tokens: int, pass_cost: int) -> tuple[MicroLayout, ...]:
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    cuts = _best_cuts(np.array([lengths[number] for number in order], dtype=np.int64), max_tokens, pass_cost)
    return tuple(
        MicroLayout(tuple((number,) for number in order[start:end]), lengths[order[start]], is_packed=False)
        for start, end in cuts
    )


def _best_cuts(lengths: npt.NDArray[np.int64], max_tokens: int, pass_cost: int) -> list[tuple[int, int]]:
    """Cut falling lengths into runs of least total cost: dynamic programming over where the last run starts."""
    count = len(lengths)
    best = np.zeros(count + 1)
    start_of = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        starts = np.arange(end)
        positions = (end - starts) * lengths[:end]
        cost = best[:end] + positions + pass_cost
        cost[(positions > max_tokens) & (starts < end - 1)] = np.inf
        start_of[end] = int(cost.argmin())
        best[end] = cost[start_of[end]]
    cuts = []
    end = count
    while end:
        cuts.append((int(start_of[end]), end))
        end = int(start_of[end])
    return cuts[::-1]


def _packed(units: "Sequence[Unit]", width: int, max_tokens: int) -> tuple[MicroLayout, ...]:
    rows = _fill_rows([unit.length for unit in units], width)
    per_batch = max(1, max_tokens // width)
    layouts = []
    for start in range(0, len(rows), per_batch):
        part = [[units[number] for number in row] for row in rows[start : start + per_batch]]
        layouts.append(
            MicroLayout(
                rows=tuple(tuple(member for unit in row for member in unit.members) for row in part),
                width=max(sum(unit.length for unit in row) for row in part),
                is_packed=True,
                shared={member: unit.prefix for row in part for unit in row for member in unit.members[1:]},
            )
        )
    return tuple(layouts)


def _fill_rows(lengths: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Pack by best fit, longest first (Johnson, Fast Algorithms for Bin Packing, 1974)."""
    rows: list[list[int]] = []
    spare: list[tuple[int, int]] = []  # sorted (free positions, row)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        at = bisect_left(spare, (lengths[number], -1))
        if at < len(spare):
            free, row = spare.pop(at)
        else:
            free, row = width, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(spare, (free - lengths[number], row))
    return [tuple(row) for row in rows]


def split_layouts(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int,
    packing: Packing,
    prompts: Sequence[Prompt] | None = None,
    hidden_size: int = SMALL_HIDDEN_SIZE,
    attends_apart: bool = False,
    pass_cost: int = PASS_COST_TOKENS["cpu"],
) -> list[list[MicroLayout]]:
    """Cut sequences into the micro-batches of each rank.

    Args:
        lengths: tokens of each sequence, at least 1.
        num_ranks: that share the work.
        max_tokens: bound on the positions of one forward pass.
        packing: how rows are filled.
        prompts: how each begins; None where no prompt may be shared.
        hidden_size: of the model.
        attends_apart: whether attention goes sequence by sequence in packed rows.
        pass_cost: of one more pass, in positions.

    Returns:
        Per rank its layouts, whose rows name positions in ``lengths``. Their numbers differ between ranks.
    """
    found = []
    for own in _shares(lengths, num_ranks):
        layouts = lay_out(
            [lengths[number] for number in own],
            max_tokens=max_tokens,
            packing=packing,
            prompts=None if prompts is None else [prompts[number] for number in own],
            hidden_size=hidden_size,
            attends_apart=attends_apart,
            pass_cost=pass_cost,
        )
        found.append([renumbered(layout, own) for layout in layouts])
    return found


def renumbered(layout: MicroLayout, numbers: Sequence[int]) -> MicroLayout:
    """Name the sequences of a layout by other numbers."""
    rows = tuple(tuple(numbers[position] for position in row) for row in layout.rows)
    shared = {numbers[position]: tokens for position, tokens in layout.shared.items()}
    return MicroLayout(rows, layout.width, layout.is_packed, shared)


def _shares(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    if num_ranks == 1:
        return [list(range(len(lengths)))]
    if len(lengths) <= num_ranks:
        return [[number] if number < len(lengths) else [] for number in range(num_ranks)]
    return balanced_partition(workload(lengths), num_ranks)


@dataclass(frozen=True, eq=False)
class ModelInput:
    """What one forward pass reads, and where its predictions stand.

    Attributes:
        token_ids: [rows, width] int64, padded on the right with 0.
        position_ids: [rows, width] int64, from 0 in every sequence.
        attention_mask: [rows, 1, width, width] bool, True where attention is allowed; None for plain causal attention,
            which padding on the right does not disturb.
        predictors: [N] int64, flat positions whose hidden states predict the labels.
        labels: [N] int64, sampled tokens.
        places: where the sequences are, for attention that goes one by one; there is no mask then.
        is_varlen: whether sequences begin where positions do, for attention that finds them by that in a single row;
            there is no mask then.
        images: what stands in place of some tokens; positions may have three axes then, [3, rows, width].
        experts: [rows, width, layers, top_k] int16, that the routers replay, -1 for positions whose routers
            choose for themselves; None where all do.
        temperatures: [N] float32, that the labels were sampled at, 0 where at the policy's own; or one for all of them;
            None: all at the policy's own.
    """

    token_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    predictors: Tensor
    labels: Tensor
    places: SequencePlaces | None = None
    is_varlen: bool = False
    images: PlacedImages | None = None
    temperatures: Tensor | float | None = None
    experts: Tensor | None = None

    def to(self, device: torch.device) -> "ModelInput":
        """Move the tensors."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return ModelInput(
            self.token_ids.to(device),
            self.position_ids.to(device),
            mask,
            self.predictors.to(device),
            self.labels.to(device),
            None if self.places is None else self.places.to(device),
            self.is_varlen,
            None if self.images is None else self.images.to(device),
            self.temperatures.to(device) if isinstance(self.temperatures, Tensor) else self.temperatures,
            None if self.experts is None else self.experts.to(device),
        )

    def temperature_of(self, own: float) -> Tensor | float:
        """Return what the labels were sampled at: one number, or one for each [N, 1]; ``own`` is the policy's."""
        if isinstance(self.temperatures, Tensor):
            return torch.where(self.temperatures > 0, self.temperatures, own)[:, None]
        return own if self.temperatures is None else self.temperatures


def token_places(layout: MicroLayout, token_ids: Sequence[Sized]) -> dict[int, npt.NDArray[np.int64]]:
    """Find where the tokens of a layout's sequences stand, those of a shared prompt included.

    Args:
        layout: of a micro-batch.
        token_ids: per sequence of the whole batch, its tokens.

    Returns:
        Flat positions, [L] by number of the sequence, in the order of the layout's members.
    """
    found = {}
    for row, members in enumerate(layout.rows):
        start = begin = row * layout.width
        for number in members:
            prefix = layout.shared.get(number, 0)
            begin = begin if prefix else start
            end = start + len(token_ids[number]) - prefix
            found[number] = np.concatenate([np.arange(begin, begin + prefix), np.arange(start, end)])
            start = end
    return found


def build_input(
    layout: MicroLayout,
    token_ids: Sequence[npt.NDArray[np.int64]],
    sampled: Mapping[int, npt.NDArray[np.int64]],
    *,
    attends_apart: bool = False,
    is_varlen: bool = False,
    illustrations: Sequence[Illustration | None] | None = None,
    experts: Sequence[Ids] | None = None,
) -> ModelInput:
    """Fill the rows of a layout.

    Args:
        layout: of a micro-batch.
        token_ids: per sequence of the whole batch, [L] tokens.
        sampled: by number of the sequence, positions of the tokens that the policy sampled, each at least 1.
        attends_apart: whether packed rows get places for a mask.
        is_varlen: whether they get neither, but are to be read as one row; no prompt is shared then.
        illustrations: per sequence of the whole batch, its images; None where no sequence has any.
        experts: likewise, what routers replay for its first tokens [N, layers, top_k]; None: they choose themselves.

    Returns:
        The input; predictors and labels run over the layout's members in order.
    """
    shape = (len(layout.rows), layout.width)
    shown = {number: each for number in layout.members if illustrations and (each := illustrations[number])}
    axes = next((each.positions.shape[:-1] for each in shown.values()), ())
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros((*axes, *shape), dtype=np.int64)
    owner, unit, lends = (np.full(shape, value, dtype=np.int64) for value in (-1, -1, -2))
    placed, predictors, labels = PlacedRows(), [], []
    for row, members in enumerate(layout.rows):
        start, begin, leader = 0, 0, -1
        for number in members:
            tokens, chosen, prefix = token_ids[number], sampled[number], layout.shared.get(number, 0)
            if not prefix:
                begin, leader = start, number
            end = start + len(tokens) - prefix
            ids[row, start:end] = tokens[prefix:]
            positions[..., row, start:end] = np.arange(prefix, len(tokens))
            if number in shown:
                positions[..., row, start:end] = placed.add(shown[number], row * layout.width + start, prefix)
            owner[row, start:end], unit[row, start:end] = number, leader
            lends[row, begin : begin + prefix] = leader
            # The first token after a shared prompt is predicted at the prompt's end, wherever that is.
            predictors.append(row * layout.width + np.where(chosen > prefix, start - prefix, begin) + chosen - 1)
            labels.append(tokens[chosen])
            start = end
    apart = list(token_places(layout, token_ids).values()) if layout.is_packed and attends_apart else None
    mask = _mask(owner, unit, lends) if layout.is_packed and not (attends_apart or is_varlen) else None
    return ModelInput(
        token_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        attention_mask=mask,
        predictors=torch.from_numpy(np.concatenate(predictors)),
        labels=torch.from_numpy(np.concatenate(labels)),
        places=None if apart is None else places_of(apart, ids.size),
        is_varlen=layout.is_packed and is_varlen,
        images=placed.placed(),
        experts=None if experts is None else _told(layout, token_ids, experts),
    )


def beside_image(inputs: ModelInput, seen: Illustration) -> ModelInput:
    """Have the first image of another sequence computed, which stands nowhere in the rows."""
    nowhere = torch.zeros(0, dtype=torch.int64, device=inputs.token_ids.device)
    positions = inputs.position_ids.expand(*seen.positions.shape[:-1], *inputs.position_ids.shape)
    return replace(inputs, position_ids=positions, images=PlacedImages(seen.images[:1], nowhere, nowhere))


def _told(layout: MicroLayout, token_ids: Sequence[Sized], experts: Sequence[Ids]) -> Tensor:
    """Place the experts of sequences at their tokens: [rows, W, layers, top_k] int16, -1 without a replay."""
    sizes = experts[layout.members[0]].shape[1:]
    found = np.full((layout.positions, *sizes), -1, dtype=np.int16)
    for number, places in token_places(layout, token_ids).items():
        found[places[: len(experts[number])]] = experts[number]
    return torch.from_numpy(found.reshape(len(layout.rows), layout.width, *sizes))


def _mask(owner: npt.NDArray[np.int64], unit: npt.NDArray[np.int64], lends: npt.NDArray[np.int64]) -> Tensor:
    """Allow attention within a sequence, and to the prompt that it shares: [rows, 1, W, W]."""
    owners = torch.from_numpy(owner)
    mask = _block_causal(owners, owners)
    if (lends >= 0).any():
        mask |= _block_causal(torch.from_numpy(unit), torch.from_numpy(lends))
    return mask


def _block_causal(queries: Tensor, keys: Tensor) -> Tensor:
    """Allow attention to earlier positions of an equal number; [rows, W] each to [rows, 1, W, W]."""
    # Padding has an owner of its own (-1), so that no row of the mask is empty: its softmax would be NaN.
    same = queries.unsqueeze(2) == keys.unsqueeze(1)
    causal = torch.ones(queries.shape[1], queries.shape[1], dtype=torch.bool).tril()
    return (same & causal).unsqueeze(1)
