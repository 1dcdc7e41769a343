import os
from pathlib import Path

import pytest

from flotilla.services.sandbox.cgroups import ControlGroups
from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.control_groups import Mounts


def a_unified_tree(root: Path, controllers: str = "cpu memory pids") -> Path:
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text("")
    (root / "cgroup.procs").write_text(str(os.getpid()))
    return root


def test_version_2_is_bounded_by_its_files(tmp_path: Path) -> None:
    groups = ControlGroups.find(Mounts({}, a_unified_tree(tmp_path)))

    group = groups.create("program", Limits(memory_bytes=100 * MEBIBYTE, processes=10))

    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "program" / "memory.max").read_text() == str(132 * MEBIBYTE)
    assert (tmp_path / "program" / "pids.max").read_text() == "15"
    assert group.entrances() == [tmp_path / "program" / "cgroup.procs"]


def test_version_2_counts_the_kernels_kills(tmp_path: Path) -> None:
    group = ControlGroups.find(Mounts({}, a_unified_tree(tmp_path))).create("program", Limits())
    assert group.num_memory_kills() == 0

    (group.memory / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")

    assert group.num_memory_kills() == 2


def test_without_controllers_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"version 2: no memory and no pids controller.*version 1: no memory"):
        ControlGroups.find(Mounts({}, a_unified_tree(tmp_path, controllers="hugetlb")))


def test_version_1_serves_where_version_2_cannot(tmp_path: Path) -> None:
    for name in ("unified", "memory", "pids"):
        (tmp_path / name).mkdir()
    unified = a_unified_tree(tmp_path / "unified", controllers="")
    mounts = Mounts({"memory": tmp_path / "memory", "pids": tmp_path / "pids"}, unified)

    group = ControlGroups.find(mounts).create("program", Limits())

    assert not group.is_unified
    assert group.entrances() == [tmp_path / name / "program" / "tasks" for name in ("memory", "pids")]
    assert (tmp_path / "memory" / "program" / "memory.limit_in_bytes").exists()
    assert (tmp_path / "pids" / "program" / "pids.max").exists()
