"""Random kills of every kind of process, the Redis server among them: nothing lost, nothing trained twice."""

from pathlib import Path

import pytest

from tests.survival.__main__ import survive

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]


# Seed 498 kills one of each of the seven kinds.
@pytest.mark.parametrize(("kills", "seed"), [(7, 498), (40, 2)])
async def test_random_kills_lose_nothing(tmp_path: Path, kills: int, seed: int) -> None:
    report = await survive(tmp_path, kills=kills, seed=seed)

    assert report.is_sound, report.to_dict()
    assert sum(report.faults.values()) == kills
    assert report.looks > 50
