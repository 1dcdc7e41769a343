"""What a fleet would do: a discrete-event simulation of one experiment. Pure.

The feeder's rule is the gateway's own function over a ledger, joining an engine's batch that of the engine, and what
binds is named by the gateway's diagnosis. In between, work flows at a rate: an engine gives each running answer one
token per step, whose time grows with their number, and all that compute share the cores when these do not suffice.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Final

from flotilla.planning.fleet import Costs, Setup, Simulated, Work
from flotilla.services.gateway.feeder.admission import admitted
from flotilla.services.gateway.monitoring.bottleneck import Look, StepTimes, find_bottleneck
from flotilla.services.rollout.engines.admission import group_sizes
from flotilla.shared.streams.ledger import HopCounts, Ledger


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    number: int
    work: Work
    min_version: int
    asked_at: float = 0.0
    left: int = 0
    tokens: Counter[int] = field(default_factory=Counter)
    """Of its answers, by the version that sampled them."""


class SimulatedEngine:
    """One rollout: groups in progress, answers that wait, answers that run."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.clock = 0.0
        """Tokens that an answer would have that has run from the beginning."""
        self.version = 0
        self.next_version: int | None = None
        self.waiting: deque[tuple[SimulatedGroup, deque[int]]] = deque()
        self.running: list[tuple[float, int, float, SimulatedGroup]] = []
        self.in_hand = 0
        self.idle_since = 0.0
        self.switches: list[tuple[float, int]] = [(0.0, 0)]
        self._entries = itertools.count()

    def admit(self) -> None:
        """Let answers join that have room."""
        ready = list(itertools.takewhile(lambda each: each[0].min_version <= self.version, self.waiting))
        free = self.slots - len(self.running)
        for size in group_sizes([len(lengths) for _, lengths in ready], free, self.slots):
            group, lengths = self.waiting[0]
            for _ in range(size):
                end = self.clock + max(1, lengths.popleft())
                heapq.heappush(self.running, (end, next(self._entries), self.clock, group))
            if not lengths:
                self.waiting.popleft()

    def switch(self) -> bool:
        """Serve the next version."""
        if self.next_version is None:
            return False
        self.version, self.next_version = self.next_version, None
        self.switches.append((self.clock, self.version))
        return True

    def ended(self) -> Iterator[tuple[SimulatedGroup, float]]:
        """Take the answers off that have all their tokens."""
        while self.running and self.running[0][0] <= self.clock + 1e-6:
            end, _, begin, group = heapq.heappop(self.running)
            yield group, end - begin
            self._count(group, begin, end)

    def _count(self, group: SimulatedGroup, begin: float, end: float) -> None:
        upper = end
        for at, version in reversed(self.switches):
            if count := round(upper - max(begin, at)):
                group.tokens[version] += max(0, count)
            upper = min(upper, at)
            if at <= begin:
                break
        if len(self.switches) == 1:
            return
        # What ran at a switch is forgotten with the last answer that did.
        oldest = min((each[2] for each in self.running), default=self.clock)
        while len(self.switches) > 1 and self.switches[1][0] <= oldest:
            del self.switches[0]


FOREVER: Final = 1_000_000
"""Steps of the simulated experiment: its end is not simulated."""
SURPLUS: Final = 1.25
LOOKS_PER_STEP: Final = 7.3
"""No whole number, so that looks fall at all parts of a step."""
MOST_LOOKS: Final = 4096
"""Then every second one is forgotten, and fewer are taken: a step was guessed to be much shorter than it is."""
MOST_EVENTS: Final = 2_000_000
"""Of a simulation: things that happen, timers among them."""


@dataclass(slots=True)
class _StepRecord:
    """What a step took; times in seconds."""

    waited: float
    paced: float
    computed_at: float
    compute: float = 0.0
    published: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    lags: int = 0


class Simulation:
    """One experiment from its beginning.

    Args:
        work: what groups take, in the order in which they are issued; repeated as often as needed.
    """

    def __init__(self, setup: Setup, costs: Costs, work: Sequence[Work]) -> None:
        self._setup, self._costs = setup, costs
        self._work = itertools.cycle(work)
        self._now = 0.0
        self._engines = [SimulatedEngine(setup.slots) for _ in range(setup.rollouts)]
        per_group = sum(len(each.lengths) for each in work) / len(work)
        self._room = max(1, math.ceil(SURPLUS * setup.slots / max(1.0, per_group)))
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._events = 0
        self._issued = 0
        self._fed_at = (-1, 0, 0)
        self._tasks: deque[SimulatedGroup] = deque()
        self._outstanding: dict[int, SimulatedGroup] = {}
        self._sampled = self._being_graded = 0
        """Outstanding groups that are to be sampled or graded, as the ledger counts them."""
        self._generated: deque[SimulatedGroup] = deque()
        self._graded = 0
        self._scored: dict[int, SimulatedGroup] = {}
        self._planned_under: Counter[int] = Counter()
        self._filtered = self._dropped = 0
        self._committed = 0
        self._version = 0
        self._step = 0
        self._compute_left = 0.0
        self._is_computing = False
        self._is_busy = False
        """Whether the trainer does anything but wait for groups."""
        self._publishing = False
        self._waits_to_publish = False
        self._batch: list[SimulatedGroup] = []
        self._waited_since = 0.0
        self._paced_since: float | None = None
        self._records: list[_StepRecord] = []
        self._looks: list[Look] = []
        self._generation: list[tuple[float, float]] = []
        self._idle = self._engine_busy = self._engine_cpu = 0.0
        self._look_seconds = 0.0

    def run(self, steps: int, warmup: int) -> Simulated:
        """Simulate so many steps, and take the means over those after ``warmup``.

        Raises:
            ValueError: nothing can move any more, such as when the budget is smaller than a step, or the steps need
                more than ``MOST_EVENTS``.
        """
        self._look_seconds = self._step_guess() / LOOKS_PER_STEP
        self._later(self._look_seconds, self._look)
        while True:
            while self._settle():
                self._count_event()
            if self._step >= steps:
                return self._means(warmup)
            self._advance()

    def _count_event(self) -> None:
        self._events += 1
        if self._events > MOST_EVENTS:
            raise ValueError(
                f"the simulation comes to no end: {self._step} steps took {MOST_EVENTS} events, as with times that do "
                "not go together, or with very many answers"
            )

    # What is decided at an instant.

    def _settle(self) -> bool:
        moved = self._feed()
        moved |= self._claim()
        for engine in self._engines:
            if engine.next_version is not None and not (self._setup.drains and engine.running):
                moved |= engine.switch()
            if engine.next_version is None:
                engine.admit()
        moved |= self._grade()
        return self._train() or moved

    def _feed(self) -> bool:
        """Issue what is admitted; nothing can be that was not before, unless the numbers of the rule have changed."""
        setup, numbers = self._setup, (self._committed, len(self._outstanding), self._planned_under[self._version])
        if numbers == self._fed_at:
            return False
        count = admitted(
            self._ledger(),
            budget=setup.budget,
            steps=FOREVER,
            groups_per_step=setup.groups_per_step,
        )
        for _ in range(count):
            group = SimulatedGroup(self._issued, next(self._work), self._committed)
            self._tasks.append(group)
            self._outstanding[group.number] = group
            self._issued += 1
        self._sampled += count
        self._fed_at = (self._committed, len(self._outstanding), self._planned_under[self._version])
        return count > 0

    def _claim(self) -> bool:
        """Give tasks to rollouts: who has waited longest takes as many as it has room for."""
        moved = False
        if not self._tasks:
            return moved
        for engine in sorted(self._engines, key=lambda each: (each.in_hand > 0, each.idle_since)):
            while self._tasks and engine.in_hand < self._room:
                group = self._tasks.popleft()
                if not engine.in_hand:
                    self._idle += self._now - engine.idle_since
                engine.in_hand += 1
                self._later(self._costs.claim, partial(self._ask, group, engine))
                moved = True
        return moved

    def _ask(self, group: SimulatedGroup, engine: SimulatedEngine) -> None:
        group.left, group.asked_at = len(group.work.lengths), self._now
        engine.waiting.append((group, deque(group.work.lengths)))

    def _grade(self) -> bool:
        moved = False
        while self._generated and self._graded < self._setup.graders:
            group = self._generated.popleft()
            self._graded += 1
            self._later(group.work.grading_seconds, partial(self._has_grade, group))
            moved = True
        return moved

    def _has_grade(self, group: SimulatedGroup) -> None:
        self._graded -= 1
        self._being_graded -= 1
        if group.work.is_kept:
            self._scored[group.number] = group
        else:
            del self._outstanding[group.number]
            self._filtered += 1

    def _train(self) -> bool:
        if self._is_busy or len(self._scored) < self._setup.groups_per_step or self._drop_stale():
            return False
        if self._awaits_old():
            self._paced_since = self._now if self._paced_since is None else self._paced_since
            return False
        self._is_busy = True
        self._batch = [self._take_scored(number) for number in sorted(self._scored)[: self._setup.groups_per_step]]
        self._planned_under[self._version] += len(self._batch)
        self._later(self._costs.pickup, self._begin_step)
        return True

    def _take_scored(self, number: int) -> SimulatedGroup:
        del self._outstanding[number]
        return self._scored.pop(number)

    def _drop_stale(self) -> bool:
        """Drop groups that are too old; whether then too few are left."""
        if self._setup.max_lag is None:
            return False
        for number, group in list(self._scored.items()):
            if self._version - min(group.tokens, default=group.min_version) > self._setup.max_lag:
                self._take_scored(number)
                self._dropped += 1
        return len(self._scored) < self._setup.groups_per_step

    def _awaits_old(self) -> bool:
        setup = self._setup
        if not setup.paces or not setup.max_lag or (self._step + 1) % setup.steps_per_version:
            return False
        too_old_below = self._version + 1 - setup.max_lag
        if too_old_below <= 0:
            return False
        old = sorted(number for number, each in self._outstanding.items() if each.min_version < too_old_below)
        return any(number not in self._scored for number in old[: setup.groups_per_step])

    def _begin_step(self) -> None:
        tokens = sum(group.work.train_tokens for group in self._batch)
        self._compute_left = self._costs.update + self._costs.token * tokens
        self._is_computing = True
        waited = self._now - self._waited_since
        paced = 0.0 if self._paced_since is None else self._now - self._paced_since
        self._paced_since = None
        self._records.append(_StepRecord(waited=waited, paced=paced, computed_at=self._now))

    def _computed(self) -> None:
        self._is_computing = False
        record = self._records[-1]
        record.compute = self._now - record.computed_at
        trained = self._version
        for group in self._batch:
            for version, count in group.tokens.items():
                record.tokens += count
                record.lags += count * (trained - version)
        if (self._step + 1) % self._setup.steps_per_version:
            self._end_step()
        else:
            self._publish()

    def _publish(self) -> None:
        if self._publishing:
            self._waits_to_publish = True
            return
        self._waits_to_publish, self._publishing = False, True
        self._version += 1
        version = self._version
        self._later(self._costs.publication, partial(self._commit, version))
        self._later(self._costs.publish, self._end_step)

    def _end_step(self) -> None:
        self._records[-1].published = self._now - self._records[-1].computed_at - self._records[-1].compute
        self._later(self._costs.overhead, self._step_is_over)

    def _step_is_over(self) -> None:
        self._step += 1
        self._records[-1].ended_at = self._now
        self._is_busy, self._waited_since = False, self._now

    def _commit(self, version: int) -> None:
        self._committed, self._publishing = version, False
        self._later(self._costs.switch, partial(self._serve, version))
        if self._waits_to_publish:
            self._publish()

    def _serve(self, version: int) -> None:
        for engine in self._engines:
            engine.next_version = version

    # What flows in between.

    def _speed(self) -> tuple[float, int]:
        """Return the share of its full speed at which each computes, and how many engines do."""
        engines = sum(bool(engine.running) for engine in self._engines)
        wanted = engines * self._costs.engine_cores + self._is_computing * self._costs.trainer_cores
        return min(1.0, self._setup.cores / wanted) if wanted else 1.0, engines

    def _advance(self) -> None:
        """Let everything flow until the next thing happens."""
        self._count_event()
        speed, computing = self._speed()
        if len(self._timers) == 1 and not computing and not self._is_computing:
            raise ValueError("nothing can move: the admission budget is smaller than a step")
        rates = [
            speed / (self._costs.tick + self._costs.row * len(engine.running)) if engine.running else 0.0
            for engine in self._engines
        ]
        until = self._timers[0][0] - self._now if self._timers else math.inf
        for engine, rate in zip(self._engines, rates, strict=True):
            if engine.running:
                until = min(until, (engine.running[0][0] - engine.clock) / rate)
        if self._is_computing:
            until = min(until, self._compute_left / speed)
        until = max(0.0, until)
        self._now += until
        self._engine_busy += until * computing
        self._engine_cpu += until * computing * self._costs.engine_cores * speed
        for engine, rate in zip(self._engines, rates, strict=True):
            engine.clock += until * rate
            self._end_answers(engine)
        if self._is_computing:
            self._compute_left -= until * speed
            if self._compute_left <= 1e-9:
                self._computed()
        while self._timers and self._timers[0][0] <= self._now + 1e-12:
            self._count_event()
            heapq.heappop(self._timers)[2]()

    def _end_answers(self, engine: SimulatedEngine) -> None:
        complete: list[SimulatedGroup] = []
        for group, _ in engine.ended():
            group.left -= 1
            if not group.left:
                complete.append(group)
        for group in complete:
            engine.in_hand -= 1
            if not engine.in_hand:
                engine.idle_since = self._now
            self._generation.append((self._now, self._now - group.asked_at))
            self._sampled -= 1
            self._being_graded += 1
            self._later(self._costs.forward, partial(self._generated.append, group))

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now + seconds, next(self._numbers), what))

    # What is seen.

    def _step_guess(self) -> float:
        """Estimate a step's seconds roughly, for how often to look."""
        sample = [next(self._work) for _ in range(self._setup.groups_per_step)]
        longest = max(max(each.lengths) for each in sample)
        computed = self._costs.update + self._costs.token * sum(each.train_tokens for each in sample)
        return max(1e-6, computed + longest * (self._costs.tick + self._costs.row) + self._costs.publication)

    def _ledger(self) -> Ledger:
        waiting = HopCounts.model_construct(tasks=len(self._tasks), generated=0, scored=0)
        claimed = HopCounts.model_construct(
            tasks=self._sampled - len(self._tasks), generated=self._being_graded, scored=len(self._scored)
        )
        return Ledger.model_construct(
            issued=self._issued,
            waiting=waiting,
            claimed=claimed,
            planned=self._planned_under.total(),
            trained=0,
            filtered={"simulated": self._filtered},
            dropped={"stale": self._dropped},
            failed={},
            outstanding=len(self._outstanding),
            consumed_since_publication=sum(
                count for version, count in self._planned_under.items() if version >= self._committed
            ),
        )

    def _look(self) -> None:
        self._looks.append(Look(self._ledger(), 0.0, self._publishing, False))
        if len(self._looks) > MOST_LOOKS:
            self._looks, self._look_seconds = self._looks[::2], self._look_seconds * 2
        self._later(self._look_seconds, self._look)

    def _means(self, warmup: int) -> Simulated:
        records = self._records[warmup : self._step]
        began = self._records[warmup - 1].ended_at if warmup else 0.0
        seconds = (records[-1].ended_at - began) / len(records)
        tokens = sum(each.tokens for each in records)
        share = 1 - warmup / self._step
        looks = self._looks[-max(3, round(len(self._looks) * share)) :]
        times = [
            StepTimes(total=seconds, waited=each.waited, paced=each.paced, published=each.published) for each in records
        ]
        idle = self._idle + sum(self._now - each.idle_since for each in self._engines if not each.in_hand)
        return Simulated(
            step_seconds=seconds,
            tokens_per_second=tokens / (seconds * len(records)),
            lag=sum(each.lags for each in records) / tokens,
            wait=fmean(each.waited for each in records),
            compute=fmean(each.compute for each in records),
            generation=fmean(took for at, took in self._generation if at >= began),
            rollouts_idle=idle / (self._now * len(self._engines)),
            engine_cores=self._engine_cpu / self._engine_busy if self._engine_busy else 0.0,
            binds=find_bottleneck(looks, times, budget=self._setup.budget, groups_per_step=self._setup.groups_per_step),
            ledger=self._ledger(),
        )
