"""Which worker runs which file: xdist's ``loadfile``, but for what it does after a crash and at the end.

xdist 3.8 gives a worker that replaces a crashed one files that are done already, or a single test, and both wait for
ever then; the test that crashed is run again at once, and crashes again. Here it is done, and has failed.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FEWEST_TESTS = 2
"""A worker runs a test when it knows the next one, or that there is none."""
FOLDERS = ("e2e", "faults", "integration", "contract", "unit")
"""Files that take long come first: short ones fill the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FileSchedule(config, log) if config.getoption("dist") == "loadfile" else None


class FileSchedule(LoadFileScheduling):
    """Hands out files in order of their folders, and what is left of a crashed worker's."""

    def schedule(self) -> None:
        if self.collection is None and self._check_nodes_have_same_collection():
            self.collection = sorted(next(iter(self.registered_collections.values())), key=rank)
            for nodeid in self.collection:
                self.workqueue.setdefault(self._split_scope(nodeid), {})[nodeid] = False
        for node in self.nodes:
            self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it has just started
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < FEWEST_TESTS:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()  # after what it has

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        left = {
            scope: {test: False for test, is_done in tests.items() if not is_done} for scope, tests in files.items()
        }
        crashed = next((test for tests in left.values() for test in tests), None)
        if crashed is not None:
            del left[self._split_scope(crashed)][crashed]
        self.workqueue.update({scope: tests for scope, tests in left.items() if tests})
        for other in self.nodes:
            self._reschedule(other)
        return crashed


def rank(nodeid: str) -> int:
    """Rank a test by its folder; the order of tests is kept otherwise."""
    folders = nodeid.partition("::")[0].split("/")
    return next((number for number, folder in enumerate(FOLDERS) if folder in folders), len(FOLDERS))
