"""Where this process's control groups are, in both versions, and what they leave it."""

import math
from pathlib import Path

import psutil
import pytest

from flotilla.shared.host.control_groups import (
    Mounts,
    allowed_cores,
    available_bytes,
    count_memory_kills,
    find_mounts,
    memory_left_in,
    read_mounts,
)

GIB = 1 << 30
VERSION_1 = """\
35 31 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def write(group: Path, **contents: object) -> Path:
    """Write files of a group; a dot of a name is two underscores here."""
    group.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (group / name.replace("__", ".")).write_text(f"{content}\n")
    return group


def in_group(own: Path, *, is_unified: bool) -> Mounts:
    return Mounts({}, own) if is_unified else Mounts({"memory": own, "cpu": own}, None)


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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory__max": "max", "memory__current": 1, "memory__stat": ""}, None),
        ({"memory__max": 4 * GIB, "memory__current": 3 * GIB, "memory__stat": ""}, GIB),
        ({"memory__max": 4 * GIB, "memory__current": 3 * GIB, "memory__stat": f"anon 5\ninactive_file {GIB}"}, 2 * GIB),
        (
            {
                "memory__limit_in_bytes": 6 * GIB,
                "memory__usage_in_bytes": 3 * GIB,
                "memory__stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
            },
            4 * GIB,
        ),
    ],
    ids=["no files", "no limit", "a limit", "files that nobody uses", "version 1"],
)
def test_a_group_leaves_its_limit_less_what_it_cannot_give_back(
    tmp_path: Path, files: dict[str, object], expected: int | None
) -> None:
    assert memory_left_in(write(tmp_path, **files)) == expected


@pytest.mark.parametrize("is_unified", [True, False])
def test_the_groups_above_bound_memory_too(tmp_path: Path, is_unified: bool) -> None:
    limit, use = ("max", "current") if is_unified else ("limit_in_bytes", "usage_in_bytes")
    own = tmp_path / "outer" / "own"
    # Version 1 writes no limit as a number that no machine has.
    for group, most, used in ((own.parent, 5000, 4000), (own, (1 << 63) - 4096, 2000)):
        write(group, **{f"memory__{limit}": most, f"memory__{use}": used, "memory__stat": "anon 7"})

    assert available_bytes(in_group(own, is_unified=is_unified)) == 1000
    write(own, **{f"memory__{limit}": 2500})
    assert available_bytes(in_group(own, is_unified=is_unified)) == 500
    write(own, **{f"memory__{limit}": 1500})
    assert available_bytes(in_group(own, is_unified=is_unified)) == 0


def test_without_groups_the_hosts_memory_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    available = psutil.virtual_memory()._replace(available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)

    assert available_bytes(Mounts({}, None)) == 8 * GIB
    assert 0 < available_bytes() <= 8 * GIB


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        ({"cpu__max": "250000 100000"}, {}, 2.5),
        ({"cpu__max": "max 100000"}, {"cpu__max": "50000 100000"}, 0.5),
        ({"cpu__cfs_quota_us": 150_000, "cpu__cfs_period_us": 100_000}, {}, 1.5),
        (
            {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100_000},
            {"cpu__cfs_quota_us": 300_000, "cpu__cfs_period_us": 100_000},
            3,
        ),
        ({"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100_000}, {}, math.inf),
        ({}, {}, math.inf),
    ],
    ids=["version 2", "the group above", "version 1", "version 1, the group above", "version 1, no limit", "no files"],
)
def test_cores_are_bounded_by_every_group(
    tmp_path: Path, own: dict[str, object], above: dict[str, object], expected: float
) -> None:
    group = write(write(tmp_path / "outer", **above) / "own", **own)

    assert allowed_cores(in_group(group, is_unified="cpu__max" in own)) == expected


@pytest.mark.parametrize(
    ("name", "is_unified"), [("memory__events", True), ("memory__oom_control", False)], ids=["version 2", "version 1"]
)
def test_the_kernels_kills_for_memory_are_counted(tmp_path: Path, name: str, is_unified: bool) -> None:
    group = write(tmp_path / "own", **{name: "under_oom 0\noom_kill 3"})

    assert count_memory_kills(in_group(group, is_unified=is_unified)) == 3
    assert count_memory_kills(in_group(tmp_path / "none", is_unified=is_unified)) == 0


def test_this_processs_groups_are_found() -> None:
    mounts = find_mounts()

    assert mounts.unified is not None or mounts.controllers
    assert all(group.is_dir() for group in (mounts.unified, mounts.controllers.get("memory")) if group is not None)
