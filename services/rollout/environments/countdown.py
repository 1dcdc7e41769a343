"""Countdown: reach a number with others, each used at most once, by + - * /; wrong answers may be corrected."""

import ast
import random
from collections import Counter
from fractions import Fraction

from flotilla.services.rollout.environments.base import Info, Step, Validity, answer_of

INSTRUCTION = (
    "Reach the target with the numbers, each used at most once, by + - * / and brackets. Answer with one expression."
)
LONGEST = 200


class Countdown:
    """Reward 1 for an expression that gives the target, and the episode is over.

    Args:
        num_numbers: that are given, at least 2.
        largest: number that is given.
        max_attempts: the episode ends after so many answers.
        format_penalty: reward of an answer that is no expression of the numbers.
    """

    def __init__(
        self, num_numbers: int = 3, largest: int = 20, max_attempts: int = 3, *, format_penalty: float = 0.0
    ) -> None:
        if num_numbers < 2 or largest < 2 or max_attempts < 1:
            raise ValueError("num_numbers and largest must be at least 2, max_attempts at least 1")
        self._num_numbers, self._largest, self._max_attempts = num_numbers, largest, max_attempts
        self._format_penalty = format_penalty
        self.numbers: list[int] = []
        self.target = 0
        self.solution = ""
        self._begin()

    def _begin(self) -> None:
        self._attempts, self._validity = 0, Validity()

    def reset(self, seed: int) -> tuple[str, Info]:
        """Draw numbers, and a target that some expression of them reaches."""
        rng = random.Random(seed)
        while True:
            self.numbers = [rng.randint(1, self._largest) for _ in range(self._num_numbers)]
            self.solution = _drawn(rng, [str(number) for number in self.numbers])
            value = value_of(self.solution, self.numbers)
            if value is not None and value.denominator == 1 and 0 < value <= 10 * self._largest:
                break
        self.target = int(value)
        self._begin()
        shown = f"numbers: {' '.join(map(str, self.numbers))}\ntarget: {self.target}"
        return shown, {"instruction": INSTRUCTION, "metrics": self._validity.metrics(success=False)}

    def step(self, text: str) -> Step:
        """Evaluate an answer."""
        value = value_of(answer_of(text), self.numbers)
        self._validity.count(value is not None)
        self._attempts += 1
        is_right = value == self.target
        is_late = not is_right and self._attempts >= self._max_attempts
        shown = "no expression of these numbers" if value is None else f"gives {value}, not {self.target}"
        reward = self._format_penalty if value is None else float(is_right)
        metrics = self._validity.metrics(success=is_right)
        return "right" if is_right else shown, reward, is_right or is_late, is_late, {"metrics": metrics}


def value_of(expression: str, numbers: list[int]) -> Fraction | None:
    """Compute an expression of the numbers exactly; None if it is none, or divides by zero."""
    if len(expression) > LONGEST:
        return None
    try:
        tree = ast.parse(expression.partition("=")[0].strip(), mode="eval").body
        used: Counter[int] = Counter()
        value = _evaluate(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if used <= Counter(numbers) else None


def _evaluate(node: ast.expr, used: "Counter[int]") -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError(f"{type(node).__name__} is not part of an expression")


def _drawn(rng: random.Random, terms: list[str]) -> str:
    terms = rng.sample(terms, len(terms))
    while len(terms) > 1:
        left, right = terms.pop(), terms.pop()
        terms.append(f"({left} {rng.choice('+-*/')} {right})")
        rng.shuffle(terms)
    return terms[0]
