"""Random kills of every kind of process, the Redis server among them: nothing lost, nothing trained twice."""

from pathlib import Path

import pytest

from benchmarks.survival import survive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]


async def test_twenty_random_kills_lose_nothing(tmp_path: Path) -> None:
    report = await survive(tmp_path, kills=20, seed=1)

    assert report.is_sound, report.to_dict()
    assert sum(report.faults.values()) == 20
    assert report.looks > 50
