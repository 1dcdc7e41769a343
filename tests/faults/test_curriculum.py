"""Rows come from pools by how well they were answered, in a fleet whose gateway is killed under way."""

import asyncio
import json
from pathlib import Path

import pytest

from flotilla.services.trainer.replay.replay import replay
from tests.faults.test_steering import until_step
from tests.fleet import hold_back, make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

NUM_ROWS, STEPS, KILLED_AFTER = 8, 8, 3
GRADER = """
def score(sample):
    return float(int(sample.label) % 4 == 0)
"""
"""Solves the even rows, whatever is answered: their labels are 0, 4, 8 and 12."""
POOLS = [{"name": "unsolved", "below": 0.5}, {"name": "solved", "at_least": 0.5, "weight": 0.0}]


async def test_pools_follow_the_grades_and_are_in_the_checkpoint(tmp_path: Path) -> None:
    spec = make_experiment(
        tmp_path,
        optimisation={"steps": STEPS, "learning_rate": 1e-4},
        asynchrony={"staleness_threshold": 0.0},
        checkpoint={"every_steps": 1, "keep": 9},
    )
    spec["asynchrony"].pop("on_weight_update")
    spec["data"] |= {"max_rows": NUM_ROWS, "curriculum": {"pools": POOLS, "unseen": 99.0}}
    hold = hold_back(spec, tmp_path, after_step=KILLED_AFTER)
    (tmp_path / "even.py").write_text(GRADER)
    spec["reward"]["components"][0]["weight"] = 0.0
    spec["reward"]["components"].append({"kind": "custom", "name": "even", "path": f"{tmp_path / 'even.py'}:score"})
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            made = await client.call("POST", "/v1/experiments", body=spec, params={"start": True}, deadline_seconds=60)
            path = f"/v1/experiments/{made['id']}"
            await until_step(client, path, KILLED_AFTER)
            fleet.kill("flotilla.services.gateway")
            hold.unlink()
            await until_step(client, path, STEPS)
            points = (await client.call("GET", f"{path}/metrics", params={"limit": 1000}))["items"]

    [experiment] = (tmp_path / "fleet" / "experiments").iterdir()
    rows = []
    for step in range(1, STEPS + 1):
        again = await asyncio.to_thread(replay, experiment, step)
        rows += [kept.group.task.row for kept in sorted(again.groups, key=lambda each: each.group.task.group_id)]

    assert set(rows[:NUM_ROWS]) == set(range(NUM_ROWS)), "unseen rows come first, each once"
    assert all(row % 2 for row in rows[-4:]), "solved rows have no weight"
    sizes = [point["value"] for point in points if point["name"] == "curriculum/solved/rows"]
    assert sizes[0] == 0 and sizes[-1] == NUM_ROWS / 2
    state = json.loads((experiment / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())
    known = {row: mean for row, _, mean in state["curriculum"]["rows"]}
    assert known == {row: float(row % 2 == 0) for row in range(NUM_ROWS)}
