"""Asking the answer and its judge by turns, each in a run of its own of the sandbox, until there is a verdict.

The judge lists what it has to know of the answer's program, the program replies, and the judge runs again with the
replies. Most labels take one run of the program and one of the judge: what a label asks first does not depend on the
answer, and is kept for the next answers to it.
"""

import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

from flotilla.shared.errors import GradingFailed

OWN_IMPORTS = "from flotilla."
MOST_ROUNDS = 64
MOST_KEPT = 1024

Run = Callable[[str, str], Awaitable[str | None]]
"""Runs a program with its input: what it printed, also if it ended badly; None if it printed nothing that counts."""


@cache
def program_text(role: str) -> str:
    """Make the program of the ``answer`` or the ``judge``: one text, for the sandbox has no Flotilla modules."""
    folder = Path(__file__).parent
    texts = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in ("plain_data", role)]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return "".join(line for line in lines if not line.startswith(OWN_IMPORTS))


class Assertions:
    """Judges programs by statements such as ``assert add(1, 2) == 3``."""

    def __init__(self) -> None:
        self._first: dict[str, list[Any]] = {}

    async def hold(self, program: str, statements: str, run: Run) -> bool:
        """Return whether all assertions hold for a program.

        Args:
            program: text of the answer's program.
            statements: of the label.
            run: runs one program in the sandbox.

        Raises:
            GradingFailed: the label cannot be judged, or the sandbox failed.
        """
        requests = await self._first_requests(statements, run)
        for _ in range(MOST_ROUNDS):
            given = json.dumps({"program": program, "requests": requests})
            lines = (await run(program_text("answer"), given) or "").split("\n")[:-1]
            if not lines:
                return False  # it did not even load
            replies = lines[1 : len(requests) + 1]
            verdict = await _judge(statements, list(zip(requests, replies, strict=False)), run)
            if verdict is None:  # with the same label and other replies it has been well
                return False
            if "requests" not in verdict:
                return verdict.get("passed") is True
            asked = verdict["requests"]
            has_ended = len(replies) < len(requests) and asked[: len(replies) + 1] == requests[: len(replies) + 1]
            if has_ended:
                return False  # it ended at a request that was due
            requests = asked
        return False

    async def _first_requests(self, statements: str, run: Run) -> list[Any]:
        """Find what a label asks before anything is known of the answer."""
        if (known := self._first.get(statements)) is not None:
            return known
        verdict = await _judge(statements, [], run)
        if verdict is None:
            raise GradingFailed("the label cannot be judged: its statements end the judge's program, or take too long")
        if "cannot" in verdict:
            raise GradingFailed(f"the label cannot be judged: {verdict['cannot']}")
        if verdict.get("passed") is False:
            raise GradingFailed("the label cannot be judged: it fails without asking anything of the program")
        requests: list[Any] = verdict.get("requests", [])
        if len(self._first) >= MOST_KEPT:
            del self._first[next(iter(self._first))]
        self._first[statements] = requests
        return requests


async def _judge(statements: str, replies: list[Any], run: Run) -> dict[str, Any] | None:
    """Have the judge run once; None if it came to no end."""
    printed = await run(program_text("judge"), json.dumps({"statements": statements, "replies": replies}))
    try:
        found = json.loads(printed or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
