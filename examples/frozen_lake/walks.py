"""Walks over frozen lakes as conversations: what the model is shown, and what a walker of some skill answers."""

import random
from dataclasses import dataclass

from flotilla.services.rollout.environments.frozen_lake import ACTIONS, GOAL, HOLE, FrozenLake, distance, moved

PROMPT = "Walk to G."
HELD_OUT = 1_000_000_000
"""Seeds of held-out lakes begin here; those of training are smaller."""


@dataclass(frozen=True)
class Walk:
    """Observations, the actions that answered them, and which of these were on purpose."""

    observations: list[str]
    actions: list[str]
    on_purpose: list[bool]

    def messages(self) -> list[dict[str, str]]:
        """Write it as a chat; the prompt stands before the first observation."""
        chat = []
        for number, (shown, action) in enumerate(zip(self.observations, self.actions, strict=True)):
            content = shown if number else f"{PROMPT}\n\n{shown}"
            chat += [{"role": "user", "content": content}, {"role": "assistant", "content": action}]
        return chat


def good_actions(lake: FrozenLake) -> list[int]:
    """List the actions that lead nearer to the goal, over ice."""
    goal = next((row, cells.index(GOAL)) for row, cells in enumerate(lake.lake) if GOAL in cells)
    here = distance(lake.lake, lake.player, goal)
    assert here is not None
    good = []
    for action in range(len(ACTIONS)):
        reached = moved(lake.lake, lake.player, action)
        there = None if lake.lake[reached[0]][reached[1]] == HOLE else distance(lake.lake, reached, goal)
        if there is not None and there < here:
            good.append(action)
    return good


def walk(lake: FrozenLake, seed: int, good_share: float, max_turns: int, rng: random.Random) -> Walk:
    """Walk: so many steps towards the goal on purpose, the others anywhere; where none is, all are on purpose."""
    shown, _ = lake.reset(seed)
    made = Walk([], [], [])
    is_over = False
    while not is_over and len(made.actions) < max_turns:
        is_good = rng.random() < good_share
        choice = rng.choice(good_actions(lake)) if is_good else rng.randrange(len(ACTIONS))
        made.observations.append(shown)
        made.actions.append(ACTIONS[choice])
        made.on_purpose.append(is_good or not good_share)
        shown, _, is_over, _, _ = lake.step(ACTIONS[choice])
    return made
