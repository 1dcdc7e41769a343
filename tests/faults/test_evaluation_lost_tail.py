"""Redis loses the tail of its log during evaluations: their results are exact, nothing spins, both ledgers balance."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.test_kill import until_completed
from tests.faults.trial import PATIENCE_SECONDS, waited
from tests.fleet import make_experiment
from tests.survival.faults import PROCESSES, Fleet

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(580)]

NUM_ROWS = 20
HELD_FROM = 12
"""Rows from here on wait for their grades, so that the evaluation is under way while the log is cut."""
EVERY_THIRD_IS_RIGHT = sum(row % 3 == 0 for row in range(NUM_ROWS)) / NUM_ROWS
MOST_EVALUATIONS = 8
"""Each of the three begins again once or twice; one that spins begins thousands of times."""
GRADER = '''
"""Held-out rows have labels from 1000 on: every third is right, and late ones wait while there is a file."""
import asyncio
from pathlib import Path

HOLD = Path(__file__).with_name("hold-held-out")


async def score(sample):
    row = int(sample.label) - 1000
    while row >= HELD_FROM and HOLD.exists():
        await asyncio.sleep(0.05)
    return float(row % 3 == 0) if row >= 0 else float(len(sample.response) % 2)
'''.replace("HELD_FROM and", f"{HELD_FROM} and")


def evaluated_experiment(directory: Path) -> tuple[dict[str, Any], Path]:
    """Make an experiment with held-out rows, and the file that holds their grades back."""
    evaluation = {"path": str(directory / "held.jsonl"), "every_versions": 4}
    spec = make_experiment(directory, optimisation={"steps": 8}, checkpoint={"every_steps": 2}, evaluation=evaluation)
    rows = [{"prompt": f"Ana has {n} pens, buys 1.", "answer": str(1000 + n)} for n in range(NUM_ROWS)]
    (directory / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "thirds.py").write_text(GRADER)
    grader = {"kind": "custom", "path": f"{directory / 'thirds.py'}:score", "timeout_seconds": 600}
    spec["reward"] = {"components": [grader]}
    hold = directory / "hold-held-out"
    hold.touch()
    return spec, hold


def log_of(fleet: Fleet) -> Path:
    """Find the file that Redis appends to."""
    logs = (fleet.data / "redis" / "appendonlydir").glob("*.incr.aof")
    return max(logs, key=lambda path: path.stat().st_mtime)


async def lose_tail(fleet: Fleet, size: int) -> None:
    """End Redis alone, and leave so many bytes of its log; everything else lives on, with what it knows."""
    [server] = fleet.running.pids(PROCESSES["redis"])
    owner = fleet.running.process.pid
    os.kill(owner, signal.SIGSTOP)  # it would start the server again at once
    try:
        os.kill(server, signal.SIGKILL)
        await waited(lambda: is_over(server), 30, "the end of Redis")
        os.truncate(log_of(fleet), size)
    finally:
        os.kill(owner, signal.SIGCONT)


async def is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_evaluation(fleet: Fleet, what: str, has: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for a state of the evaluation lane's ledger."""

    async def look() -> dict[str, Any] | None:
        ledgers = await fleet.client.call("GET", f"{fleet.path}/ledger", deadline_seconds=60, attempt_seconds=5)
        ledger: dict[str, Any] = ledgers["evaluation"]
        return ledger if has(ledger) else None

    found: dict[str, Any] = await waited(look, PATIENCE_SECONDS, what, pause_seconds=0.02)
    return found


async def test_evaluations_are_exact_after_the_log_lost_its_tail(tmp_path: Path) -> None:
    spec, hold = evaluated_experiment(tmp_path)
    async with Fleet(tmp_path, rollouts=1, only_kills=True) as fleet:
        await fleet.start(spec)
        # In the first: groups that were counted come back.
        await until_evaluation(fleet, "the first answers", lambda ledger: ledger["trained"] >= 2)
        size = log_of(fleet).stat().st_size
        await until_evaluation(fleet, "the last answers", lambda ledger: ledger["trained"] == HELD_FROM)
        await lose_tail(fleet, size)
        await until_evaluation(fleet, "the answers again", lambda ledger: ledger["trained"] == HELD_FROM)
        size = log_of(fleet).stat().st_size
        hold.unlink()
        # In the second: those of the first come back, and its own tasks were never issued.
        await until_evaluation(fleet, "the end of the first", lambda ledger: ledger["trained"] >= NUM_ROWS)
        hold.touch()
        before = await until_evaluation(fleet, "the second", lambda ledger: ledger["trained"] >= NUM_ROWS + 2)
        await lose_tail(fleet, size)
        hold.unlink()
        await until_completed(fleet.client, fleet.experiment_id)
        ledgers = await fleet.client.call("GET", f"{fleet.path}/ledger")
        query = {"names": "evaluation/accuracy,evaluation/num_scored,evaluation/num_errors", "limit": 100}
        found = (await fleet.client.call("GET", f"{fleet.path}/metrics", params=query))["items"]

    assert before["balanced"]
    for lane in ("train", "evaluation"):
        assert ledgers[lane]["balanced"]
        assert ledgers[lane]["outstanding"] == 0
    values = {(point["name"], point["version"]): point["value"] for point in found}
    assert len(values) == len(found)
    versions = {version for _, version in values}
    assert 0 in versions and len(versions) >= 2
    for version in versions:
        assert values["evaluation/accuracy", version] == pytest.approx(EVERY_THIRD_IS_RIGHT)
        assert values["evaluation/num_scored", version] == NUM_ROWS
        assert values["evaluation/num_errors", version] == 0
    assert ledgers["evaluation"]["issued"] <= MOST_EVALUATIONS * NUM_ROWS
