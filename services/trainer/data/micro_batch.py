"""A micro-batch: one forward pass, and which of the batch's tokens it predicts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.data.batch import TrainingBatch
from flotilla.services.trainer.data.illustrations import Illustration
from flotilla.services.trainer.data.packing import (
    PASS_COST_TOKENS,
    SMALL_HIDDEN_SIZE,
    MicroLayout,
    ModelInput,
    Packing,
    Prompt,
    beside_image,
    build_input,
    renumbered,
    split_layouts,
)


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows of the models that read them may be filled.

    Attributes:
        packing: ``auto`` takes whichever costs least.
        shares_prompts: whether a prompt that several sequences begin with may be computed once.
        hidden_size: of the model: what attention costs beside the linear layers.
        attends_apart: whether attention goes sequence by sequence in packed rows.
        is_varlen: whether attention finds sequences by their positions.
    """

    packing: Packing
    shares_prompts: bool = False
    hidden_size: int = SMALL_HIDDEN_SIZE
    attends_apart: bool = False
    is_varlen: bool = False


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some sequences of a batch.

    Attributes:
        layout: their rows.
        inputs: what the model reads.
        members: [S'] int64, numbers of the sequences in the batch.
        tokens: [T'] int64, their span tokens in the batch, sequence by sequence.
        sequences: [T'] layout of those tokens, sequences numbered within the micro-batch.
        sampled: [N] int64, where in [T'] the labels of ``inputs`` stand; None if every token is one.
        is_empty: whether it has no sequences: a pass made only because other ranks make one.
    """

    layout: MicroLayout
    inputs: ModelInput
    members: Tensor
    tokens: Tensor
    sequences: PackedSequences
    sampled: Tensor | None
    is_empty: bool = False

    def spread(self, of_labels: Tensor) -> Tensor:
        """Put values of the labels [N] where their tokens stand [T'], 0 elsewhere; differentiable."""
        if self.sampled is None:
            return of_labels
        return of_labels.new_zeros(self.tokens.shape).index_copy(0, self.sampled, of_labels)


def make_micro_batches(
    batch: TrainingBatch,
    members: Sequence[int],
    rows: RowRules,
    *,
    max_tokens: int,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[MicroBatch]:
    """Cut some sequences of a batch into micro-batches; those without a sampled token need no forward pass.

    Args:
        batch: on ``device`` already.
        members: numbers of the sequences.
        rows: how they are filled.
        max_tokens: bound on the positions of one forward pass.
        device: where inputs go.
        rank, num_ranks: whose share is wanted; every rank gets as many micro-batches, some of them empty.
    """
    spans = batch.span_lengths
    chosen = [number for number in members if spans[number]]
    lengths = [len(batch.token_ids[number]) for number in chosen]
    shares = split_layouts(
        lengths,
        num_ranks,
        max_tokens=max_tokens,
        packing=rows.packing,
        prompts=_prompts_of(batch, chosen) if rows.shares_prompts else None,
        hidden_size=rows.hidden_size,
        attends_apart=rows.attends_apart or rows.is_varlen,
        pass_cost=PASS_COST_TOKENS[device.type],
    )
    build = partial(build_input, attends_apart=rows.attends_apart, is_varlen=rows.is_varlen)
    made = list(_filled(batch, [renumbered(layout, chosen) for layout in shares[rank]], device, build))
    made += [_empty(device)] * (max(map(len, shares)) - len(made))
    return made if batch.illustrations is None else _seeing(made, shares, chosen, batch.illustrations)


def _prompts_of(batch: TrainingBatch, members: Sequence[int]) -> list[Prompt]:
    """Number the prompts of some sequences, each whole up to its first sampled token."""
    numbers: dict[bytes, int] = {}
    found = []
    for member in members:
        tokens = batch.span_starts[member]
        content = batch.token_ids[member][:tokens].tobytes()
        # Tokens stand for any image.
        if batch.illustrations is not None and (shown := batch.illustrations[member]) is not None:
            content += shown.name(tokens)
        # One that is computed once has the experts of one sequence.
        if batch.experts is not None:
            content += batch.experts[member][:tokens].tobytes()
        found.append(Prompt(numbers.setdefault(content, len(numbers)), tokens))
    return found


def _seeing(
    made: Sequence[MicroBatch],
    shares: Sequence[Sequence[MicroLayout]],
    chosen: Sequence[int],
    illustrations: Sequence[Illustration | None],
) -> list[MicroBatch]:
    """Let a pass without images compute one where another rank's has some, since ranks divide what computes them.

    Args:
        made: this rank's.
        shares: of every rank, its layouts, which name positions in ``chosen``.
        chosen: numbers of the sequences.
        illustrations: of all sequences of the batch.
    """
    found = []
    for number, micro in enumerate(made):
        layouts = (layouts[number] for layouts in shares if number < len(layouts))
        shown = (illustrations[chosen[position]] for layout in layouts for position in layout.members)
        seen = None if micro.inputs.images is not None else next(filter(None, shown), None)
        found.append(micro if seen is None else replace(micro, inputs=beside_image(micro.inputs, seen)))
    return found


def _empty(device: torch.device) -> MicroBatch:
    """Make a pass over two tokens of no sequence."""
    layout = MicroLayout((), 2, is_packed=False)
    ids, nothing = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64, device=device)
    inputs = ModelInput(ids, torch.arange(2)[None], None, torch.zeros(1, dtype=torch.int64), ids[0, :1])
    sequences = PackedSequences(nothing, nothing.bool(), 0)
    return MicroBatch(layout, inputs.to(device), nothing, nothing, sequences, None, is_empty=True)


def _filled(
    batch: TrainingBatch, layouts: Sequence[MicroLayout], device: torch.device, build: Callable[..., ModelInput]
) -> Iterator[MicroBatch]:
    offsets = np.concatenate([[0], np.cumsum(batch.span_lengths)])
    mask = batch.sequences.response_mask.cpu().numpy()
    shares = batch.sequences.shares
    for layout in layouts:
        members = layout.members
        tokens = np.concatenate([np.arange(offsets[number], offsets[number + 1]) for number in members])
        is_sampled = mask[tokens]
        sampled = {
            number: np.flatnonzero(mask[offsets[number] : offsets[number + 1]]) + batch.span_starts[number]
            for number in members
        }
        lengths = [int(offsets[number + 1] - offsets[number]) for number in members]
        index = torch.from_numpy(np.repeat(np.arange(len(members)), lengths)).to(device)
        numbers = torch.tensor(members, device=device)
        counted = None if shares is None else shares[numbers]
        inputs = build(layout, batch.token_ids, sampled, illustrations=batch.illustrations, experts=batch.experts)
        if batch.temperatures is not None:
            inputs = replace(inputs, temperatures=_temperatures(batch.temperatures, sampled))
        yield MicroBatch(
            layout=layout,
            inputs=inputs.to(device),
            members=numbers,
            tokens=torch.from_numpy(tokens).to(device),
            sequences=PackedSequences(index, torch.from_numpy(is_sampled).to(device), len(members), counted),
            sampled=None if is_sampled.all() else torch.from_numpy(np.flatnonzero(is_sampled)).to(device),
        )


def _temperatures(
    of_sequences: Sequence[float | None], sampled: Mapping[int, npt.NDArray[np.int64]]
) -> Tensor | float | None:
    """Return what labels were sampled at, sequence by sequence; see ``ModelInput``."""
    known = {of_sequences[number] for number in sampled}
    if len(known) == 1:
        return known.pop()
    numbers = [of_sequences[number] or 0.0 for number in sampled]
    return torch.from_numpy(np.repeat(np.array(numbers, dtype=np.float32), [len(each) for each in sampled.values()]))
