"""Which processes count, and what of their memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.shared.host.own_memory import ProcessMemory, own_bytes

STATUS = "VmHWM:\t 9000 kB\nVmRSS:\t 8000 kB\nRssAnon:\t {} kB\nRssFile:\t 5000 kB\nRssShmem:\t {} kB\n"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def describe(root: Path, pid: int, anonymous: int, *, children: str = "", command: str = "") -> None:
    """Describe a process as Linux does."""
    task = root / str(pid) / "task" / str(pid)
    task.mkdir(parents=True, exist_ok=True)
    (task / "children").write_text(children)
    (root / str(pid) / "status").write_text(STATUS.format(anonymous, 1))
    (root / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    describe(tmp_path, 1, 9, children="2 3 4")
    describe(tmp_path, 2, 99, children="5", command="python -P -m flotilla.services.rollout.engines.process.child")
    describe(tmp_path, 3, 199, command="python -P -m flotilla.services.reward.verifiers.math_worker")
    describe(tmp_path, 4, 299, command="python -m pytest")
    describe(tmp_path, 5, 399, command="python -P -m flotilla.services.reward.verifiers.math_worker")
    return tmp_path


def test_anonymous_and_shared_memory_count_and_mapped_files_do_not() -> None:
    assert own_bytes(STATUS.format(7, 3)) == 10 << 10
    assert own_bytes("") == 0


def test_children_count_by_their_module_and_others_do_not(tree: Path) -> None:
    found = ProcessMemory(root=tree, pid=1).look()

    assert found == {"memory/service": 10 << 10, "memory/engine": 100 << 10, "memory/math_worker": 600 << 10}


def test_a_sandboxs_children_do_not_count(tree: Path) -> None:
    assert ProcessMemory(with_children=False, root=tree, pid=1).look() == {"memory/service": 10 << 10}


def test_a_figure_serves_for_a_while(tree: Path) -> None:
    clock = Clock()
    memory = ProcessMemory(root=tree, pid=1, now=clock)
    before = dict(memory.look())
    describe(tree, 1, 49)

    assert memory.look() == before
    clock.now += 10
    assert memory.look() == {"memory/service": 50 << 10}, "its children are gone with the new list"


def test_nothing_is_told_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert ProcessMemory(root=tmp_path, pid=1).look() == {}


def test_memory_that_this_process_takes_is_seen() -> None:
    before = ProcessMemory().look()["memory/service"]
    taken = bytearray(32 << 20)
    taken[::4096] = b"x" * len(taken[::4096])

    assert ProcessMemory().look()["memory/service"] - before > 24 << 20


def test_a_real_child_that_is_none_of_ours_has_no_name() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = ProcessMemory().look()
        assert child.stdin is not None
        child.stdin.close()

    assert set(found) == {"memory/service"}
