"""Claims that are lost together are one line of the log."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.shared.streams import holding
from flotilla.shared.streams.holding import LostClaims


async def test_claims_that_are_lost_together_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holding, "TOGETHER_SECONDS", 0.01)
    lost = LostClaims("claims were lost")
    entries: list[Any] = [SimpleNamespace(entry_id=f"{number}-0") for number in range(167)]

    with caplog.at_level(logging.INFO):
        for entry in entries:
            lost.add(entry)
        while not caplog.records:
            await asyncio.sleep(0.001)
        lost.add(entries[0])
        while len(caplog.records) < 2:
            await asyncio.sleep(0.001)

    first, second = [vars(record) for record in caplog.records]
    assert (first["msg"], first["claims"], first["first"], first["last"]) == ("claims were lost", 167, "0-0", "166-0")
    assert second["claims"] == 1
