"""Padded rows [B, T] as our packed layout, and what several adapters share."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import Denominators, aggregate, count_sampled
from flotilla.services.trainer.algorithms.importance import shared_weights
from flotilla.services.trainer.algorithms.losses import TokenLoss, policy_loss
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import AggregationConfig, PolicyLossConfig
from tests.goldens.case import Case


@dataclass(frozen=True, eq=False)
class Rows:
    """A case's [B, T] inputs: padding becomes masked tokens."""

    case: Case
    shape: tuple[int, int]
    sequences: PackedSequences

    @classmethod
    def of(cls, case: Case, *, mask: Tensor | None = None) -> "Rows":
        """Lay out a case by its response mask, or by the given one."""
        chosen = case.inputs["response_mask"] if mask is None else mask
        num_rows, width = chosen.shape
        index = torch.arange(num_rows).repeat_interleave(width)
        return cls(case, (num_rows, width), PackedSequences(index, chosen.bool().flatten(), num_rows))

    def __getitem__(self, name: str) -> Tensor:
        return self.case.inputs[name].float().flatten()

    def leaf(self, name: str) -> Tensor:
        """An input [T] that collects a gradient."""
        return self[name].clone().requires_grad_(True)

    def back(self, tokens: Tensor) -> Tensor:
        """[T] to [B, T]."""
        return tokens.detach().reshape(self.shape)

    @property
    def ones(self) -> PackedSequences:
        """The same rows with every position counted."""
        return self.sequences.with_mask(torch.ones_like(self.sequences.response_mask))


def aggregation(mode: str, length: float | None) -> AggregationConfig:
    """Build the aggregation section; the length only where the mode uses it."""
    return AggregationConfig(mode=mode, fixed_length=int(length) if mode.endswith("-norm") and length else None)  # type: ignore[arg-type]


def counted(sequences: PackedSequences, **given: float | None) -> Denominators:
    """Count the denominators, except for those that the case gives."""
    own = count_sampled(sequences)
    tokens, rows = given.get("num_tokens"), given.get("num_sequences")
    return Denominators.of(
        float(own.num_tokens) if tokens is None else tokens, float(own.num_sequences) if rows is None else rows
    )


def weighted_loss(
    config: PolicyLossConfig,
    rows: Rows,
    aggregated: AggregationConfig,
    denominators: Denominators,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    sequences: PackedSequences | None = None,
    weights: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, TokenLoss]:
    """Run a policy loss with given weights [T]: the scalar, and the loss per token."""
    sequences = rows.sequences if sequences is None else sequences
    loss = policy_loss(config, log_probs, old_log_probs, rows["advantages"], sequences, scores=scores)
    values = loss.values
    if weights is not None:
        values = values * (shared_weights(weights, sequences) if loss.per_sequence else weights)
    return aggregate(values, sequences, denominators, aggregated), loss


def fraction(part: Tensor | None, mask: Tensor) -> Tensor:
    """Share of the masked tokens [T] in which ``part`` holds; 0 where there is no such part, or no token."""
    return torch.tensor(0.0) if part is None else (part & mask).sum() / mask.sum().clamp(min=1)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of [T] over the mask; 0 where it is empty."""
    return torch.where(mask, values.detach(), 0.0).sum() / mask.sum().clamp(min=1)


def gradient(scalar: Tensor, leaf: Tensor) -> Tensor:
    """Gradient of a scalar, shaped like the leaf."""
    (result,) = torch.autograd.grad(scalar, [leaf])
    return result


def positive(bound: float | None) -> float | None:
    """A lower bound of 0 on what is never negative is no bound."""
    return bound if bound else None


def finite(bound: float | None) -> float | None:
    """An infinite bound is no bound."""
    return None if bound is None or math.isinf(bound) else bound


def numbered(values: Any) -> Tensor:
    """Number names of groups in the order of their first appearance."""
    if isinstance(values, Tensor):
        return values.long()
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([numbers[value] for value in values])
