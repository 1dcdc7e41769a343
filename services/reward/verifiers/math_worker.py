"""The child process that compares mathematics. Run by path; it imports nothing of ours.

It reads one JSON object per line (``response``, ``label``, ``timeout_seconds``) and answers one line (``verdict`` and
``answer``, or ``error``). Sympy can hang beyond the reach of any signal handler, so the parent kills this process when
a comparison takes too long. In case the parent is gone by then, the kernel does: an alarm without a handler ends a
process.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 << 30
GRACE_SECONDS = 5.0
LONGEST_ANSWER = 1000


def parse_label(label: str) -> list[Any]:
    """Read the expected answer. One without any LaTeX environment is taken as the inside of a box."""
    from math_verify import parse

    is_marked = "$" in label or "\\boxed" in label or "\\(" in label or "\\[" in label
    text = label if is_marked else f"\\boxed{{{label}}}"
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


def compare(response: str, label: str) -> dict[str, Any]:
    """Tell whether the response's final expression equals the label."""
    from math_verify import parse, verify

    gold = parse_label(label)
    if not gold:
        return {"error": f"the label is not mathematics: {label[:80]!r}"}
    answer = parse(response, parsing_timeout=None, raise_on_error=True)
    if not answer:
        return {"verdict": False, "answer": None}
    is_equal = bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    return {"verdict": is_equal, "answer": str(answer[-1])[:LONGEST_ANSWER]}


def main() -> None:
    """Answer until the input ends."""
    import math_verify  # noqa: F401  the slow import is over before the first time limit starts

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))  # 9^9^9^9 is a short answer
    logging.disable(logging.CRITICAL)
    replies = sys.stdout
    sys.stdout = sys.stderr
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_seconds"] + GRACE_SECONDS)
        try:
            reply = compare(request["response"], request["label"])
        except Exception as error:  # whatever sympy raises is the answer "could not tell"
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
