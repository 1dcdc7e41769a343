"""The turns of a batch: which of its tokens belong to which, and what the environment gave for each.

A sequence without turns is one turn. Tokens that the policy was shown belong to the turn that follows them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages.agentic import EnvironmentSteps
from flotilla.services.trainer.algorithms.advantages.returns import rewards_at_last_token
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.data.batch import TrainingBatch


@dataclass(frozen=True, eq=False)
class TurnLayout:
    """N turns of the batch's S sequences, in order.

    Attributes:
        sequences: the batch's span tokens [T], each turn a sequence of its own.
        owner: [N] int64, the sequence of each turn.
        place: [N] int64, its place among that sequence's turns.
        rewards: [N] float32, what the environment gave; 0 where nothing did.
        states: [N] int64, the state that the turn began in; a number of its own where none is known.
    """

    sequences: PackedSequences
    owner: Tensor
    place: Tensor
    rewards: Tensor
    states: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch) -> "TurnLayout":
        """Lay out a batch's turns, on its device."""
        device = batch.rewards.device
        owner: list[int] = []
        place: list[int] = []
        rewards: list[float] = []
        states: list[int] = []
        numbers = []
        for sequence, turns in enumerate(batch.turns):
            start, length = batch.span_starts[sequence], len(batch.token_ids[sequence])
            ends = np.array([turn.end for turn in turns] or [length])
            numbers.append(len(owner) + np.searchsorted(ends, np.arange(start, length), side="right"))
            for at in range(len(ends)):
                reward, state = (turns[at].reward, turns[at].state) if turns else (None, None)
                rewards.append(reward or 0.0)
                # Negative numbers are nobody's: states are not negative.
                states.append(-1 - len(states) if state is None else state)
                owner.append(sequence)
                place.append(at)
        index = torch.from_numpy(np.concatenate(numbers)).to(device)
        return cls(
            PackedSequences(index, batch.sequences.response_mask, len(owner)),
            torch.tensor(owner, device=device),
            torch.tensor(place, device=device),
            torch.tensor(rewards, dtype=torch.float32, device=device),
            torch.tensor(states, dtype=torch.int64, device=device),
        )


def turn_rewards(batch: TrainingBatch, weight: float) -> Tensor | None:
    """Put the environment's rewards, weighted, where they were earned: [T]; None if there are none."""
    if not weight or not any(turn.reward for turns in batch.turns for turn in turns):
        return None
    layout = TurnLayout.of(batch)
    return rewards_at_last_token(weight * layout.rewards, layout.sequences)


def environment_steps(batch: TrainingBatch, layout: TurnLayout, weight: float) -> EnvironmentSteps:
    """Make each turn a step, whose score is its weighted reward; what else a sequence's reward has, its last turn gets.

    Args:
        batch: the sequences.
        layout: their turns.
        weight: of the environment's rewards in the reward.
    """
    scores = weight * layout.rewards
    earned = torch.zeros_like(batch.rewards).index_add(0, layout.owner, scores)
    is_last = torch.ones_like(layout.owner, dtype=torch.bool)
    is_last[:-1] = layout.owner[1:] != layout.owner[:-1]
    rest = (batch.rewards - earned)[layout.owner]
    return EnvironmentSteps(
        step_scores=scores + torch.where(is_last, rest, 0.0),
        trajectory_index=layout.owner,
        step_index=layout.place,
        state_index=layout.states,
        episode_scores=batch.rewards[layout.owner],
    )
