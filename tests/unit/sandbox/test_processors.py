"""Shares of the processors, on files as the kernel shows them."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from services.sandbox import processors
from services.sandbox.cgroups import Mounts
from services.sandbox.processors import ProcessorGroups


def mounts_in(root: Path, *controllers: str) -> Mounts:
    for name in controllers:
        (root / name).mkdir()
    return Mounts({name: root / name for name in controllers}, None)


def test_a_slot_has_a_weight_and_a_quota(tmp_path: Path) -> None:
    mounts = mounts_in(tmp_path, "cpu", "cpuacct")

    groups = ProcessorGroups.find(mounts, shares=128, processors=1.5)
    assert groups is not None
    group = groups.create("slot")
    group.add(42)

    assert (tmp_path / "cpu/slot/cpu.shares").read_text() == "128"
    assert (tmp_path / "cpu/slot/cpu.cfs_quota_us").read_text() == "150000"
    assert (tmp_path / "cpu/slot/cgroup.procs").read_text() == "42"
    assert (tmp_path / "cpuacct/slot/cgroup.procs").read_text() == "42"


def test_a_service_without_the_controller_makes_none(tmp_path: Path) -> None:
    assert ProcessorGroups.find(mounts_in(tmp_path, "memory"), shares=128, processors=1) is None


@pytest.mark.parametrize(("used_seconds", "shares"), [(0.4, 128), (0.6, 16)])
async def test_a_program_that_takes_long_gives_way_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_seconds: float, shares: int
) -> None:
    monkeypatch.setattr(processors, "LOOK_SECONDS", 0.0)
    groups = ProcessorGroups.find(mounts_in(tmp_path, "cpu", "cpuacct"), shares=128, processors=1)
    assert groups is not None
    group = groups.create("slot")
    usage, weight = tmp_path / "cpuacct/slot/cpuacct.usage", tmp_path / "cpu/slot/cpu.shares"
    usage.write_text("7000000000")

    watch = asyncio.create_task(group.give_way())
    await asyncio.sleep(0)
    usage.write_text(str(7_000_000_000 + int(used_seconds * 1e9)))
    for _ in range(5):
        await asyncio.sleep(0)
    during = int(weight.read_text())
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch

    assert during == shares
    assert int(weight.read_text()) == 128
