"""Makes the planned faults of one process happen.

A site asks for what is due each time it is reached. Nothing here decides whether the system survives: it only does to
the process what a machine, a network or another process could do to it.
"""

import asyncio
import errno
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from flotilla.shared.errors import Unavailable
from flotilla.shared.faults.plan import Fault, FaultPlan
from flotilla.shared.faults.sites import Kind, Site

log = logging.getLogger(__name__)

FOREVER_SECONDS = 86_400.0

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class _Armed:
    """A fault of this process, and how often its site was reached and it happened."""

    def __init__(self, number: int, fault: Fault, process: str, marks: Path | None, started: float) -> None:
        self.number = number
        self.fault = fault
        self._marks = marks
        self._started = started
        self._draws = random.Random(f"{fault.seed} {process} {number}")
        self._reached = 0
        self._happened = 0

    def is_due(self) -> bool:
        """Count that the site was reached, and return whether the fault happens now."""
        fault = self.fault
        if fault.switch is not None and not (self._marks and (self._marks / fault.switch).exists()):
            return False
        self._reached += 1
        if fault.nth is not None and self._reached != fault.nth:
            return False
        if fault.probability is not None and self._draws.random() >= fault.probability:
            return False
        if fault.after_seconds is not None and time.monotonic() - self._started < fault.after_seconds:
            return False
        if fault.times is not None and not self._may_happen_again(fault.times):
            return False
        self._happened += 1
        return True

    def _may_happen_again(self, times: int) -> bool:
        if self._marks is None:
            return self._happened < times
        for count in range(1, times + 1):
            try:
                # The process that creates the file has the turn: only one of several at the same moment.
                with (self._marks / f"{self.number}-{count}").open("x", encoding="utf-8") as mark:
                    mark.write(f"{self.fault.site} {self.fault.kind} pid {os.getpid()}\n")
            except FileExistsError:
                continue
            return True
        return False


class Injector:
    """The faults of one process.

    Args:
        process: its name, one of ``PROCESSES``.
        plan: of the whole fleet.
    """

    def __init__(self, process: str, plan: FaultPlan) -> None:
        started = time.monotonic()
        if plan.marks is not None:
            plan.marks.mkdir(parents=True, exist_ok=True)
        self._by_site: dict[Site, list[_Armed]] = {}
        for number, fault in enumerate(plan.faults, start=1):
            if fault.process in {None, process}:
                armed = _Armed(number, fault, process, plan.marks, started)
                self._by_site.setdefault(fault.site, []).append(armed)
        self._skews: dict[int, float] = {}
        self._late: dict[str, list[tuple[float, object]]] = {}
        self._random = random.Random(process)

    @property
    def faults(self) -> list[Fault]:
        """What may happen in this process."""
        return [armed.fault for each in self._by_site.values() for armed in each]

    def hit(self, site: Site, *, slices: int | None = None) -> None:
        """Reach a site of code that blocks.

        Args:
            slices: how many slices of an image are done.

        Raises:
            OSError: the disk is full.
            Unavailable: what is needed does not answer.
        """
        for fault in self._due(site, slices=slices):
            if fault.kind is Kind.DISK_FULL:
                raise OSError(errno.ENOSPC, "no space left on device (injected fault)")
            if fault.kind is Kind.SLOW:
                time.sleep(fault.seconds or 0)
            elif fault.kind is Kind.PARTIAL:
                time.sleep(FOREVER_SECONDS)
            else:
                self._do(fault)

    def damage(self, site: Site) -> list[Kind]:
        """Reach a site that does what is due to its data itself; returns what that is."""
        return [fault.kind for fault in self._due(site)]

    async def reach(self, site: Site, *, path: str = "") -> list[Fault]:
        """Reach a site of code that may wait; gives what the site has to do itself.

        Raises:
            Unavailable: what is needed does not answer.
        """
        rest = []
        for fault in self._due(site, path=path):
            if fault.kind is Kind.SLOW:
                await asyncio.sleep(fault.seconds or 0)
            elif fault.kind in {Kind.HALF_OPEN, Kind.DUPLICATE} or fault.phase == "after":
                rest.append(fault)
            else:
                self._do(fault)
        return rest

    async def around(
        self,
        site: Site,
        operation: Callable[[], Awaitable[Answer]],
        *,
        path: str = "",
        refusal: Callable[[str], Exception] = Unavailable,
    ) -> Answer:
        """Do an operation that is safe to repeat, with the faults that are due before, instead of and after it.

        Args:
            operation: it.
            path: of its request.
            refusal: makes the error that a refused operation raises.
        """
        try:
            rest = await self.reach(site, path=path)
        except Unavailable as refused:
            raise refusal(refused.detail) from None
        answer = await operation()
        for fault in rest:
            if fault.kind is Kind.DUPLICATE:
                answer = await operation()
            else:
                try:
                    self._do(fault)
                except Unavailable as refused:
                    raise refusal(refused.detail) from None
        return answer

    def delivered(self, reader: str, items: Sequence[Item]) -> list[Item]:
        """Return what a reader of a stream gets, in the order and at the time that the plan says.

        Args:
            reader: its name; what is held back for one goes to no other.
            items: what was claimed now; without any, the site is not reached.
        """
        faults = self._due(Site.DELIVERY) if items else []
        now = time.monotonic()
        waiting = self._late.setdefault(reader, [])
        arrived: list[Item] = list(items)
        for fault in faults:
            self._random.shuffle(arrived)
            if fault.seconds:
                waiting.append((now + fault.seconds, arrived.pop()))
                if not arrived:
                    break
        due = [item for at, item in waiting if at <= now]
        self._late[reader] = [(at, item) for at, item in waiting if at > now]
        return [*arrived, *due]  # type: ignore[list-item]

    def each_slice(self, site: Site, slices: Iterable[Item]) -> Iterator[Item]:
        """Return slices one by one, reaching the site before each."""
        for number, piece in enumerate(slices):
            self.hit(site, slices=number)
            yield piece

    def skew_seconds(self) -> float:
        """How far off the wall clock is now."""
        for armed in self._by_site.get(Site.CLOCK, ()):
            if armed.number not in self._skews and armed.is_due():
                self._skews[armed.number] = armed.fault.seconds or 0.0
        return sum(self._skews.values())

    def _due(self, site: Site, *, slices: int | None = None, path: str = "") -> list[Fault]:
        due = []
        for armed in self._by_site.get(site, ()):
            fault = armed.fault
            if fault.slices is not None and fault.slices != slices:
                continue
            if fault.path is not None and not path.startswith(fault.path):
                continue
            if armed.is_due():
                log.warning("injected fault", extra={"number": armed.number, "site": site.value, "kind": fault.kind})
                due.append(fault)
        return due

    def _do(self, fault: Fault) -> None:
        if fault.kind is Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is Kind.STALL:
            # Of purpose not a pause of this task alone: nothing in the process continues.
            time.sleep(fault.seconds or 0)
        elif fault.kind is Kind.REFUSE:
            raise Unavailable(f"injected fault at {fault.site}")
