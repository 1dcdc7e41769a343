"""Random ``kill -9`` over every process of a fleet, Redis server included, under a running experiment.

    python -m benchmarks.survival --kills 200 --json report.json

After each kill the run must move on; all the while the ledger is asked whether it balances. At the end every group was
trained exactly once along the surviving lineage, or has a reason why not. Exit code 1 if anything was lost.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.client import GatewayClient
from shared.errors import FlotillaError
from tests.fleet import RunningFleet, make_experiment, running_fleet, until

VICTIMS = {
    "gateway": "services.gateway",
    "rollout": "services.rollout",
    "engine": "services.rollout.engines.worker",
    "reward": "services.reward",
    "trainer": "services.trainer",
    "training process": "services.trainer.worker",
    "redis": "valkey-server",
}
PATIENCE_SECONDS = 150.0
GROUPS_PER_STEP = 4


@dataclass
class Report:
    """What happened.

    Attributes:
        kills: by kind of process.
        recovery_seconds: from a kill to the next step that was done after it, by kind.
        looks: how often the ledger was read while processes died.
        unbalanced: ledgers that did not balance.
        result: the accounting at the end.
    """

    kills: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)
    looks: int = 0
    unbalanced: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Make it JSON; recovery as median and maximum."""
        recovery = {
            kind: {"median": round(sorted(values)[len(values) // 2], 2), "max": round(max(values), 2)}
            for kind, values in sorted(self.recovery_seconds.items())
        }
        return {
            "kills": sum(self.kills.values()),
            "kills_by_kind": dict(sorted(self.kills.items())),
            "recovery_seconds": recovery,
            "ledger_looks": self.looks,
            "unbalanced": self.unbalanced,
            **self.result,
        }


async def survive(directory: Path, *, kills: int, seed: int, rollouts: int = 2, say: bool = True) -> Report:
    """Run an experiment while its processes are killed.

    Raises:
        AssertionError: the run failed, stood still, or something was lost or trained twice.
    """
    spec = make_experiment(
        directory,
        optimisation={"steps": 100_000, "groups_per_mini_batch": GROUPS_PER_STEP},
        checkpoint={"every_steps": 5},
        resources={"rollouts": {"min": 1}},
    )
    report, chance = Report(), random.Random(seed)
    with running_fleet(directory / "fleet", rollouts=rollouts) as fleet:
        async with fleet.client() as client:
            view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
            await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
            watching = asyncio.create_task(_watch(client, view["id"], report))
            await _until_further(client, view["id"], 0)
            for number in range(1, kills + 1):
                kind = chance.choice(sorted(VICTIMS))
                await _kill(fleet, client, view["id"], kind, report)
                if say:
                    took = report.recovery_seconds[kind][-1]
                    print(f"kill {number}/{kills}: {kind}, goes on after {took:.1f} s", flush=True)
                await asyncio.sleep(chance.uniform(0, 2))
            await client.call("POST", f"/v1/experiments/{view['id']}/pause", deadline_seconds=60)
            watching.cancel()
            report.result = await _account(client, view["id"])
    return report


async def _kill(fleet: RunningFleet, client: GatewayClient, experiment_id: str, kind: str, report: Report) -> None:
    step = await _step(client, experiment_id)
    # The one killed last may not be back yet.
    await asyncio.to_thread(until, lambda: fleet.pids(VICTIMS[kind]), PATIENCE_SECONDS, f"a {kind} to kill")
    fleet.kill(VICTIMS[kind])
    report.kills[kind] += 1
    started = time.monotonic()
    await _until_further(client, experiment_id, step)
    report.recovery_seconds.setdefault(kind, []).append(time.monotonic() - started)


async def _step(client: GatewayClient, experiment_id: str) -> int:
    view = await client.call("GET", f"/v1/experiments/{experiment_id}", deadline_seconds=60, attempt_seconds=5)
    assert view["state"] in {"starting", "running"}, (view["state"], view["problem"])
    return int(view["step"])


async def _until_further(client: GatewayClient, experiment_id: str, step: int) -> None:
    """Wait until a step beyond ``step`` is done: a trainer that replays has to pass it again."""
    end = time.monotonic() + PATIENCE_SECONDS
    while await _step(client, experiment_id) <= step:
        assert time.monotonic() < end, f"nothing went on for {PATIENCE_SECONDS} s"
        await asyncio.sleep(0.1)


async def _watch(client: GatewayClient, experiment_id: str, report: Report) -> None:
    while True:
        try:
            ledger = await client.call("GET", f"/v1/experiments/{experiment_id}/ledger", deadline_seconds=2)
            report.looks += 1
            if not ledger["train"]["balanced"]:
                report.unbalanced.append(ledger["train"])
        except FlotillaError:
            pass
        await asyncio.sleep(0.05)


async def _account(client: GatewayClient, experiment_id: str) -> dict[str, Any]:
    """Hold lineage, checkpoint and ledger against each other."""
    base = f"/v1/experiments/{experiment_id}"
    ledger = (await client.call("GET", f"{base}/ledger", deadline_seconds=30))["train"]
    checkpoints = (await client.call("GET", f"{base}/checkpoints", params={"limit": 1000}, deadline_seconds=30))[
        "items"
    ]
    newest = max(checkpoints, key=lambda each: each["step"])
    state = json.loads((Path(newest["path"]) / "state.json").read_text())
    in_checkpoint = {n for start, end in state["trained"] for n in range(start, end + 1)}
    planned = Counter[int]()
    for step in range(1, newest["step"] + 1):
        plan = await client.call("GET", f"{base}/steps/{step}", deadline_seconds=30)
        planned.update(plan["group_ids"])
    reasons = {kind: ledger[kind] for kind in ("filtered", "dropped", "failed")}
    return {
        "steps": newest["step"],
        "trained_twice": sum(count - 1 for count in planned.values() if count > 1),
        "lost": newest["step"] * GROUPS_PER_STEP - len(in_checkpoint),
        "checkpoint_is_lineage": in_checkpoint == set(planned),
        "balanced": ledger["balanced"],
        "issued": ledger["issued"],
        "trained": ledger["trained"],
        "reasons": reasons,
    }


def is_sound(report: Report) -> bool:
    """Whether nothing was lost, trained twice or miscounted."""
    result = report.result
    is_exact = result["trained_twice"] == 0 and result["lost"] == 0 and result["checkpoint_is_lineage"]
    return is_exact and result["balanced"] and not report.unbalanced


def main() -> int:
    """Run it and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flotilla-survival-") as directory:
        work = survive(Path(directory), kills=arguments.kills, seed=arguments.seed, rollouts=arguments.rollouts)
        report = asyncio.run(work)
    text = json.dumps(report.to_dict(), indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if is_sound(report) else 1


if __name__ == "__main__":
    sys.exit(main())
