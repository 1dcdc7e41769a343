"""Random ``kill -9`` over every process of a fleet, Redis server included, under a running experiment.

    python -m benchmarks.survival --kills 200 --seed 0 --json survival.json --report docs/survival.md

After each kill the run must move on and its ledger must balance; it is also read all the while. At the end the
experiment is stopped, and every group is accounted for: trained once along the surviving lineage, or with a reason.
Prompts differ in how long their answers are, so that a loss of slow ones would show. ``--kills 0 --steps N`` runs
without faults. Exit code 1 if anything was lost, trained twice, too old or miscounted.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accounting import Account, account
from benchmarks.long_tail import ROWS, make_long_tailed
from benchmarks.survival_report import markdown
from shared.client import GatewayClient
from shared.errors import FlotillaError
from tests.fleet import RunningFleet, running_fleet, until

VICTIMS = {
    "gateway": "services.gateway",
    "rollout": "services.rollout",
    "engine": "services.rollout.engines.process.child",
    "reward": "services.reward",
    "trainer": "services.trainer",
    "training process": "services.trainer.worker",
    "redis": "valkey-server",
}
PATIENCE_SECONDS = 150.0
GROUPS_PER_STEP = 4
POLL_SECONDS = 0.1
STOP_SECONDS = 90.0
WINDOW_SECONDS = 35.0
MOST_IN_WINDOW = 3
"""Of one kind in the window: a fleet gives up a process that dies five times in half a minute, as it should."""


@dataclass
class Report:
    """What happened.

    Attributes:
        seed: of the choice of victims.
        kills: by kind of process.
        recovery_seconds: from a kill to the next step that was done after it, by kind.
        seconds: of the whole run.
        looks: how often the ledger was read while processes died.
        unbalanced: ledgers that did not balance.
        account: the accounting at the end.
    """

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    looks: int = 0
    unbalanced: list[dict[str, Any]] = field(default_factory=list)
    account: Account | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing was lost, trained twice, too old or miscounted, at any time."""
        return self.account is not None and self.account.is_sound and not self.unbalanced

    def to_dict(self) -> dict[str, Any]:
        """Make it JSON; recovery as median and maximum."""
        recovery = {
            kind: {"median": round(sorted(values)[len(values) // 2], 2), "max": round(max(values), 2)}
            for kind, values in sorted(self.recovery_seconds.items())
        }
        return {
            "is_sound": self.is_sound,
            "seed": self.seed,
            "kills": sum(self.kills.values()),
            "kills_by_kind": dict(sorted(self.kills.items())),
            "seconds": round(self.seconds, 1),
            "recovery_seconds": recovery,
            "ledger_looks": self.looks,
            "unbalanced": self.unbalanced,
            **(self.account.to_dict() if self.account else {}),
        }


class Victims:
    """Chooses whom to kill: any kind, but none so often that giving it up would be right."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._recent: deque[tuple[float, str]] = deque()

    def choose(self) -> str:
        """Choose a kind, and remember it."""
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        counts = Counter(kind for _, kind in self._recent)
        kind = self._chance.choice([each for each in sorted(VICTIMS) if counts[each] < MOST_IN_WINDOW])
        self._recent.append((now, kind))
        return kind


async def survive(
    directory: Path,
    *,
    kills: int,
    seed: int,
    rollouts: int = 2,
    steps: int = 0,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Run an experiment while its processes are killed, then stop it and account for everything.

    Args:
        directory: for model, data and fleet.
        kills: how many.
        seed: of the choice of victims.
        rollouts: rollout services.
        steps: go on to at least this step.
        say: gets a line for each kill.

    Raises:
        AssertionError: the run failed or stood still.
    """
    spec = make_long_tailed(
        directory,
        optimisation={"steps": 1_000_000, "groups_per_mini_batch": GROUPS_PER_STEP, "learning_rate": 1e-6},
        checkpoint={"every_steps": 5},
        resources={"rollouts": {"min": 1}},
    )
    report, chance = Report(seed), random.Random(seed)
    victims = Victims(chance)
    started = time.monotonic()
    async with running(directory / "fleet", spec, rollouts) as (fleet, client, experiment_id):
        watching = asyncio.create_task(_watch(client, experiment_id, report))
        await _until_further(client, experiment_id, 0)
        for number in range(1, kills + 1):
            kind = victims.choose()
            await _kill(fleet, client, experiment_id, kind, report, chance)
            if say:
                took = report.recovery_seconds[kind][-1]
                say(f"{time.monotonic() - started:6.0f} s  kill {number}/{kills}: {kind}, goes on after {took:.1f} s")
            await asyncio.sleep(chance.uniform(0, 1.5))
        await _until_further(client, experiment_id, steps - 1, (steps + 60) * 5.0)
        watching.cancel()
        await _stop(client, experiment_id)
        report.account = await account(client, experiment_id, directory, rows=ROWS)
    report.seconds = time.monotonic() - started
    return report


@contextlib.asynccontextmanager
async def running(
    data: Path, spec: dict[str, Any], rollouts: int
) -> AsyncIterator[tuple[RunningFleet, GatewayClient, str]]:
    """Run a fleet and start an experiment on it."""
    with running_fleet(data, rollouts=rollouts) as fleet:
        async with fleet.client() as client:
            view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
            await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
            yield fleet, client, view["id"]


async def _kill(
    fleet: RunningFleet, client: GatewayClient, experiment_id: str, kind: str, report: Report, chance: random.Random
) -> None:
    step = await _step(client, experiment_id)
    # The one killed last may not be back yet.
    pids = await asyncio.to_thread(until, lambda: fleet.pids(VICTIMS[kind]), PATIENCE_SECONDS, f"a {kind} to kill")
    with contextlib.suppress(ProcessLookupError):  # it died on the way, by an earlier kill
        os.kill(chance.choice(pids), signal.SIGKILL)
    report.kills[kind] += 1
    started = time.monotonic()
    await _look(client, experiment_id, report, deadline_seconds=60.0)
    await _until_further(client, experiment_id, step)
    report.recovery_seconds.setdefault(kind, []).append(time.monotonic() - started)


async def _stop(client: GatewayClient, experiment_id: str) -> None:
    base = f"/v1/experiments/{experiment_id}"
    await client.call("POST", f"{base}/stop", deadline_seconds=60)
    end = time.monotonic() + STOP_SECONDS
    while True:
        view = await client.call("GET", base, deadline_seconds=60, attempt_seconds=5)
        if view["state"] == "stopped":
            return
        assert time.monotonic() < end, f"still {view['state']} after {STOP_SECONDS} s"
        await asyncio.sleep(POLL_SECONDS)


async def _step(client: GatewayClient, experiment_id: str) -> int:
    view = await client.call("GET", f"/v1/experiments/{experiment_id}", deadline_seconds=60, attempt_seconds=5)
    assert view["state"] in {"starting", "running"}, (view["state"], view["problem"])
    return int(view["step"])


async def _until_further(
    client: GatewayClient, experiment_id: str, step: int, patience_seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait until a step beyond ``step`` is done: a trainer that replays has to pass it again."""
    end = time.monotonic() + patience_seconds
    while await _step(client, experiment_id) <= step:
        if time.monotonic() > end:
            found = await client.call("GET", f"/v1/experiments/{experiment_id}/diagnosis", deadline_seconds=60)
            raise AssertionError(f"nothing went on for {patience_seconds:g} s: {found['component']}: {found['cause']}")
        await asyncio.sleep(POLL_SECONDS)


async def _look(client: GatewayClient, experiment_id: str, report: Report, *, deadline_seconds: float) -> None:
    ledger = await client.call(
        "GET", f"/v1/experiments/{experiment_id}/ledger", deadline_seconds=deadline_seconds, attempt_seconds=5
    )
    report.looks += 1
    if not ledger["train"]["balanced"]:
        report.unbalanced.append(ledger["train"])


async def _watch(client: GatewayClient, experiment_id: str, report: Report) -> None:
    while True:
        with contextlib.suppress(FlotillaError):
            await _look(client, experiment_id, report, deadline_seconds=2.0)
        await asyncio.sleep(POLL_SECONDS)


def main() -> int:
    """Run it, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="go on to at least this step")
    parser.add_argument("--keep", type=Path, help="keep model, data and logs in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--report", type=Path, help="write a page here; it holds a run with and one without faults")
    arguments = parser.parse_args()

    def run(kills: int, steps: int) -> Report:
        with contextlib.ExitStack() as stack:
            if arguments.keep:
                directory = arguments.keep / f"{kills}-kills"
                directory.mkdir(parents=True)
            else:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flotilla-survival-")))
            work = survive(
                directory,
                kills=kills,
                seed=arguments.seed,
                rollouts=arguments.rollouts,
                steps=steps,
                say=lambda line: print(line, flush=True),
            )
            return asyncio.run(work)

    report = run(arguments.kills, arguments.steps)
    reports = [report]
    if arguments.report:
        assert report.account is not None
        print("the same without faults", flush=True)
        reports.append(run(0, min(report.account.steps, 500)))
        arguments.report.write_text(markdown(*(each.to_dict() for each in reports)), encoding="utf-8")
    text = json.dumps([each.to_dict() for each in reports], indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if all(each.is_sound for each in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
