"""A micro-batch: one forward pass, and which of the batch's tokens it predicts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.trainer.algorithms.sequences import PackedSequences
from services.trainer.data.batch import TrainingBatch
from services.trainer.data.packing import MicroLayout, ModelInput, Packing, build_input, lay_out


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
    """

    layout: MicroLayout
    inputs: ModelInput
    members: Tensor
    tokens: Tensor
    sequences: PackedSequences
    sampled: Tensor | None

    def spread(self, of_labels: Tensor) -> Tensor:
        """Put values of the labels [N] where their tokens stand [T'], 0 elsewhere; differentiable."""
        if self.sampled is None:
            return of_labels
        return of_labels.new_zeros(self.tokens.shape).index_copy(0, self.sampled, of_labels)


def make_micro_batches(
    batch: TrainingBatch,
    members: Sequence[int],
    *,
    max_tokens: int,
    packing: Packing,
    device: torch.device,
) -> list[MicroBatch]:
    """Cut some sequences of a batch into micro-batches; those without a sampled token need no forward pass.

    Args:
        batch: on ``device`` already.
        members: numbers of the sequences.
        max_tokens: bound on the positions of one forward pass.
        packing: how rows are filled.
        device: where inputs go.
    """
    spans = batch.span_lengths
    chosen = [number for number in members if spans[number]]
    lengths = [len(batch.token_ids[number]) for number in chosen]
    layouts = lay_out(lengths, max_tokens=max_tokens, packing=packing)
    return list(_filled(batch, [_renumbered(layout, chosen) for layout in layouts], device))


def _renumbered(layout: MicroLayout, chosen: Sequence[int]) -> MicroLayout:
    rows = tuple(tuple(chosen[number] for number in row) for row in layout.rows)
    return MicroLayout(rows, layout.width, layout.is_packed)


def _filled(batch: TrainingBatch, layouts: Sequence[MicroLayout], device: torch.device) -> Iterator[MicroBatch]:
    offsets = np.concatenate([[0], np.cumsum(batch.span_lengths)])
    mask = batch.sequences.response_mask.cpu().numpy()
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
        yield MicroBatch(
            layout=layout,
            inputs=build_input(layout, batch.token_ids, sampled).to(device),
            members=torch.tensor(members, device=device),
            tokens=torch.from_numpy(tokens).to(device),
            sequences=PackedSequences(index, torch.from_numpy(is_sampled).to(device), len(members)),
            sampled=None if is_sampled.all() else torch.from_numpy(np.flatnonzero(is_sampled)).to(device),
        )
