"""A trainer that the data plane takes for an earlier one tells the gateway, which appoints it again.

One that the gateway refuses ends when it is told to.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.trainer.checkpoint.manager import Restored
from flotilla.services.trainer.worker.control import RunControl, ToldToEnd
from flotilla.services.trainer.worker.takeover import become_trainer, reconcile_with
from flotilla.shared.checkpoints.lineage import INITIAL
from flotilla.shared.checkpoints.takeover import RefusedIncarnation
from flotilla.shared.errors import ClaimLost, Conflict
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.unit.trainer.builders import a_spec


class Gateway:
    """Keeps what it is told, and refuses a caller that is not its trainer."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.told: list[tuple[str, RefusedIncarnation]] = []

    async def call(self, method: str, path: str, *, body: Any = None, **_: Any) -> None:
        self.told.append((f"{method} {path}", body))
        if self.refuses:
            raise Conflict("another one is")


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_refused_incarnation_is_told_to_the_gateway(refuses: bool) -> None:
    plane, gateway = MemoryDataPlane(), Gateway(refuses=refuses)
    await plane.trainer("before").take_over(2_000_003)

    with pytest.raises(ClaimLost, match="incarnation 2000001 is not newer than 2000003"):
        await become_trainer(plane.trainer("t"), gateway, "e", 2_000_001)

    told = RefusedIncarnation(recorded=2_000_003)
    assert gateway.told == [("POST /v1/experiments/e/takeovers/refused", told)]


async def test_a_newer_incarnation_takes_over() -> None:
    plane, gateway = MemoryDataPlane(), Gateway(refuses=False)
    await plane.trainer("before").take_over(2_000_003)

    await become_trainer(plane.trainer("t"), gateway, "e", 3_000_001)

    assert gateway.told == []


@pytest.mark.parametrize("is_told_before", [True, False])
async def test_a_trainer_that_is_refused_ends_as_soon_as_it_is_told(is_told_before: bool) -> None:
    plane, control = MemoryDataPlane(), RunControl(lambda _: None)
    gateway, queue = Gateway(refuses=True), plane.trainer("t")
    await queue.take_over(1)
    progress = SimpleNamespace(step=0, lineage="", trained=set(), changes=())
    restored = cast(Restored, SimpleNamespace(progress=progress, published=INITIAL))
    asking = reconcile_with(queue, plane.admission, gateway, a_spec(), restored, "e", control)
    if is_told_before:
        control.stop(is_over=True)

    async with asyncio.timeout(0.5):
        taking_over = asyncio.create_task(asking)
        while not gateway.told:
            await asyncio.sleep(0)
        control.stop(is_over=True)
        with pytest.raises(ToldToEnd):
            await taking_over

    assert len(gateway.told) == 1, "it asks no more once it is told"
