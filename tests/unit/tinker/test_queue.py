"""What is read of a request while it is being answered."""

import asyncio
from typing import Any

from flotilla.shared.tinker.queue import Answer, TinkerQueue


class AnsweringRedis:
    """Has an answer written between two commands: behind the first one."""

    def __init__(self) -> None:
        self.is_answered = False

    async def execute_command(self, command: str, *_: Any) -> Any:
        """Read, and be answered then."""
        found = b"J{}" if self.is_answered else None
        self.is_answered = True
        answered = b"1" if found else None
        return [answered, None] if command == "HMGET" else found


def test_an_answer_that_comes_while_it_is_looked_for_is_not_taken_for_one_that_is_gone() -> None:
    redis: Any = AnsweringRedis()

    found = asyncio.run(TinkerQueue(redis).answer("s:train:0:1"))

    assert found == Answer.json({})
