"""Penalties on tokens that a sample has already, as vLLM defines them.

They change which token is sampled, not the recorded log-probability: that stays the policy's own, which the trainer
computes again without knowing of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class History:
    """Which tokens the prompts of rows have, and how often each was sampled: [rows, V] each.

    Args:
        num_rows: of the batch.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)

    def begin(self, row: int, prompt_ids: Tensor) -> None:
        """Forget what a row had; its prompt is [N] int64."""
        self.in_prompt[row] = False
        self.counts[row] = 0
        self.in_prompt[row, prompt_ids.to(self.in_prompt.device)] = True

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count a sampled token for each row, [N] int64 both; a row may come several times."""
        device = self.counts.device
        ones = torch.ones(len(rows), device=device)
        self.counts.index_put_((rows.to(device), token_ids.to(device)), ones, accumulate=True)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move rows [N] to others."""
        sources, targets = sources.to(self.counts.device), targets.to(self.counts.device)
        self.in_prompt[targets] = self.in_prompt[sources]
        self.counts[targets] = self.counts[sources]


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """Penalties of R of a step's rows.

    Attributes:
        places: [R] int64, where they are among the step's rows.
        rows: [R] int64, where they are in the batch.
        repetition, presence, frequency: [R, 1] float32.
        history: of the batch, as it is when a token is sampled.
    """

    places: Tensor
    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    history: History

    def applied(self, logits: Tensor) -> Tensor:
        """Return the logits [R, V] of these rows, penalised.

        A token of the prompt or the completion has its logit divided by ``repetition`` where it is positive, and
        multiplied elsewhere; then ``frequency`` times the number of times that it was sampled is taken off, and
        ``presence`` if it was at all.

        Source: vLLM, ``vllm/v1/sample/ops/penalties.py``; the first is of Keskar et al., CTRL, 2019.
        """
        counts = self.history.counts[self.rows]
        was_sampled = counts > 0
        repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        penalised = torch.where(was_sampled | self.history.in_prompt[self.rows], repeated, logits)
        return penalised - self.frequency * counts - self.presence * was_sampled
