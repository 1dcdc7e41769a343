"""How much of the processors heavy callers get while the machine has other work to do.

To run only where nothing else wants to is not enough: a kernel that is not preemptible interrupts no system call,
so each fork, exit and system call of such a program delays the messages of others. So what these programs use is
bounded too: tightly while others use much of the machine, not at all while they leave most of it. The programs of the
experiment that the sandbox is there for are not bounded: the others are its trainer and rollouts, which wait for them.
Time in which the bound holds a program counts as waiting for a processor, never as the program's own.

How much processor time each caller's programs get before those of others: a part of the machine, not more.

Callers with occasional short programs are served at once; those that flood, with any programs, get what others
leave. Time is counted as it is used, so it does not matter by how many programs or in how many slots.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

PART = 0.04
"""Of the machine's processors: what each caller may use before others."""
SAVED_SECONDS = 10.0
"""A caller that has used nothing has so long a time of its part saved, and none owes more."""
MOST_CALLERS = 1024


class Allowances:
    """Counts what remains for callers.

    Args:
        processors: how many the machine has.
        now: a clock, in seconds.
        part: of them, what each caller may use.
    """

    def __init__(self, processors: float, now: Callable[[], float], *, part: float = PART) -> None:
        self._rate = part * processors
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def left(self, caller: str) -> float:
        """Return the seconds of processor time that a caller has left; negative after a program used more."""
        most = self._rate * SAVED_SECONDS
        seconds, at = self._left.get(caller, (most, 0.0))
        return min(most, seconds + (self._now() - at) * self._rate)

    def use(self, caller: str, seconds: float) -> None:
        """Take what a program of a caller has used."""
        most = self._rate * SAVED_SECONDS
        self._left[caller] = max(-most, self.left(caller) - seconds), self._now()
        self._left.move_to_end(caller)
        while len(self._left) > MOST_CALLERS:
            self._left.popitem(last=False)


ROOMY, SCARCE = 0.25, 0.4
"""Parts of the machine that others use: up to the first there is no bound, from the second on it is tightest."""
SCARCE_PART = 0.06
"""Of the machine's processors: what a caller may use, in the long run, before it is bounded while others want them."""
LEAST_PROCESSORS = 0.15
"""What one program needs to get 10 s of a processor, the usual limit, before its timeout of 70 s."""
LOOK_SECONDS = 0.5
OPENING = 0.2
"""Of what others use less than before, which part is believed at each look; of what they use more, all."""
TICKS_PER_SECOND = 100
"""Of ``/proc/stat``, whatever the kernel's own."""


def busy_seconds(statistics: str) -> float:
    """Read the time that all processors were busy, or taken by the host of this machine.

    Args:
        statistics: ``/proc/stat``.
    """
    user, nice, system, _idle, _waiting, *others = map(int, statistics.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / TICKS_PER_SECOND


def read_busy_seconds() -> float:
    """Read it of this machine."""
    return busy_seconds(Path("/proc/stat").read_text())


def name_caller(token_digest: str, experiment: str) -> str:
    """Name for whom a call is, as far as turns and processor time go: whose token, and for which experiment."""
    return f"{token_digest} {experiment}"


def experiment_of(caller: str) -> str:
    """Read the experiment of a caller's name; empty if it has none."""
    return caller.partition(" ")[2]


class Boundable(Protocol):
    """A group of one program at a time."""

    def count(self) -> None:
        """Report what its program has used since the last time, by ``SpareTime.use``."""

    def bound(self, processors: float | None) -> None:
        """Let it use so much of the processors; None: as much as a slot may."""


class SpareTime:
    """Bounds the programs of callers that have used much.

    Args:
        processors: how many the machine has.
        least: part of the machine that all of them together get while it is busiest; 1: there is no bound.
        now: a clock, in seconds.
        busy: how long all processors were busy so far, in seconds.
        own: how long this service was.
    """

    def __init__(
        self,
        processors: float,
        *,
        least: float,
        now: Callable[[], float],
        busy: Callable[[], float],
        own: Callable[[], float],
    ) -> None:
        self._processors = processors
        self._least = min(1.0, max(least, LEAST_PROCESSORS / processors))
        self._now = now
        self._busy_seconds, self._own_seconds = busy, own
        self._allowances = Allowances(processors, now, part=SCARCE_PART)
        self._looked_at = now()
        self._busy_then = self._busy()
        self._used = 0.0
        self._others = 0.0
        self._running: dict[Boundable, str] = {}
        self._bounded: set[Boundable] = set()
        self.own_experiment: str | None = None
        """Which the sandbox is there for; None if it is there for no one in particular."""

    @property
    def part(self) -> float:
        """Part of the machine that is to spare for callers that have used much."""
        scarcity = min(1.0, max(0.0, (self._others - ROOMY) / (SCARCE - ROOMY)))
        return 1.0 + scarcity * (self._least - 1.0)

    def use(self, caller: str, seconds: float) -> None:
        """Count what a program of a caller has used, however little weight it had."""
        self._used += seconds
        if self.part < 1.0:
            self._allowances.use(caller, seconds)

    def is_bounded(self, caller: str) -> bool:
        """Return whether a caller has used much while there was little to spare, and there still is."""
        is_own = self.own_experiment is not None and experiment_of(caller) == self.own_experiment
        return not is_own and self.part < 1.0 and self._allowances.left(caller) <= 0

    def weigh(self, group: Boundable, caller: str) -> None:
        """Bound a group in which a program of a caller runs, or do not; checks the others now and then."""
        self._running[group] = caller
        if self._look() or (group in self._bounded) is not self.is_bounded(caller):
            self._share()

    def end(self, group: Boundable) -> None:
        """Record that a program is over: the next one in its group is not bounded."""
        self._running.pop(group, None)
        if group in self._bounded:
            self._bounded.discard(group)
            group.bound(None)
            self._share()

    def _busy(self) -> float:
        return self._busy_seconds() - self._own_seconds()

    def _look(self) -> bool:
        """Measure what others use, now and then; returns whether it did."""
        now = self._now()
        elapsed = now - self._looked_at
        if elapsed < LOOK_SECONDS:
            return False
        busy = self._busy()
        for group in list(self._running):
            with suppress(OSError):  # it was removed
                group.count()
        others = max(0.0, busy - self._busy_then - self._used) / (elapsed * self._processors)
        self._others += (others - self._others) * (1.0 if others > self._others else OPENING)
        self._looked_at, self._busy_then, self._used = now, busy, 0.0
        return True

    def _share(self) -> None:
        """Divide what is to spare among the callers that are bounded, and of each among its programs."""
        callers = {caller for caller in self._running.values() if self.is_bounded(caller)}
        programs = Counter(caller for caller in self._running.values() if caller in callers)
        bounded = {group for group, caller in self._running.items() if caller in callers}
        for group in self._bounded - bounded:
            group.bound(None)
        for group in bounded:
            caller = self._running[group]
            group.bound(self.part * self._processors / len(callers) / programs[caller])
        self._bounded = bounded
