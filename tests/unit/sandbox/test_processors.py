"""Shares of the processors, on files as the kernel shows them."""

import asyncio
from pathlib import Path

import pytest

from flotilla.services.sandbox import processors
from flotilla.services.sandbox.limits import longest_seconds
from flotilla.services.sandbox.processors import ProcessorGroups
from flotilla.services.sandbox.spare_time import PART, SAVED_SECONDS, Allowances, SpareTime
from flotilla.shared.host.control_groups import Mounts


def mounts_in(root: Path, *controllers: str) -> Mounts:
    for name in controllers:
        (root / name).mkdir()
    return Mounts({name: root / name for name in controllers}, None)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """What others use of two processors."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.busy = 0.0
        self.spare = SpareTime(2, least=0.05, now=self.clock, busy=lambda: self.busy, own=lambda: 0.0)

    def go_on(self, seconds: float, *, others: float) -> None:
        """Let others use a part of it for so long."""
        self.clock.now += seconds
        self.busy += 2 * others * seconds


def test_a_slot_has_a_weight_and_a_quota(tmp_path: Path) -> None:
    mounts = mounts_in(tmp_path, "cpu", "cpuacct")

    groups = ProcessorGroups.find(mounts, shares=128, processors=1.5, spare=Machine().spare)
    assert groups is not None
    group = groups.create("slot")

    assert (tmp_path / "cpu/slot/cpu.shares").read_text() == "1024"
    assert (tmp_path / "cpu/slot/cpu.cfs_quota_us").read_text() == "150000"
    assert group.entrances() == [tmp_path / "cpu/slot/tasks", tmp_path / "cpuacct/slot/tasks"]


def test_a_service_without_the_controller_makes_none(tmp_path: Path) -> None:
    assert ProcessorGroups.find(mounts_in(tmp_path, "memory"), shares=128, processors=1, spare=Machine().spare) is None


def test_a_caller_has_a_part_of_the_machine_and_saves_some_of_it() -> None:
    clock = Clock()
    allowances = Allowances(2.0, clock)
    most = 2.0 * PART * SAVED_SECONDS

    allowances.use("flood", most + 0.3)
    spent = allowances.left("flood")
    clock.now += 2.0
    later = allowances.left("flood")
    clock.now += 3600.0

    assert spent == pytest.approx(-0.3)
    assert later == pytest.approx(-0.3 + 2.0 * 2.0 * PART)
    assert allowances.left("flood") == allowances.left("another") == most


class Cell:
    """A group on files, and what its programs use."""

    def __init__(self, root: Path) -> None:
        self.machine = Machine()
        groups = ProcessorGroups.find(
            mounts_in(root, "cpu", "cpuacct"), shares=64, processors=1, spare=self.machine.spare
        )
        assert groups is not None
        self.usage = root / "cpuacct/slot/cpuacct.usage"
        self.weight = root / "cpu/slot/cpu.shares"
        self.quota = root / "cpu/slot/cpu.cfs_quota_us"
        self.group = groups.create("slot")
        self.group.allowances = Allowances(2.0, self.machine.clock)
        self.group.now = self.machine.clock
        self.usage.write_text("7000000000")

    def weight_now(self) -> int:
        """Read the group's weight."""
        return int(self.weight.read_text())

    async def use(self, seconds: float) -> int:
        """Let a program use so much more; returns its weight when that was seen."""
        self.machine.busy += seconds
        self.usage.write_text(str(int(self.usage.read_text()) + int(seconds * 1e9)))
        for _ in range(5):
            await asyncio.sleep(0)
        return self.weight_now()


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cell:
    monkeypatch.setattr(processors, "LOOK_SECONDS", 0.0)
    return Cell(tmp_path)


@pytest.mark.parametrize(("used_seconds", "shares"), [(0.2, 512), (0.3, 16)])
async def test_a_program_that_takes_long_gives_way_until_it_ends(cell: Cell, used_seconds: float, shares: int) -> None:
    with cell.group.used_by("someone"):
        assert await cell.use(0.0) == 512
        assert await cell.use(used_seconds) == shares

    assert int(cell.weight.read_text()) == 512


async def test_who_has_used_much_gives_way_to_who_has_not(cell: Cell) -> None:
    for _ in range(300):
        with cell.group.used_by("flood"):
            await cell.use(0.1)

    with cell.group.used_by("flood"):
        assert await cell.use(0.0) == 16
    with cell.group.used_by("honest"):
        assert await cell.use(0.1) == 512


async def test_a_program_of_who_has_used_much_has_its_moments(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "LOW_SECONDS", 0.0)
    monkeypatch.setattr(processors, "RAISED_SECONDS", 0.0)
    cell.group.allowances.use("flood", 100.0)

    with cell.group.used_by("flood"):
        weights = set()
        for _ in range(9):
            await asyncio.sleep(0)
            weights.add(cell.weight_now())

    assert weights == {16, 64}


async def test_a_long_program_takes_nothing_from_the_short_ones_of_its_caller(cell: Cell) -> None:
    with cell.group.used_by("someone"):
        await cell.use(0.3)
        assert await cell.use(1000.0) == 16

    with cell.group.used_by("someone"):
        assert await cell.use(0.0) == 512


async def test_a_long_program_has_weight_until_it_gets_its_time_before_it_is_given_up(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "LONG_LOW_SECONDS", 0.0)
    monkeypatch.setattr(processors, "RAISED_SECONDS", 0.0)
    limit_seconds, used_seconds, weights = 10.0, 0.3, set()

    with cell.group.used_by("someone"):
        await cell.use(used_seconds)
        for _ in range(int(2 * longest_seconds(limit_seconds))):
            cell.machine.clock.now += 0.5  # others use all of it: it gets what its weight wins
            gets = 0.1 if cell.weight_now() == 512 else 0.0
            used_seconds += gets
            await cell.use(gets)
            weights.add(cell.weight_now())

    assert used_seconds >= limit_seconds
    assert used_seconds <= 0.2 * longest_seconds(limit_seconds)
    assert {16, 512} <= weights


@pytest.mark.parametrize("is_bounded", [False, True])
async def test_a_program_that_falls_behind_has_weight_unless_its_caller_is_bounded(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    monkeypatch.setattr(processors, "LONG_LOW_SECONDS", 0.0)
    monkeypatch.setattr(processors, "RAISED_SECONDS", 0.0)
    monkeypatch.setattr(SpareTime, "is_bounded", lambda *_: is_bounded)

    with cell.group.used_by("someone"):
        at_first = await cell.use(0.3)
        cell.machine.clock.now += 10.0
        weights = {await cell.use(0.0) for _ in range(3)}

    assert at_first != 512
    assert (512 in weights) is not is_bounded


async def test_a_long_program_is_idle_where_the_kernel_knows_that(cell: Cell) -> None:
    idle = cell.weight.with_name("cpu.idle")
    idle.write_text("0")

    with cell.group.used_by("someone"):
        await cell.use(0.3)
        during = idle.read_text()

    assert (during, idle.read_text(), cell.weight.read_text()) == ("1", "0", "512")


async def test_who_has_used_much_is_bounded_while_others_want_the_machine_and_what_follows_is_not(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "LONG_LOW_SECONDS", 0.0)
    monkeypatch.setattr(processors, "RAISED_SECONDS", 0.0)
    quotas = []
    with cell.group.used_by("flood") as over:
        for _ in range(4):
            cell.machine.go_on(1.0, others=0.8)
            await cell.use(0.6)
            quotas.append(int(cell.quota.read_text()))
        over()
        quotas.append(int(cell.quota.read_text()))
    after = int(cell.quota.read_text())

    assert quotas[0] == 100_000
    assert quotas[-2:] == [15_000, 15_000], "also while what it has left is taken apart"
    assert after == 100_000


async def test_who_has_used_much_of_an_idle_machine_is_not_bounded(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "LONG_LOW_SECONDS", 0.0)
    monkeypatch.setattr(processors, "RAISED_SECONDS", 0.0)
    with cell.group.used_by("flood"):
        for _ in range(10):
            cell.machine.go_on(1.0, others=0.2)
            await cell.use(0.9)

    assert int(cell.quota.read_text()) == 100_000


def test_what_is_used_outside_of_a_group_because_of_a_program_is_its_callers_use(tmp_path: Path) -> None:
    machine = Machine()
    groups = ProcessorGroups.find(mounts_in(tmp_path, "cpu", "cpuacct"), shares=128, processors=1, spare=machine.spare)
    assert groups is not None
    group = groups.create("slot")

    group.charge("who", 0.5)

    assert group.allowances.left("another") - group.allowances.left("who") == pytest.approx(0.5, abs=0.05)
