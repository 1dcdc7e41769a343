"""Workers that crash at any time: every test runs once, fleets keep apart, and the run ends."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.suite.file_seconds import BY_DAY, seconds_of
from tests.suite.rotation import missing
from tests.suite.schedule import FileSchedule, is_alone, is_fleet, rank

SIZES = {"unit/a.py": 3, "unit/b.py": 1, "contract/c.py": 2, "e2e/d.py": 1, "e2e/e.py": 2, "faults/f.py": 1}
SIZES |= {"e2e/test_membership.py": 1, "faults/test_two_experiments.py": 2, "faults/test_membership.py": 3}
TESTS = [f"tests/{file}::test_{number}" for file, size in SIZES.items() for number in range(size)]
CRASH_SHARE = 0.15
MOST_CRASHES = 8
MOST_EVENTS = 2000


class Worker:
    """What the schedule sees of a worker: a queue whose first test runs when a second one, or the end, is known."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.queue: list[str] = []
        self.shutting_down = False
        self.is_ready = False
        self.has_collected = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert indices and not self.shutting_down
        self.queue += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def is_running(self) -> bool:
        return len(self.queue) > 1 or (self.shutting_down and bool(self.queue))


class Run:
    """Does what xdist's session does at each event, in an order of chance."""

    def __init__(self, seed: int, num_workers: int) -> None:
        self.random = Random(seed)
        config = SimpleNamespace(getvalue=lambda _: ["popen"] * num_workers)
        self.schedule = FileSchedule(config, log=None)  # type: ignore[arg-type]
        self.workers = [Worker(number) for number in range(num_workers)]
        self.num_started = num_workers
        self.num_crashes = 0
        self.is_ending = False
        self.ended: list[str] = []

    def step(self) -> None:
        worker = self.random.choice(self.workers)
        if not worker.has_collected:
            self._begin(worker)
        elif worker.is_running:
            beside = [each.queue[0] for each in self.workers if each.is_running]
            assert len(beside) == 1 or not any(map(is_alone, beside)), beside
            if self.schedule.workqueue and not self.num_crashes:  # other files wait
                assert sum(map(is_fleet, beside)) <= max(1, self.num_started // 2), beside
            crashes = self.num_crashes < MOST_CRASHES and self.random.random() < CRASH_SHARE
            (self._crash if crashes else self._complete)(worker)
        elif worker.shutting_down:
            self.workers.remove(worker)
            if worker in self.schedule.nodes:
                assert self.schedule.remove_node(worker) is None  # type: ignore[arg-type]
        if self.schedule.tests_finished:
            self.is_ending = True
            for each in self.schedule.nodes:
                each.shutdown()

    def _begin(self, worker: Any) -> None:
        if not worker.is_ready:
            worker.is_ready = True
            if self.is_ending:
                worker.has_collected = True
                worker.shutdown()
            else:
                self.schedule.add_node(worker)
            return
        worker.has_collected = True
        self.schedule.add_node_collection(worker, TESTS)
        if self.schedule.collection_is_completed:
            self.schedule.schedule()

    def _complete(self, worker: Any) -> None:
        self.ended.append(worker.queue.pop(0))
        self.schedule.mark_test_complete(worker, TESTS.index(self.ended[-1]))

    def _crash(self, worker: Any) -> None:
        self.num_crashes += 1
        self.ended.append(worker.queue[0])
        assert self.schedule.remove_node(worker) == worker.queue[0]
        self.workers.remove(worker)
        self.workers.append(Worker(self.num_started))  # type: ignore[arg-type]
        self.num_started += 1
        self.is_ending = False


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_every_test_ends_once_whatever_crashes(num_workers: int) -> None:
    for seed in range(300):
        run = Run(seed, num_workers)
        for _ in range(MOST_EVENTS):
            if not run.workers:
                break
            run.step()

        assert not run.workers, f"seed {seed}: {[(each.queue, each.shutting_down) for each in run.workers]}"
        assert sorted(run.ended) == sorted(TESTS), seed


def test_the_longest_file_is_handed_out_first_and_unknown_ones_by_their_folder() -> None:
    longest = max(BY_DAY, key=seconds_of)
    known = [f"{file}::test" for file in BY_DAY]
    others = ["tests/unit/a.py::test", "tests/pairs/b.py::test", "tests/integration/c.py::test"]

    ordered = sorted([*others, *known], key=rank)

    assert ordered[0] == f"{longest}::test"
    assert ordered[-3:] == ["tests/integration/c.py::test", "tests/unit/a.py::test", "tests/pairs/b.py::test"]
    assert [seconds_of(each) for each in ordered[:-3]] == sorted(map(seconds_of, BY_DAY), reverse=True)


def test_the_long_files_of_a_turn_are_handed_out_before_shorter_ones_by_day() -> None:
    turn = "tests/faults/test_dying_ranks.py::test"
    by_day = [f"{file}::test" for file in BY_DAY if is_fleet(f"{file}::test")]

    assert by_day
    assert min([*by_day, turn], key=rank) == turn


def test_files_whose_seconds_are_known_are_there() -> None:
    assert missing(BY_DAY) == []
