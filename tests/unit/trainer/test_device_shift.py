"""A worker uses the device in its shift, releases it when that has ended, and is never without an owner half-way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flotilla.services.trainer.worker.device_shift import DeviceShift, always_held
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import DeviceOrder, DeviceReport, Failure


class Rig:
    def __init__(self) -> None:
        self.moves: list[str] = []
        self.refusals: list[Exception] = []
        self.failures: list[Failure | None] = []
        self.device = DeviceShift(self._offload, self._reload, lambda: None, self.failures.append)

    async def _offload(self) -> None:
        await self._move("off")

    async def _reload(self) -> None:
        await self._move("on")

    async def _move(self, what: str) -> None:
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop()
        self.moves.append(what)

    def order(self, shift: int, *, may_hold: bool) -> None:
        self.device.take(DeviceOrder(shift=shift, may_hold=may_hold))

    async def until(self, report: DeviceReport) -> None:
        async with asyncio.timeout(2):
            while self.device.report() != report:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def a_rig() -> AsyncIterator[Rig]:
    rig = Rig()
    running = asyncio.create_task(rig.device.run())
    yield rig
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def report(shift: int, *, held: bool, wanted: bool = False) -> DeviceReport:
    return DeviceReport(shift=shift, is_held=held, is_wanted=wanted)


async def test_nothing_moves_without_an_order() -> None:
    device = always_held()

    async with device.in_use():
        assert device.report() is None


async def test_what_is_in_use_is_released_afterwards_and_taken_again_in_its_shift() -> None:
    async with a_rig() as rig:
        async with rig.device.in_use():
            rig.order(2, may_hold=False)
            await rig.until(report(2, held=True, wanted=True))
            assert rig.moves == []
        await rig.until(report(2, held=False))

        using = asyncio.create_task(rig.device.acquire())
        await rig.until(report(2, held=False, wanted=True))
        rig.order(3, may_hold=False)
        await rig.until(report(3, held=False, wanted=True))
        assert not using.done()
        rig.order(3, may_hold=True)
        await using

        assert rig.moves == ["off", "on"]
        await rig.until(report(3, held=True, wanted=True))


async def test_an_order_that_is_withdrawn_moves_nothing_twice() -> None:
    async with a_rig() as rig:
        rig.order(2, may_hold=False)
        await rig.until(report(2, held=False))

        rig.order(3, may_hold=True)
        rig.order(4, may_hold=False)
        await rig.until(report(4, held=False))

        assert rig.moves == ["off"]


async def test_who_no_longer_waits_wants_nothing() -> None:
    async with a_rig() as rig:
        rig.order(2, may_hold=False)
        await rig.until(report(2, held=False))
        waiting = asyncio.create_task(rig.device.acquire())
        await rig.until(report(2, held=False, wanted=True))

        waiting.cancel()

        await rig.until(report(2, held=False))


async def test_a_full_disk_is_named_and_the_release_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.worker.device_shift.RETRY_SECONDS", 0.001)
    async with a_rig() as rig:
        rig.refusals = [Unavailable("no room")]

        rig.order(2, may_hold=False)
        await rig.until(report(2, held=False))

        assert [failure and failure.cause for failure in rig.failures] == ["no room", None]


async def test_it_is_measured_how_long_others_had_the_device_and_how_long_it_was_waited_for() -> None:
    async with a_rig() as rig:
        async with rig.device.in_use():
            pass
        lent, back = rig.device.take_seconds()
        assert lent == 0.0 and back < 1.0

        rig.order(2, may_hold=False)
        await rig.until(report(2, held=False))
        using = asyncio.create_task(rig.device.acquire())
        await rig.until(report(2, held=False, wanted=True))
        rig.order(3, may_hold=True)
        await using

        lent, back = rig.device.take_seconds()
        assert lent > 0.0 and back > 0.0
        assert rig.device.take_seconds() == (0.0, 0.0)
