"""Metrics that add up exactly: every figure is a sum and a count, and only the last reader divides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tally:
    """A sum and what to divide it by; both float32 scalars without gradient."""

    total: Tensor
    count: Tensor

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; 0 where nothing was counted."""
        return float(self.total / self.count) if float(self.count) else 0.0


Metrics = dict[str, Tally]


def mean_over(values: Tensor, mask: Tensor) -> Tally:
    """Tally [N] values where the [N] bool mask holds."""
    return Tally(torch.where(mask, values.detach().float(), 0.0).sum(), mask.sum().float())


def share(part: Tensor, mask: Tensor) -> Tally:
    """Tally the fraction of ``mask`` [N] where ``part`` [N] bool holds too."""
    return Tally((part & mask).sum().float(), mask.sum().float())


def once(value: Tensor) -> Tally:
    """Tally a value that is already a share of the whole: adding shares up gives the whole, so the count is 1 once.

    Losses are such values: micro-batches' losses sum to the mini-batch's. The count is filled in by ``summarise``.
    """
    return Tally(value.detach().float(), torch.zeros_like(value.detach().float()))


def combine(parts: Iterable[Mapping[str, Tally]]) -> Metrics:
    """Add up the tallies of micro-batches or ranks, name by name."""
    combined: Metrics = {}
    for part in parts:
        for name, tally in part.items():
            combined[name] = combined[name] + tally if name in combined else tally
    return combined


def summarise(metrics: Mapping[str, Tally]) -> dict[str, float]:
    """Divide sums by counts, and derive what is made of several: the effective sample size of importance weights.

    A tally whose count is 0 and whose total is not is a sum of shares (see ``once``) and is reported as it is.
    """
    summary = {name: float(tally.total) if float(tally.count) == 0 else tally.value for name, tally in metrics.items()}
    for name in [name for name in summary if name.endswith("weight_squared")]:
        mean, square = summary[name.removesuffix("_squared")], summary[name]
        summary[name.removesuffix("weight_squared") + "effective_sample_size"] = mean**2 / square if square > 0 else 0.0
    return summary
