"""The in-memory twin of the mailbox."""

from collections.abc import Callable
from dataclasses import dataclass

from flotilla.shared.streams.mailbox import KEPT_SECONDS, Delivery, Expected


@dataclass(slots=True)
class _Letter:
    key: str
    deadline: float
    is_accepted: bool = False
    answer: bytes | None = None


class MemoryMailbox:
    """See ``Mailbox``; ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._letters: dict[str, _Letter] = {}

    async def expect(self, name: str, *, key: str = "", seconds: float) -> Expected:
        """See ``Mailbox.expect``."""
        self._letters.setdefault(name, _Letter(key, self._clock() + seconds))
        found = await self.find(name)
        if found is None:
            self._letters[name] = _Letter(key, self._clock() + seconds)
            found = await self.find(name)
        assert found is not None
        return found

    async def accept(self, name: str) -> None:
        """See ``Mailbox.accept``."""
        if name in self._letters:
            self._letters[name].is_accepted = True

    async def find(self, name: str) -> Expected | None:
        """See ``Mailbox.find``."""
        letter = self._letters.get(name)
        if letter is None or self._clock() > letter.deadline + KEPT_SECONDS:
            return None
        left = max(0.0, letter.deadline - self._clock())
        return Expected(letter.key, left, letter.is_accepted, letter.answer)

    async def deliver(self, name: str, answer: bytes) -> Delivery:
        """See ``Mailbox.deliver``."""
        found = await self.find(name)
        if found is None:
            return Delivery.UNKNOWN
        if found.answer is not None:
            return Delivery.AGAIN if found.answer == answer else Delivery.OTHER
        if found.seconds_left <= 0:
            return Delivery.LATE
        self._letters[name].answer = answer
        return Delivery.TAKEN
