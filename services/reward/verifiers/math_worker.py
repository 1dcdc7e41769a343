"""The child process that compares mathematics.

It is asked ``{response, label}`` and answers ``{verdict, answer}`` or ``{error}``. Sympy can hang beyond the reach of
any signal handler, so its owner kills this process when a comparison takes too long.
"""

import logging
import resource
from typing import Any

from flotilla.shared.children.serving import serve

MEMORY_BYTES = 2 << 30
LONGEST_ANSWER = 1000


def parse_label(label: str) -> list[Any]:
    """Read the expected answer. One without any LaTeX environment is taken as the inside of a box."""
    from math_verify import parse

    is_marked = "$" in label or "\\boxed" in label or "\\(" in label or "\\[" in label
    text = label if is_marked else f"\\boxed{{{label}}}"
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


def compare(response: str, label: str) -> dict[str, Any]:
    """Return whether the response's final expression equals the label."""
    from math_verify import parse, verify

    gold = parse_label(label)
    if not gold:
        return {"error": f"the label is not mathematics: {label[:80]!r}"}
    answer = parse(response, parsing_timeout=None, raise_on_error=True)
    if not answer:
        return {"verdict": False, "answer": None}
    is_equal = bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    return {"verdict": is_equal, "answer": str(answer[-1])[:LONGEST_ANSWER]}


class Mathematics:
    """Compares one sample at a time."""

    about = None

    def __init__(self, _: Any) -> None:
        import math_verify  # noqa: F401  the slow import is over before the first time limit starts

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))  # 9^9^9^9 is a short answer
        logging.disable(logging.CRITICAL)

    def handle(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Compare a sample's texts."""
        try:
            return compare(asked["response"], asked["label"])
        except Exception as error:  # whatever sympy raises is the answer "could not tell"
            return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    serve(Mathematics)
