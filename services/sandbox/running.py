"""What a service needs of whatever runs its programs: this machine, or a provider's boxes."""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric

from flotilla.services.sandbox.conversation import Talk
from flotilla.services.sandbox.executor import Program
from flotilla.services.sandbox.guard.job import JobResult
from flotilla.services.sandbox.isolation import Slot
from flotilla.services.sandbox.languages import Language
from flotilla.shared.schemas.sandbox import IsolationLevel


class Runner(Protocol):
    """Runs programs and sessions, in exclusive slots."""

    num_spoiled: int
    """How often something was left behind in a slot."""
    num_servers_lost: int
    """How often a fork server ended by itself."""

    @property
    def level(self) -> IsolationLevel | None:
        """How well this machine shuts programs in; None: a provider does."""

    @property
    def provider(self) -> str:
        """Where programs run: ``local`` or the provider."""

    @property
    def num_servers_ended(self) -> int:
        """Count the fork servers that were ended by what they ran."""

    def wind_down(self) -> None:
        """Start nothing ahead of need any more, and end all waits for a start."""

    async def renewed(self, slot: Slot) -> Slot | None:
        """Return a slot that can be used next; None as long as there is none."""

    def directory(self, slot: Slot) -> str:
        """Where programs of a slot work, as they see it."""

    def num_backing_off(self, slots: Iterable[Slot]) -> int:
        """Count the slots that cannot be used yet."""

    def families(self) -> Iterable[Metric]:
        """Make further metrics."""

    async def run(self, slot: Slot, program: Program) -> JobResult:
        """Run a program.

        Raises:
            SandboxFailed: it could not be run; nothing is known about it.
        """

    def session(self, slot: Slot, program: Program) -> AbstractAsyncContextManager[Talk]:
        """Start a session, and end it and all that it started at the end.

        Raises:
            SandboxFailed: it could not be started.
        """


@dataclass(frozen=True)
class Opened:
    """What runs programs, once it is open.

    Attributes:
        slots: turns, of programs and of sessions.
        languages: what can be run, by name.
        python: the interpreter of sessions.
        unavailable: why each better level of isolation is not used.
    """

    runner: Runner
    slots: list[Slot]
    languages: dict[str, Language]
    python: str
    unavailable: dict[IsolationLevel, str]
