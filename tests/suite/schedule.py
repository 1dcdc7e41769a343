"""Which worker runs which file: xdist's ``loadfile``, but for whole fleets, and for what it does after a crash.

Fleets come first, by half of the workers, beside all other files; once those are handed out, by all workers. Fleets
whose time is measured come last, each alone. Of each kind the longest file is first, so that short ones fill the end
(``file_seconds``).

xdist 3.8 gives a worker that replaces a crashed one files that are done already, or a single test, and both wait for
ever then; the test that crashed is run again at once, and crashes again. Here it is done, and has failed.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.suite.file_seconds import seconds_of

Files = dict[str, dict[str, bool]]
"""File to the ids of its tests, and whether each is done."""

FEWEST_TESTS = 2
"""A worker runs a test when it knows the next one, or that there is none."""
FOLDERS = ("integration", "contract", "unit")
"""What a file's folder says of how long it takes, where nothing else does."""
FLEETS = ("e2e", "faults")
ALONE = frozenset({"test_membership.py", "test_two_experiments.py"})
"""Files of fleets that must not be slowed by others: seconds are compared in them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FileSchedule(config, log) if config.getoption("dist") == "loadfile" else None


class FileSchedule(LoadFileScheduling):
    """Hands out files: first those that may run side by side, then those that may not."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._sharing: Files = {}
        self._alone: Files = {}
        self._runs_alone: WorkerController | None = None
        """Who runs the files that want the machine for themselves, once that has begun."""

    @property
    def tests_finished(self) -> bool:
        return not self._sharing and not self._alone and super().tests_finished

    @property
    def has_pending(self) -> bool:
        return bool(self._sharing or self._alone) or super().has_pending

    def schedule(self) -> None:
        if self.collection is None and self._check_nodes_have_same_collection():
            self.collection = list(next(iter(self.registered_collections.values())))
            for nodeid in sorted(self.collection, key=rank):
                files = self._alone if is_alone(nodeid) else self._sharing if is_fleet(nodeid) else self.workqueue
                files.setdefault(self._split_scope(nodeid), {})[nodeid] = False
        for node in self.nodes:
            self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections or node.shutting_down:
            return  # it has just started, or ends after what it has
        while self._pending_of(self.assigned_work[node]) < FEWEST_TESTS and self._is_there_work_for(node):
            self._assign_work_unit(node)
        others = [other for other in self.nodes if other is not node and not other.shutting_down]
        is_needed = self._sharing or (self._alone and not others)
        if not is_needed and (not self.workqueue or self._runs_alone not in {None, node}):
            node.shutdown()

    def _is_there_work_for(self, node: WorkerController) -> bool:
        """Whether there is a file for a worker; puts it to the front."""
        num_fleets = sum(self._has_fleet(other) for other in self.nodes if other is not node)
        if self._sharing and (num_fleets < max(1, len(self.nodes) // 2) or not self.workqueue):
            file = next(iter(self._sharing))
            self.workqueue[file] = self._sharing.pop(file)
            self.workqueue.move_to_end(file, last=False)
        elif not self.workqueue and self.nodes == [node] and self._alone:
            self.workqueue.update(self._alone)
            self._alone = {}
            self._runs_alone = node
        if self._runs_alone is not None and self._runs_alone not in self.nodes:
            self._runs_alone = node  # in place of one that has crashed
        return bool(self.workqueue) and self._runs_alone in {None, node}

    def _has_fleet(self, node: WorkerController) -> bool:
        tests = [test for tests in self.assigned_work[node].values() for test, is_done in tests.items() if not is_done]
        return any(map(is_fleet, tests))

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        left = {file: [test for test, is_done in tests.items() if not is_done] for file, tests in files.items()}
        crashed = next((test for tests in left.values() for test in tests), None)
        for file, tests in left.items():
            if tests_left := dict.fromkeys((test for test in tests if test != crashed), False):
                is_shared = is_fleet(tests[0]) and not is_alone(tests[0])
                (self._sharing if is_shared else self.workqueue)[file] = tests_left
        for other in self.nodes:
            self._reschedule(other)
        return crashed


def is_fleet(nodeid: str) -> bool:
    """Whether a test runs a whole fleet: a gigabyte, and more than one core while it starts."""
    return any(folder in FLEETS for folder in folders_of(nodeid))


def is_alone(nodeid: str) -> bool:
    """Whether a test wants the machine for itself."""
    return is_fleet(nodeid) and nodeid.partition("::")[0].rpartition("/")[2] in ALONE


def rank(nodeid: str) -> tuple[int, int]:
    """Rank a test by what its file takes, then by its folder; the order of tests is kept otherwise."""
    folders = folders_of(nodeid)
    folder = next((number for number, folder in enumerate(FOLDERS) if folder in folders), len(FOLDERS))
    return -seconds_of(nodeid), folder


def folders_of(nodeid: str) -> list[str]:
    return nodeid.partition("::")[0].split("/")[:-1]
