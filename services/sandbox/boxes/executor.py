"""Runs programs and sessions in boxes, each in a fresh one: the counterpart of ``Executor``.

A lost box, or a failing provider, is not the program's fault: it runs again in another box once, and is
``SandboxFailed`` then.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from flotilla.services.sandbox.boxes.conversation import BoxConversation
from flotilla.services.sandbox.boxes.keeper import Boxes
from flotilla.services.sandbox.boxes.work import SLACK_SECONDS, Work, do
from flotilla.services.sandbox.executor import Program
from flotilla.services.sandbox.guard.job import JobResult
from flotilla.services.sandbox.isolation import Slot
from flotilla.services.sandbox.languages import Language
from flotilla.services.sandbox.providers.base import Box, Cause, ProviderFailed
from flotilla.shared.telemetry.prometheus import gauge

log = logging.getLogger(__name__)

LANGUAGES: Final = {
    "python": Language("python", "python3", "main.py", ("-s", "-B")),
    "bash": Language("bash", "bash", "main.sh"),
    "cpp": Language("cpp", "g++", "main.cpp", ("-std=c++17", "-O2"), compiled="main"),
    "javascript": Language("javascript", "node", "main.js"),
}
"""By the tools that images have, found on their paths: what an image lacks is an error of the sandbox."""
ATTEMPTS: Final = 2


class BoxExecutor:
    """Runs programs in boxes.

    Args:
        boxes: gives them.
    """

    level = None
    """The provider isolates, by its own means."""
    num_spoiled = 0
    num_servers_lost = 0
    num_servers_ended = 0
    """Nothing is used twice."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    @property
    def provider(self) -> str:
        """Where programs run."""
        return self.boxes.provider.kind

    def directory(self, slot: Slot) -> str:
        """Where programs work, as they see it: ``slot`` is a turn, not a place."""
        return "."

    def num_backing_off(self, slots: Iterable[Slot]) -> int:
        """Count the slots that may not be used yet: none of ``slots``."""
        return 0

    async def run(self, slot: Slot, program: Program) -> JobResult:
        """Run a program in a box of its own; see ``Executor.run``."""
        work = Work(program.phases, program.limits, program.files, fetch=program.fetch, is_first=True)
        seconds = sum(phase.timeout_seconds for phase in program.phases) + 2 * SLACK_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            box = await self.boxes.take(program.image, seconds, is_fresh=attempt > 1)
            try:
                done = await do(self.boxes.provider, box, work)
            except ProviderFailed as error:
                self.boxes.count(error)
                if error.cause is Cause.REFUSED or attempt == ATTEMPTS:
                    raise
                log.warning("a sandbox was lost, its program runs again in another", extra={"error": error.detail})
            else:
                return JobResult(done.phases, done.files, done.notes)
            finally:
                self.boxes.drop(box)
        raise AssertionError("the last attempt ends with an answer or fails")

    @asynccontextmanager
    async def session(self, slot: Slot, program: Program) -> AsyncIterator[BoxConversation]:
        """Start a session in a box of its own, and take the box away at the end; see ``Executor.session``."""
        box, talk = await self._begun(program)
        try:
            yield talk
        except ProviderFailed as error:
            self.boxes.count(error)
            raise
        finally:
            self.boxes.drop(box)

    async def _begun(self, program: Program) -> tuple[Box, BoxConversation]:
        """Begin a session, in another box where the first one is lost.

        Raises:
            SandboxFailed: it does not begin.
        """
        session = program.session
        assert session is not None
        for attempt in range(1, ATTEMPTS + 1):
            lifetime = session.lifetime_seconds + 2 * SLACK_SECONDS
            box = await self.boxes.take(program.image, lifetime, is_fresh=attempt > 1)
            talk = BoxConversation(self.boxes.provider, box, program.limits, is_shell=session.language == "shell")
            try:
                await talk.begin(dict(program.files), session.cpu_seconds)
            except BaseException as error:
                self.boxes.drop(box)
                if not isinstance(error, ProviderFailed):
                    raise
                self.boxes.count(error)
                if error.cause is Cause.REFUSED or attempt == ATTEMPTS:
                    raise
            else:
                return box, talk
        raise AssertionError("the last attempt begins or fails")

    async def renewed(self, slot: Slot) -> Slot | None:
        """Return the slot: nothing is left in it."""
        return slot

    def wind_down(self) -> None:
        """Nothing is started ahead of need but warm boxes, which end with ``close``."""

    async def close(self) -> None:
        """Take all boxes away."""
        await self.boxes.close()

    def families(self) -> Iterator[Metric]:
        """Make the metrics of boxes."""
        failures = CounterMetricFamily(
            "flotilla_sandbox_provider_failures", "Failures of the provider", labels=("provider", "cause")
        )
        for cause in Cause:
            failures.add_metric((self.provider, cause.value), self.boxes.failures[cause])
        yield failures
        yield CounterMetricFamily(
            "flotilla_sandbox_orphans", "Boxes removed that had no owner", value=self.boxes.num_orphans
        )
        for name, meaning, value in (
            ("sandbox_boxes", "Boxes that there are", self.boxes.num_held),
            ("sandbox_boxes_warm", "Boxes that wait to be used", self.boxes.num_warm),
        ):
            family = gauge(name, meaning)
            family.add_metric((), value)
            yield family
