"""One run that meets every kind of injected fault, and the death of every kind of process of ours.

Each happens, and at the end everything was trained exactly once.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.faults.sites import Kind
from tests.faults.test_kill import ids_of, patiently, until_completed, watch_balance
from tests.fleet import FLOTILLA, ROOT, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

STEPS = 24
COMPLETED_SECONDS = 450
"""On a machine with much else to do; a fifth of it on one that is free."""
FAULTS = (
    "streams.forward kill in=rollout nth=9 phase=after times=1",
    "streams.commit kill in=trainer-worker nth=3 phase=before times=1",
    "client.call kill in=trainer nth=10 times=1",
    "engine.step kill in=engine nth=100 times=1",
    "reward.score kill in=reward nth=20 times=1",
    "http.request kill in=gateway path=/v1/experiments/ nth=100 times=1",
    "engine.step stall in=engine nth=60 seconds=6 times=1",
    "http.request slow in=gateway probability=0.05 seed=1 seconds=0.2 times=10",
    "http.request refuse in=gateway probability=0.05 seed=2 times=10",
    "http.request half_open in=gateway path=/v1/services/ nth=30 times=1",
    "client.call duplicate in=trainer-worker probability=0.3 seed=3 times=10",
    "client.call refuse in=rollout probability=0.1 seed=4 phase=after times=5",
    "weights.send partial slices=0 nth=4 times=1",
    "weights.receive kill slices=0 nth=3 times=1",
    "weights.image disk_full in=rollout times=1",
    "checkpoint.write disk_full in=trainer-worker nth=2 times=1",
    "streams.delivery reorder probability=0.2 seed=5 seconds=0.5 times=10",
    "streams.forward duplicate probability=0.2 seed=6 times=10",
    "streams.plan refuse in=trainer-worker probability=0.2 seed=7 phase=after times=5",
    "reward.score refuse in=reward probability=0.1 seed=8 times=5",
    "clock.now skew in=gateway after_seconds=4 seconds=-7200 times=1",
)


@pytest.mark.long
def test_a_service_with_a_bad_plan_does_not_start(tmp_path: Path) -> None:
    """Said by the process that was asked to start, and it is the whole fleet's end."""
    import os
    import subprocess

    ended = subprocess.run(
        [*FLOTILLA, "up", "--data", str(tmp_path / "fleet"), "--port", "0", "--no-sandbox"],
        cwd=ROOT,
        env={**os.environ, "FLOTILLA_REDIS_URL": "", "FLOTILLA_FAULTS": "engine.stop kill"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert ended.returncode != 0
    assert "no site 'engine.stop'; did you mean engine.step?" in ended.stdout + ended.stderr


OF_A_PROOF = {Kind.FLIP, Kind.HALF, Kind.KEEP}
"""What an engine does to its weights: tests/integration/engine/test_proof.py."""


async def test_a_run_survives_every_kind_of_fault(tmp_path: Path) -> None:
    spec = make_experiment(
        tmp_path,
        optimisation={"steps": STEPS},
        checkpoint={"every_steps": 5},
        asynchrony={"publication": {"transport": "gloo", "wire_dtype": "bfloat16"}},
    )
    marks = tmp_path / "marks"
    plan = "; ".join([f"marks={marks}", *FAULTS])
    assert {fault.kind for fault in parse_plan(plan).faults} == set(Kind) - OF_A_PROOF
    with running_fleet(tmp_path / "fleet", rollouts=2, FLOTILLA_FAULTS=plan) as fleet:
        async with fleet.client() as client:
            view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
            await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
            balanced: list[bool] = []
            watching = asyncio.create_task(watch_balance(client, view["id"], balanced))
            await until_completed(client, view["id"], COMPLETED_SECONDS)
            watching.cancel()
            ledger = (await patiently(client, f"/v1/experiments/{view['id']}/ledger"))["train"]
            checkpoint = (await patiently(client, f"/v1/experiments/{view['id']}/checkpoints"))["items"][-1]
            publications = await patiently(client, f"/v1/experiments/{view['id']}/publications")
            plans = [await patiently(client, f"/v1/experiments/{view['id']}/steps/{n}") for n in range(1, STEPS + 1)]

    happened = {int(mark.name.partition("-")[0]) for mark in marks.iterdir()}
    assert [FAULTS[number - 1] for number in range(1, len(FAULTS) + 1) if number not in happened] == []
    assert len(balanced) > 50 and all(balanced)
    assert {member["transport"] for each in publications["items"] for member in each["members"]} == {"gloo"}
    trained = Counter(group for plan in plans for group in plan["group_ids"])
    assert max(trained.values()) == 1
    assert len(trained) == ledger["trained"] == STEPS * spec["optimisation"]["groups_per_mini_batch"]
    assert ledger["balanced"] and ledger["outstanding"] == ledger["planned"] == 0
    state = json.loads((Path(checkpoint["path"]) / "state.json").read_text())
    assert ids_of(state["trained"]) == set(trained)
