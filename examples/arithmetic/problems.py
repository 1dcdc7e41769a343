"""Word problems over small integers, their worked solutions, and a split by the arithmetic they contain.

The split is decided by a hash of the chain ("47+8-5") and not of the text, so no held-out problem is a training
problem told about somebody else. It does not depend on the seed: what is held out is held out in every preparation.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .settings import ProblemSettings

NAMES = (
    "Ana",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jana",
    "Kim",
    "Leo",
    "Mia",
    "Nils",
    "Ola",
    "Pia",
)
ITEMS = ("pens", "apples", "books", "coins", "cards", "shells", "stamps", "marbles", "cups", "nuts")
GAINS = ("buys", "finds", "gets", "wins")
LOSSES = ("sells", "loses", "drops", "eats")

HELD_OUT_OF_64 = 4
"""How many of every 64 chains are held out."""


@dataclass(frozen=True)
class Problem:
    """A start, signed changes to it, and the words around them."""

    name: str
    item: str
    start: int
    changes: tuple[int, ...]
    verbs: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The text a user would write."""
        parts = [f"{verb} {abs(change)}" for verb, change in zip(self.verbs, self.changes, strict=True)]
        listed = ", ".join(parts[:-1]) + f" and {parts[-1]}"
        return f"{self.name} has {self.start} {self.item}, {listed}. How many now?"

    @property
    def answer(self) -> int:
        """What is left at the end; never negative."""
        return self.start + sum(self.changes)


def chain_of(problem: Problem) -> str:
    """Write the bare arithmetic, such as ``47+8-5``: what two problems share when only their words differ."""
    return str(problem.start) + "".join(f"{change:+d}" for change in problem.changes)


def worked_solution(problem: Problem) -> str:
    """Write the solution step by step: ``47+8=55; 55-5=50 #### 50``."""
    steps = []
    total = problem.start
    for change in problem.changes:
        steps.append(f"{total}{change:+d}={total + change}")
        total += change
    return "; ".join(steps) + f" #### {total}"


def terse_answer(answer: int) -> str:
    """Write an answer that shows no working: ``#### 50``."""
    return f"#### {answer}"


def guess_near(problem: Problem, error: int, rng: random.Random) -> int:
    """Draw a guess at most ``error`` away from the answer; it may be right, and is never negative."""
    return max(0, problem.answer + rng.randint(-error, error))


def is_held_out(problem: Problem) -> bool:
    """Say on which side of the split a problem is; the same for every problem with the same chain."""
    digest = hashlib.blake2b(chain_of(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 64 < HELD_OUT_OF_64


def draw(settings: ProblemSettings, rng: random.Random) -> Problem:
    """Draw one problem whose running total never falls below zero, from either side of the split."""
    count = rng.choices(list(settings.operation_weights), list(settings.operation_weights.values()))[0]
    start = total = rng.randint(1, settings.largest_start)
    changes, verbs = [], []
    for _ in range(count):
        operand = rng.randint(1, settings.largest_operand)
        is_gain = rng.random() < 0.5 or operand > total
        changes.append(operand if is_gain else -operand)
        verbs.append(rng.choice(GAINS if is_gain else LOSSES))
        total += changes[-1]
    return Problem(rng.choice(NAMES), rng.choice(ITEMS), start, tuple(changes), tuple(verbs))


def training_problems(settings: ProblemSettings, rng: random.Random) -> Iterator[Problem]:
    """Draw problems of the training side without end; texts and chains may recur."""
    while True:
        problem = draw(settings, rng)
        if not is_held_out(problem):
            yield problem


def _distinct(
    count: int,
    settings: ProblemSettings,
    rng: random.Random,
    accept: Callable[[Problem], bool],
    key: Callable[[Problem], str],
) -> list[Problem]:
    found: dict[str, Problem] = {}
    for _ in range(200 * count):
        problem = draw(settings, rng)
        if accept(problem):
            found.setdefault(key(problem), problem)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"these settings do not have {count} distinct problems: {settings}")


def training_set(count: int, settings: ProblemSettings, rng: random.Random) -> list[Problem]:
    """Draw ``count`` training problems, no two with the same text.

    Raises:
        ValueError: the distribution has not that many.
    """
    return _distinct(count, settings, rng, lambda problem: not is_held_out(problem), lambda problem: problem.prompt)


def heldout_set(count: int, settings: ProblemSettings, rng: random.Random) -> list[Problem]:
    """Draw ``count`` held-out problems, no two with the same chain.

    Raises:
        ValueError: the distribution has not that many.
    """
    return _distinct(count, settings, rng, is_held_out, chain_of)
