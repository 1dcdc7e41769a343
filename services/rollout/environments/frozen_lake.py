"""FrozenLake: walk over ice from a start to a goal, around holes. Rules as in ROLL's environment of that name."""

import random
from collections import deque

from flotilla.services.rollout.environments.base import ActionTable, Info, Step, Validity

ACTIONS = ("Left", "Down", "Right", "Up")
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
FROZEN, HOLE, GOAL = "_", "O", "G"
INSTRUCTION = (
    "You walk over a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Reach the goal and do not step into "
    "a hole. Answer with one of Left, Down, Right, Up."
)

Cell = tuple[int, int]


class FrozenLake:
    """A square lake; reward 1 at the goal, else 0. A hole ends the episode.

    Args:
        size: rows and columns, at least 2.
        frozen: share of the cells that are ice.
        is_slippery: whether a step goes where it was meant in one of three cases only, else to a side.
        format_penalty: reward of a text that names no action; nothing moves then.
        action_pattern: see ``ActionTable``.
    """

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        *,
        is_slippery: bool = False,
        format_penalty: float = 0.0,
        action_pattern: str | None = None,
    ) -> None:
        if size < 2 or not 0 < frozen <= 1:
            raise ValueError(f"size must be at least 2 and frozen in (0, 1], got {size} and {frozen}")
        self._size, self._frozen, self._is_slippery = size, frozen, is_slippery
        self._format_penalty = format_penalty
        self._actions = ActionTable(ACTIONS, action_pattern)
        self._random = random.Random(0)
        self._begin(["_" * size] * size, (0, 0))

    def _begin(self, lake: list[str], start: Cell) -> None:
        self.lake, self.player = lake, start
        self._validity = Validity()

    def reset(self, seed: int) -> tuple[str, Info]:
        """Draw a lake with a way from start to goal."""
        self._random = random.Random(seed)
        while True:
            lake, start, goal = self._draw()
            if distance(lake, start, goal) is not None:
                break
        self._begin(lake, start)
        return self._observation(), {"instruction": INSTRUCTION, "metrics": self._validity.metrics(success=False)}

    def step(self, text: str) -> Step:
        """Walk."""
        action = self._actions.read(text)
        self._validity.count(action is not None)
        told = self._actions.told(text)
        if action is None:
            info = {"metrics": self._validity.metrics(success=False), **told}
            return self._observation(), self._format_penalty, False, False, info
        if self._is_slippery:
            action = self._random.choice([(action - 1) % 4, action, (action + 1) % 4])
        self.player = moved(self.lake, self.player, action)
        under = self.lake[self.player[0]][self.player[1]]
        info = {"metrics": self._validity.metrics(success=under == GOAL), **told}
        return self._observation(), float(under == GOAL), under in {GOAL, HOLE}, False, info

    def _draw(self) -> tuple[list[str], Cell, Cell]:
        cells = [(row, column) for row in range(self._size) for column in range(self._size)]
        start, goal = self._random.sample(cells, 2)
        lake = []
        for row in range(self._size):
            drawn = [FROZEN if self._random.random() < self._frozen else HOLE for _ in range(self._size)]
            lake.append("".join(_place(drawn, row, start, goal)))
        return lake, start, goal

    def _observation(self) -> str:
        under = self.lake[self.player[0]][self.player[1]]
        mark = {FROZEN: "P", HOLE: "X", GOAL: "√"}[under]
        rows = list(self.lake)
        row, column = self.player
        rows[row] = rows[row][:column] + mark + rows[row][column + 1 :]
        return "\n".join(rows)


def _place(drawn: list[str], row: int, start: Cell, goal: Cell) -> list[str]:
    for cell, kind in ((start, FROZEN), (goal, GOAL)):
        if cell[0] == row:
            drawn[cell[1]] = kind
    return drawn


def moved(lake: list[str], cell: Cell, action: int) -> Cell:
    """Return where an action leads from a cell; the border holds."""
    row, column = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
    is_inside = 0 <= row < len(lake) and 0 <= column < len(lake)
    return (row, column) if is_inside else cell


def distance(lake: list[str], start: Cell, goal: Cell) -> int | None:
    """Count the steps of the shortest way over ice; None if there is none."""
    steps, open_cells = {start: 0}, deque([start])
    while open_cells:
        cell = open_cells.popleft()
        for action in range(4):
            reached = moved(lake, cell, action)
            if reached not in steps and lake[reached[0]][reached[1]] != HOLE:
                steps[reached] = steps[cell] + 1
                open_cells.append(reached)
    return steps.get(goal)
