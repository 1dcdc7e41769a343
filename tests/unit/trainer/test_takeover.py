"""A trainer that the data plane takes for an earlier one tells the gateway, which appoints it again."""

from typing import Any

import pytest

from services.trainer.worker.takeover import become_trainer
from shared.errors import ClaimLost, Conflict
from shared.schemas.takeover import RefusedIncarnation
from shared.streams.memory.plane import MemoryDataPlane


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
        await become_trainer(plane.trainer("t"), gateway, "e", "t", 2_000_001)

    told = RefusedIncarnation(service_id="t", recorded=2_000_003)
    assert gateway.told == [("POST /v1/experiments/e/takeovers/refused", told)]


async def test_a_newer_incarnation_takes_over() -> None:
    plane, gateway = MemoryDataPlane(), Gateway(refuses=False)
    await plane.trainer("before").take_over(2_000_003)

    await become_trainer(plane.trainer("t"), gateway, "e", "t", 3_000_001)

    assert gateway.told == []
