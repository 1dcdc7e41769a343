"""Games as a mathematician knows them, made of nothing but what a policy is shown: what a player can expect of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import permutations
from typing import Any

from flotilla.services.rollout.environments.word_game import WORDS, marks

Outcomes = Sequence[tuple[float, Any, float]]
"""Of one action: probabilities, the states that follow (None: the game is over) and rewards."""
Act = Callable[[int, str], str]
"""What a player writes, given how many turns are left and what was shown."""


@dataclass(frozen=True)
class Rules:
    """A game from where it begins.

    Attributes:
        start: a state.
        texts: what may be written, in every state.
        outcomes: of a text in a state.
    """

    start: Any
    texts: Sequence[str]
    outcomes: Callable[[Any, str], Outcomes]

    def by_chance(self, turns: int) -> tuple[float, float]:
        """Compute mean and variance of the return of a player who writes any of the texts."""

        @cache
        def moments(state: Any, left: int) -> tuple[float, float]:
            if state is None or not left:
                return 0.0, 0.0
            first = second = 0.0
            for text in self.texts:
                for chance, following, reward in self.outcomes(state, text):
                    mean, square = moments(following, left - 1)
                    first += chance * (reward + mean) / len(self.texts)
                    second += chance * (reward**2 + 2 * reward * mean + square) / len(self.texts)
            return first, second

        mean, square = moments(self.start, turns)
        return mean, square - mean**2

    def at_best(self, turns: int) -> tuple[float, Callable[[Any, int], str]]:
        """Compute the largest mean return, and what to write in each state with so many turns left to get it."""

        @cache
        def best(state: Any, left: int) -> tuple[float, str]:
            if state is None or not left:
                return 0.0, ""
            return max(
                (sum(chance * (reward + best(following, left - 1)[0]) for chance, following, reward in found), text)
                for text in self.texts
                for found in [self.outcomes(state, text)]
            )

        return best(self.start, turns)[0], lambda state, left: best(state, left)[1]


def cells_of(shown: str, kinds: str) -> frozenset[tuple[int, int]]:
    """Find the places of some symbols in a drawing."""
    rows = enumerate(shown.splitlines())
    return frozenset((row, column) for row, line in rows for column, mark in enumerate(line) if mark in kinds)


def beside(cell: tuple[int, int], direction: str) -> tuple[int, int]:
    """Return the next cell in a direction."""
    row, column = cell
    return {
        "Up": (row - 1, column), "Down": (row + 1, column), "Left": (row, column - 1), "Right": (row, column + 1),
    }[direction]  # fmt: skip


DIRECTIONS = ("Up", "Down", "Left", "Right")


def frozen_lake(shown: str, turns: int) -> Rules:
    """A walk over ice, from a drawing of it."""
    del turns
    (start,), (goal,), inside = cells_of(shown, "P"), cells_of(shown, "G"), cells_of(shown, "PG_O")
    holes = cells_of(shown, "O")

    def outcomes(cell: tuple[int, int], text: str) -> Outcomes:
        reached = beside(cell, text)
        reached = reached if reached in inside else cell
        return [(1.0, None if reached == goal or reached in holes else reached, float(reached == goal))]

    return Rules(start, DIRECTIONS, outcomes)


def sokoban(shown: str, turns: int) -> Rules:
    """Boxes that are pushed, from a drawing of them."""
    del turns
    floor, targets, (start,) = cells_of(shown, "_OXP√S"), cells_of(shown, "O√S"), cells_of(shown, "PS")

    def outcomes(state: tuple[tuple[int, int], frozenset[tuple[int, int]]], text: str) -> Outcomes:
        player, boxes = state
        ahead = beside(player, text)
        behind = beside(ahead, text)
        is_free = ahead in floor and (ahead not in boxes or (behind in floor and behind not in boxes))
        pushed = boxes - {ahead} | {behind} if is_free and ahead in boxes else boxes
        reward = -0.1 + len(pushed & targets) - len(boxes & targets) + 10.0 * (pushed == targets)
        return [(1.0, None if pushed == targets else (ahead if is_free else player, pushed), reward)]

    return Rules((start, cells_of(shown, "X√")), DIRECTIONS, outcomes)


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, Fraction | None]]:
    """Write all expressions of two or three numbers in any order, with their values; None: divided by zero."""

    def join(left: tuple[str, Fraction | None], right: tuple[str, Fraction | None]) -> Iterator[tuple[str, Any]]:
        (a, x), (b, y) = left, right
        for sign in "+-*/":
            if x is None or y is None or (sign == "/" and not y):
                yield f"({a} {sign} {b})", None
            else:
                yield f"({a} {sign} {b})", {"+": x + y, "-": x - y, "*": x * y, "/": x / (y or 1)}[sign]

    for order in permutations([(str(number), Fraction(number)) for number in numbers]):
        first, second, *rest = order
        for pair in join(first, second):
            if not rest:
                yield pair
            for third in rest:
                yield from join(pair, third)
                yield from join(third, pair)


PENALTY = -0.25
"""For what is no action, in the games that are told so."""


def countdown(shown: str, turns: int) -> Rules:
    """A target and numbers to reach it with; the state is nothing but that the game goes on."""
    del turns
    first, second = shown.splitlines()
    numbers, target = [int(word) for word in first.split()[1:]], int(second.split()[1])
    values = dict(expressions(numbers))

    def outcomes(state: str, text: str) -> Outcomes:
        value = values[text]
        return [(1.0, None if value == target else state, PENALTY if value is None else float(value == target))]

    return Rules("going on", tuple(values), outcomes)


def word_game(num_words: int) -> Callable[[str, int], Rules]:
    """Make a game of guesses at random: nothing that is shown helps a player who does not look."""

    def rules(shown: str, turns: int) -> Rules:
        del shown, turns
        return Rules("?", ("a word",), lambda *_: [(1 / num_words, None, 1.0), (1 - 1 / num_words, "?", 0.0)])

    return rules


def careful_guesser(num_words: int) -> Act:
    """Make a player who always guesses what splits the words that are left into the most parts."""
    words: list[str] = []

    def act(left: int, shown: str) -> str:
        nonlocal words
        if "\n" not in shown:
            words = list(WORDS[:num_words])
        else:
            guess, marked = shown.split("\n")
            words = [word for word in words if marks(guess, word) == marked]
        return best_split(tuple(words))

    return act


@cache
def best_split(words: tuple[str, ...]) -> str:
    return max(words, key=lambda guess: len({marks(guess, word) for word in words}))


def gymnasium_table(table: Mapping[int, Mapping[int, Any]]) -> Callable[[str, int], Rules]:
    """Make the rules of one of gymnasium's toys of the table that it has of itself."""

    def rules(shown: str, turns: int) -> Rules:
        del turns
        texts = [str(action) for action in table[0]]

        def outcomes(state: int, text: str) -> Outcomes:
            found = table[state][int(text)]
            return [(chance, None if is_over else int(to), float(reward)) for chance, to, reward, is_over in found]

        return Rules(int(shown), texts, outcomes)

    return rules
