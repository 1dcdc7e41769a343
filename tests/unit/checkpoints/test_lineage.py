"""What is true after a loss: decided from what each store says, for any store that came back older."""

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.shared.checkpoints.lineage import (
    INITIAL,
    PlannedStep,
    Published,
    Standing,
    Takeover,
    VersionLine,
    follow,
    reconcile,
    split_plans,
)
from flotilla.shared.streams.intervals import IntervalSet


def a_line(*points: tuple[int, int], every: int = 1, total: int = 100) -> VersionLine:
    return VersionLine.of([Published(*point) for point in points], steps_per_version=every, total_steps=total)


def test_versions_follow_steps_until_something_is_lost() -> None:
    line = a_line((0, 0), every=4, total=10)

    assert [line.at(step) for step in range(11)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    assert [step for step in range(11) if line.is_published(step)] == [0, 4, 8, 10]


def test_a_line_goes_on_from_its_newest_point() -> None:
    line = a_line((1, 4), (7, 6), every=4, total=20)

    assert [line.at(step) for step in (4, 5, 6, 9, 10, 14, 18, 19, 20)] == [1, 1, 7, 7, 8, 9, 10, 10, 11]
    assert [step for step in range(4, 21) if line.is_published(step)] == [4, 6, 10, 14, 18, 20]


def test_lost_versions_make_no_token_older() -> None:
    line = a_line((30, 30), (33, 30))

    assert [line.is_lost(version) for version in (30, 31, 32, 33, 34)] == [False, True, True, False, False]
    assert (line.lag(33, 30), line.lag(34, 30), line.lag(30, 29), line.lag(30, 31)) == (1, 2, 1, 0)
    assert (line.oldest_allowed(34, 1), line.oldest_allowed(34, 2), line.oldest_allowed(34, 3)) == (33, 30, 29)
    assert line.oldest_allowed(34, 0) == 34


def test_what_was_lost_before_the_checkpoint_stays_lost() -> None:
    kept = VersionLine.of([Published(9, 5)], steps_per_version=1, total_steps=9, lost=IntervalSet([6, 7]))

    assert kept.lag(9, 5) == 2


CHECKPOINT = Published(30, 30)
PLANS = (PlannedStep(31, 30), PlannedStep(32, 31))


@pytest.mark.parametrize(
    ("standing", "committed", "newest", "decided"),
    [
        pytest.param(Standing(0, INITIAL), INITIAL, 0, Takeover((INITIAL,), 0), id="the beginning"),
        pytest.param(
            Standing(30, CHECKPOINT, PLANS, 32),
            Published(32, 32),
            32,
            Takeover((CHECKPOINT, Published(31, 31)), 32),
            id="a crash: everything is replayed, and nothing is lost",
        ),
        pytest.param(
            Standing(30, CHECKPOINT, (), 29),
            Published(32, 32),
            32,
            Takeover((CHECKPOINT, Published(33, 30)), 30, 32),
            id="the log of the data plane lost its tail",
        ),
        pytest.param(
            Standing(30, CHECKPOINT, PLANS[:1], 31),
            Published(32, 32),
            32,
            Takeover((CHECKPOINT, Published(33, 31)), 31, 32),
            id="it lost one plan of two: the other is replayed first",
        ),
        pytest.param(
            Standing(25, Published(25, 25), PLANS, 32),
            Published(32, 32),
            33,
            Takeover((Published(25, 25), Published(34, 25)), 25, 33),
            id="the newest checkpoint is gone, and an aborted number stays used",
        ),
        pytest.param(
            Standing(0, INITIAL, PLANS, 32),
            Published(32, 32),
            32,
            Takeover((INITIAL, Published(33, 0)), 0, 32),
            id="every checkpoint is gone",
        ),
        pytest.param(
            Standing(30, CHECKPOINT, PLANS, 32),
            Published(28, 28),
            28,
            Takeover((CHECKPOINT, Published(31, 31)), 32),
            id="the database is older: what it forgot is published again as it was",
        ),
        pytest.param(
            Standing(30, CHECKPOINT, (PlannedStep(31, 33),), 33),
            Published(32, 32),
            32,
            Takeover((CHECKPOINT, Published(33, 30)), 31),
            id="the database forgot a rollback: the plans know its number",
        ),
        pytest.param(
            Standing(30, CHECKPOINT),
            Published(33, 30),
            33,
            Takeover((CHECKPOINT, Published(34, 30)), 30, 33),
            id="a crash after a rollback, before anything was planned: nothing says whose weights the number was",
        ),
        pytest.param(
            Standing(30, CHECKPOINT, (PlannedStep(31, 33),), 33),
            Published(34, 31),
            34,
            Takeover((CHECKPOINT, Published(33, 30)), 31),
            id="a crash after a rollback, before the next checkpoint",
        ),
        pytest.param(
            Standing(0, INITIAL, (), 1),
            INITIAL,
            0,
            Takeover((INITIAL, Published(2, 0)), 0, 1),
            id="database and checkpoints are gone: the data plane knows that a number was used",
        ),
        pytest.param(
            Standing(31, Published(31, 31), (PlannedStep(32, 31),), 31),
            Published(31, 31),
            32,
            Takeover((Published(31, 31),), 32),
            id="a crash while a version was announced: it is announced again",
        ),
        pytest.param(
            Standing(6, Published(1, 4), (PlannedStep(7, 1),), 1),
            Published(1, 4),
            1,
            Takeover((Published(1, 4), Published(2, 7)), 7),
            id="a checkpoint between two versions: the older one cannot be given any more",
        ),
    ],
)
def test_what_is_true_after_a_trainer_took_over(
    standing: Standing, committed: Published, newest: int, decided: Takeover
) -> None:
    steps_per_version = 4 if standing.step == 6 else 1

    found = reconcile(standing, committed, newest, steps_per_version=steps_per_version, total_steps=100)

    assert found == decided


def test_plans_that_do_not_continue_the_checkpoint_are_given_up() -> None:
    plans = tuple(PlannedStep(*plan) for plan in ((3, 3), (5, 4), (6, 5), (8, 7), (9, 8)))

    kept, others = split_plans(Standing(4, Published(4, 4), plans))

    assert [plan.step for plan in kept] == [5, 6]
    assert [plan.step for plan in others] == [8, 9]
    assert [plan.step for plan in split_plans(Standing(4, Published(6, 4), plans))[0]] == []


def test_a_plan_of_another_lineage_is_given_up() -> None:
    first, second = follow("", 1, [0, 1]), follow("", 1, [1, 0])
    plan = PlannedStep(2, 1, first, follow(first, 2, [5]))

    assert split_plans(Standing(1, Published(1, 1), (plan,), lineage=first)) == ([plan], [])
    assert split_plans(Standing(1, Published(1, 1), (plan,), lineage=second)) == ([], [plan])
    assert split_plans(Standing(1, Published(1, 1), (plan,))) == ([plan], []), "of an earlier release, unknown"


Weights = tuple[int, ...]
"""Stands for weights: the groups that made them, in order."""


@dataclass
class Sql:
    """What the control plane remembers."""

    committed: Published = INITIAL
    newest: int = 0


@dataclass
class Redis:
    """What the data plane remembers. ``next_group`` is what the feeder issues next."""

    plans: dict[int, tuple[int, Weights, Weights]] = field(default_factory=dict)
    published: int = 0
    next_group: int = 0


@dataclass
class Disk:
    """The checkpoints: step, the newest version then, weights, numbers lost before."""

    checkpoints: list[tuple[int, Published, Weights, IntervalSet]] = field(default_factory=list)


class Machine:
    """A trainer and its three stores, each of which may be put back to an earlier copy; rollouts are the fourth."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.sql, self.redis, self.disk, self.serving = Sql(), Redis(), Disk(), 0
        self.names: dict[int, Weights] = {0: ()}
        self.step, self.weights = 0, ()
        self.take_over()

    def take_over(self) -> None:
        """Come back from what the stores say, as a trainer does."""
        step, published, self.weights, lost = max(self.disk.checkpoints, default=(0, INITIAL, (), IntervalSet()))
        plans = tuple(
            PlannedStep(step, version, str(parent), str((*parent, *groups)))
            for step, (version, parent, groups) in self.redis.plans.items()
        )
        known = max([self.redis.published, *(plan.version for plan in plans)])
        standing = Standing(step, published, plans, known, str(self.weights))
        kept, others = split_plans(standing)
        for plan in others:
            del self.redis.plans[plan.step]
        decision = reconcile(
            standing,
            self.sql.committed,
            max(self.sql.newest, self.serving),
            steps_per_version=self.every,
            total_steps=10**6,
        )
        self.line = VersionLine.of(decision.points, steps_per_version=self.every, total_steps=10**6, lost=lost)
        current = self.line.published_at(decision.end_step)
        assert current.step >= step, "the trainer can give the weights of the current version"
        assert current.version >= max(self.sql.committed.version, self.serving), "no rollout waits for another"
        self.step = step
        self.publish()
        for plan in kept:
            self.train(self.redis.plans[plan.step][2])
            assert self.line.at(plan.step - 1) == plan.version, "a replayed step trains what it trained"

    def publish(self) -> None:
        """Announce the weights, if they are a version; rollouts and the database take up what is newer."""
        if not self.line.is_published(self.step) or not self.line.at(self.step):
            return
        version = self.line.at(self.step)
        assert self.names.setdefault(version, self.weights) == self.weights, "a number names one set of weights"
        if version > self.sql.committed.version:
            self.sql = Sql(Published(version, self.step), max(version, self.sql.newest))
            self.redis.published = max(version, self.redis.published)
            self.serving = max(version, self.serving)

    def train(self, groups: Weights) -> None:
        """Make a step of these groups."""
        assert not set(groups) & set(self.weights), "nothing is trained twice"
        self.weights += groups
        self.step += 1
        self.publish()

    def plan_and_train(self) -> None:
        """Make the next step, of the next group that the lineage has not trained."""
        while self.redis.next_group in self.weights:
            self.redis.next_group += 1
        groups = (self.redis.next_group,)
        self.redis.next_group += 1
        self.redis.plans[self.step + 1] = (self.line.at(self.step), self.weights, groups)
        self.train(groups)

    def checkpoint(self) -> None:
        """Make what was trained durable."""
        published = self.line.published_at(self.step)
        self.disk.checkpoints.append((self.step, published, self.weights, self.line.lost))
        self.redis.plans = {step: plan for step, plan in self.redis.plans.items() if step > self.step}

    def forget(self) -> None:
        """Let numbers that no store and no rollout knows of be as if they had never been."""
        newest = max(self.disk.checkpoints, default=(0, INITIAL, (), None))[1].version
        plans = [version for version, _, _ in self.redis.plans.values()]
        known = max(newest, self.sql.newest, self.redis.published, self.serving, *plans, 0)
        self.names = {version: weights for version, weights in self.names.items() if version <= known}


STORES = ("sql", "redis", "disk", "serving")


@settings(max_examples=300, deadline=None)
@given(
    every=st.integers(1, 3),
    script=st.lists(
        st.one_of(
            st.sampled_from(["train", "train", "train", "checkpoint", "crash"]),
            st.tuples(st.sets(st.sampled_from(STORES), min_size=1), st.integers(0, 30)),
        ),
        max_size=40,
    ),
)
def test_whatever_comes_back_older_training_goes_on(every: int, script: list[str | tuple[set[str], int]]) -> None:
    machine = Machine(every)
    history = {name: [copy.deepcopy(getattr(machine, name))] for name in STORES}
    for event in script:
        if event == "train":
            machine.plan_and_train()
        elif event == "checkpoint":
            machine.checkpoint()
        elif isinstance(event, tuple):
            older, back = event
            for name in older:
                # What came after it is gone: a store comes back at its own past, not at one that it has left.
                del history[name][max(1, len(history[name]) - back) :]
                setattr(machine, name, copy.deepcopy(history[name][-1]))
            machine.forget()
        if event == "crash" or isinstance(event, tuple):
            machine.take_over()
        for name in STORES:
            history[name].append(copy.deepcopy(getattr(machine, name)))
    before = machine.step

    machine.plan_and_train()

    assert machine.step == before + 1
