"""How a step's sequences become mini-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flotilla.services.trainer.data.batch import TrainingBatch
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.learning.prepared import Prepared
from flotilla.services.trainer.models.optimizer import PolicyOptimizer
from flotilla.shared.config.sections.optimisation import OptimisationConfig

Cut = Callable[[int], list[MicroBatch]]
"""Cuts some sequences into passes of at most so many tokens."""


@dataclass(frozen=True)
class MiniBatch:
    """What makes one optimiser update.

    Attributes:
        members: numbers of its sequences.
        cut: those of them that need a pass.
    """

    members: range
    cut: Cut


def split_by_groups(batch: TrainingBatch, size: int) -> list[range]:
    """Split the sequences by groups, in order, into contiguous ranges of ``size`` whole groups."""
    starts = torch.searchsorted(batch.group_index.cpu(), torch.arange(0, batch.num_groups, size)).tolist()
    return [range(start, end) for start, end in zip(starts, [*starts[1:], batch.num_sequences], strict=True)]


def passes_over(
    prepared: Prepared,
    ranges: Sequence[range],
    config: OptimisationConfig,
    seed: int,
    make: Callable[[Prepared, range], MiniBatch],
) -> Iterator[tuple[Prepared, list[MiniBatch]]]:
    """Return the step's samples, and its mini-batches, once for each pass over them."""
    if not config.shuffle:
        mini_batches = [make(prepared, members) for members in ranges]
        yield from [(prepared, mini_batches)] * config.epochs_per_step
        return
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs_per_step):
        order = torch.randperm(prepared.batch.num_sequences, generator=generator)
        ordered = prepared.take(order.to(prepared.advantages.device))
        yield ordered, [make(ordered, members) for members in ranges]


def forgetting(optimizer: PolicyOptimizer, generator: torch.Generator) -> Callable[[], None]:
    """Return what lets a mini-batch begin again from now: without gradients, and drawing what it drew."""
    state = generator.get_state()

    def undo() -> None:
        optimizer.clear()
        generator.set_state(state)

    return undo
