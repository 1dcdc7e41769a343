"""Sokoban: push every box onto a target. Rewards and symbols as in ROLL's environment.

A room is made backwards: boxes begin on their targets and are pulled away, so every room can be solved.
"""

import random
from dataclasses import dataclass

from flotilla.services.rollout.environments.base import ActionTable, Info, Step, Validity

ACTIONS = ("Up", "Down", "Left", "Right")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
SYMBOLS = "#_O√XPS"
INSTRUCTION = (
    "You are in a warehouse. {} is a wall, {} is floor, {} is a target, {} is a box on a target, {} is a box, {} is "
    "you, {} is you on a target. Push each box onto a target; you cannot pull. Answer with one of Up, Down, Left, "
    "Right."
)
MOST_STATES = 20_000

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Room:
    """What does not move, and what does.

    Attributes:
        size: rows and columns, the walls around included.
        floor: cells that can be walked on.
        targets: cells that boxes belong on.
        player, boxes: where they are.
    """

    size: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a target."""
        return self.boxes == self.targets

    def pushed(self, action: int) -> "Room":
        """Move the player, and a box ahead that can be pushed; else nothing changes."""
        ahead, behind = _beside(self.player, action), _beside(self.player, action, 2)
        if ahead not in self.floor:
            return self
        if ahead not in self.boxes:
            return Room(self.size, self.floor, self.targets, ahead, self.boxes)
        if behind not in self.floor or behind in self.boxes:
            return self
        return Room(self.size, self.floor, self.targets, ahead, self.boxes - {ahead} | {behind})

    def pulled(self, action: int) -> list["Room"]:
        """Undo: walk away in a direction, and once with a box that is behind, if there is one."""
        ahead, behind = _beside(self.player, action), _beside(self.player, action, -1)
        if ahead not in self.floor or ahead in self.boxes:
            return []
        found = [Room(self.size, self.floor, self.targets, ahead, self.boxes)]
        if behind in self.boxes:
            found.append(Room(self.size, self.floor, self.targets, ahead, self.boxes - {behind} | {self.player}))
        return found

    def __str__(self) -> str:
        return "\n".join("".join(self._mark((row, column)) for column in range(self.size)) for row in range(self.size))

    def drawn(self, symbols: str) -> str:
        """Draw it with other symbols; see ``SYMBOLS``."""
        return str(self).translate(str.maketrans(SYMBOLS, symbols))

    def _mark(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        is_target = cell in self.targets
        if cell == self.player:
            return "S" if is_target else "P"
        if cell in self.boxes:
            return "√" if is_target else "X"
        return "O" if is_target else "_"


class Sokoban:
    """A room of boxes; -0.1 per step, +1 for a box on a target, -1 for one off it, +10 when all are.

    Args:
        size: rows and columns, walls included, at least 5.
        num_boxes: at least 1.
        max_steps: the episode ends after so many.
        search_depth: the most moves that a room is made with, and so what solves it.
        format_penalty: added where a text names no action, which counts as a step.
        action_pattern: see ``ActionTable``.
        symbols: of wall, floor, target, box on a target, box, player, player on a target.
    """

    def __init__(
        self,
        size: int = 6,
        num_boxes: int = 1,
        max_steps: int = 10,
        search_depth: int = 30,
        *,
        format_penalty: float = -0.15,
        action_pattern: str | None = None,
        symbols: str = SYMBOLS,
    ) -> None:
        if len(set(symbols)) != len(SYMBOLS) or len(symbols) != len(SYMBOLS):
            raise ValueError(f"symbols must be {len(SYMBOLS)} different characters, got {symbols!r}")
        if size < 5 or num_boxes < 1 or max_steps < 1 or search_depth < 1:
            raise ValueError("size must be at least 5; num_boxes, max_steps and search_depth at least 1")
        self._size, self._num_boxes, self._max_steps, self._depth = size, num_boxes, max_steps, search_depth
        self._format_penalty, self._symbols = format_penalty, symbols
        self._actions = ActionTable(ACTIONS, action_pattern)
        self.room = Room(size, frozenset(), frozenset(), (0, 0), frozenset())
        self._begin()

    def _begin(self) -> None:
        self._steps, self._validity = 0, Validity()

    def reset(self, seed: int) -> tuple[str, Info]:
        """Make a room."""
        rng = random.Random(seed)
        while (room := made_room(rng, self._size, self._num_boxes, self._depth)) is None:
            pass
        self.room = room
        self._begin()
        instruction = INSTRUCTION.format(*self._symbols)
        return room.drawn(self._symbols), {"instruction": instruction, "metrics": self._validity.metrics(success=False)}

    def step(self, text: str) -> Step:
        """Push."""
        action = self._actions.read(text)
        self._validity.count(action is not None)
        before, reward = self.room, -0.1
        if action is None:
            reward += self._format_penalty
        else:
            self.room = before.pushed(action)
        self._steps += 1
        reward += len(self.room.boxes & self.room.targets) - len(before.boxes & before.targets)
        is_solved = self.room.is_solved
        reward += 10.0 * is_solved
        is_late = not is_solved and self._steps >= self._max_steps
        info = {"metrics": self._validity.metrics(success=is_solved), **self._actions.told(text)}
        return self.room.drawn(self._symbols), reward, is_solved or is_late, is_late, info


def made_room(rng: random.Random, size: int, num_boxes: int, depth: int) -> Room | None:
    """Carve a room, put boxes on targets and pull them off as far as possible; None if this one does not work."""
    floor = _carved(rng, size)
    if len(floor) < 2 * num_boxes + 2:
        return None
    player, *targets = rng.sample(sorted(floor), num_boxes + 1)
    solved = Room(size, floor, frozenset(targets), player, frozenset(targets))
    best, best_score, known, layer = None, 0, {solved}, [solved]
    for _ in range(depth):
        following = []
        for room in layer:
            for action in rng.sample(range(4), 4):
                for reached in room.pulled(action):
                    if reached in known or len(known) >= MOST_STATES:
                        continue
                    known.add(reached)
                    following.append(reached)
                    if (score := _displacement(reached)) > best_score:
                        best, best_score = reached, score
        layer = following
    return best


def _displacement(room: Room) -> int:
    """Sum how far boxes are from the next target; 0 while any box is still on one."""
    if room.boxes & room.targets:
        return 0
    return sum(min(abs(row - r) + abs(column - c) for r, c in room.targets) for row, column in room.boxes)


def _carved(rng: random.Random, size: int) -> frozenset[Cell]:
    """Walk at random and carve a small pattern at each step."""
    inside = range(1, size - 1)
    patterns = (
        ((0, 0), (0, 1), (1, 0)),
        ((0, 0), (0, 1), (0, -1)),
        ((0, 0), (1, 0), (-1, 0)),
        ((0, 0), (1, 1), (1, 0)),
    )
    cell, move, floor = (rng.choice(inside), rng.choice(inside)), rng.choice(MOVES), set()
    for _ in range(int(1.7 * 2 * size)):
        for row, column in rng.choice(patterns):
            floor.add((cell[0] + row, cell[1] + column))
        if rng.random() < 0.35:
            move = rng.choice(MOVES)
        reached = (cell[0] + move[0], cell[1] + move[1])
        cell = reached if reached[0] in inside and reached[1] in inside else cell
    return frozenset(each for each in floor if each[0] in inside and each[1] in inside)


def _beside(cell: Cell, action: int, steps: int = 1) -> Cell:
    return cell[0] + steps * MOVES[action][0], cell[1] + steps * MOVES[action][1]
