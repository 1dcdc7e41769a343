"""A rank of two may die at any point of a step: what is learned is what the ranks learn that nobody kills."""

import asyncio
import time
from pathlib import Path

import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.faults.test_kill import patiently, until_completed
from tests.faults.test_ranks import COMPARED, NAMED_SECONDS, Curve, an_experiment, check_ledger, curve_of, start
from tests.fleet import running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]

POINTS = {
    "early": ("trainer.step kill nth=1", "trainer.snapshot kill nth=2", "checkpoint.copy kill nth=1"),
    "late": ("trainer.step kill nth=6", "trainer.snapshot kill nth=7", "checkpoint.copy kill nth=2"),
}
"""Each ends the job that counts, and the next job counts from its own start."""
WRITING = {"early": ("checkpoint.file kill nth=1",), "late": ("checkpoint.write kill nth=2",)}
"""Likewise, in the leader, while followers train the next step."""
LONG_STEPS = 24
"""So many that a job which goes on after three deaths comes to its second checkpoint."""
RANKS = {"trainer-worker": 0, "trainer-follower": 1}


async def watch_causes(client: GatewayClient, cause: str, seen: list[float]) -> None:
    """Note each time, in seconds since the epoch, at which the trainer begins to name a cause."""
    is_named = False
    while True:
        services = await patiently(client, "/v1/services?kind=trainer")
        failures = [each["observed"].get("failure") or {} for each in services["items"]]
        was_named, is_named = is_named, any(cause in failure.get("cause", "") for failure in failures)
        if is_named and not was_named:
            seen.append(time.time())
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed() -> Curve:
    """Where the first test puts what two ranks learn that nobody kills; a shorter run learns the first steps of it."""
    return {}


@pytest.mark.parametrize("when", ["late", "early"])
@pytest.mark.parametrize("process", list(RANKS))
async def test_a_rank_may_die_at_any_point(tmp_path: Path, process: str, when: str, undisturbed: Curve) -> None:
    marks, named = tmp_path / "marks", list[float]()
    points = POINTS[when] + (WRITING[when] if RANKS[process] == 0 else ())
    faults = [point.replace("kill", f"kill in={process}") + " times=1" for point in points]
    spec = an_experiment(tmp_path, ranks=2)
    long_optimisation = spec["optimisation"] | {"steps": LONG_STEPS}
    if when == "late":
        spec |= {"optimisation": long_optimisation}
    with running_fleet(tmp_path / "fleet", FLOTILLA_FAULTS="; ".join([f"marks={marks}", *faults])) as fleet:
        async with fleet.client() as client:
            experiment = await start(client, spec)
            watching = asyncio.create_task(
                watch_causes(client, f"rank {RANKS[process]} of 2 was ended by SIGKILL", named)
            )
            await until_completed(client, experiment, seconds=400)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await check_ledger(client, experiment, spec)
            found = await curve_of(client, experiment)
            killed = sorted(mark.stat().st_mtime for mark in marks.iterdir())
            if (LONG_STEPS, COMPARED[0]) not in undisturbed:
                # All faults have happened: the experiment again meets none.
                again = await start(client, an_experiment(tmp_path, ranks=2) | {"optimisation": long_optimisation})
                await until_completed(client, again)
                undisturbed |= await curve_of(client, again)

    print(f"{process}, {when}: named after {[round(b - a, 2) for a, b in zip(killed, named, strict=False)]} s")
    assert len(killed) == len(named) == len(points), sorted(each.name for each in marks.iterdir())
    assert all(0 <= name - kill < NAMED_SECONDS for kill, name in zip(killed, named, strict=True))
    expected = {key: value for key, value in undisturbed.items() if key[0] <= spec["optimisation"]["steps"]}
    assert len(expected) == spec["optimisation"]["steps"] * len(COMPARED)
    assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)
