import os
from pathlib import Path

import pytest

from services.sandbox.cgroups import ControlGroups, Mounts, read_mounts
from services.sandbox.limits import MEBIBYTE, Limits
from shared.errors import Unavailable

VERSION_1 = """\
35 31 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_mounts_are_read_for_both_versions() -> None:
    mounts = read_mounts(VERSION_1, "8:pids:/\n4:memory:/service/x\n0::/\n")

    assert mounts.controllers["memory"] == Path("/sys/fs/cgroup/memory/service/x")
    assert mounts.controllers["pids"] == Path("/sys/fs/cgroup/pids")
    assert mounts.unified == Path("/sys/fs/cgroup/unified")


def test_a_container_sees_its_part_of_the_hierarchy_as_the_whole() -> None:
    mountinfo = "35 31 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"

    inside = read_mounts(mountinfo, "4:memory:/docker/abc/inner\n")
    outside = read_mounts(mountinfo, "4:memory:/elsewhere\n")

    assert inside.controllers["memory"] == Path("/sys/fs/cgroup/memory/inner")
    assert outside.controllers["memory"] == Path("/sys/fs/cgroup/memory")


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
