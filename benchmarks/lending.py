"""Devices lent: steps per second with and without, where the sampler is slow and where the trainer is.

A whole fleet on this machine: one rollout with a core of its own, and one of the pool ``lent`` on the trainer's core
(each with ``threads: 1``). The same experiment is run in turn with ``resources.lending`` and without it, so that both
have the same load of the machine around them:

- *slow sampler*: long answers, and a step that trains quickly: the trainer waits for most of its time;
- *slow trainer*: short answers, trained many times: it hardly waits, and nothing is to be lent.

Steps per second are those from the step on with which lending could begin. Nothing holds the processes to their cores:
on a machine where others compute the lent core may be theirs, which the ratio shows.

``python -m benchmarks.lending [--rounds 3] [--steps 24] [--json FILE]``
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import LENT
from tests.faults.test_kill import until_completed
from tests.faults.trial import Trial, joining
from tests.fleet import make_experiment, running_fleet

OVER_STEPS = 4
CASES: Mapping[str, Mapping[str, Any]] = {
    "slow sampler": {
        "rollout": {
            "sampling": {"max_new_tokens": 320, "ignore_eos": True},
            "engine": {"slots": 4, "context_tokens": 512, "threads": 1},
        },
        "optimisation": {},
    },
    "slow trainer": {
        "rollout": {
            "sampling": {"max_new_tokens": 24, "ignore_eos": True},
            "engine": {"slots": 32, "context_tokens": 128, "threads": 1},
        },
        "optimisation": {"epochs_per_step": 8},
    },
}
"""What is different in the spec of each case."""


def spec_of(case: str, directory: Path, steps: int, *, lends: bool) -> dict[str, Any]:
    """Make the spec of one run."""
    own = CASES[case]
    return make_experiment(
        directory,
        name=case.replace(" ", "-"),
        rollout=own["rollout"],
        optimisation={"steps": steps, "groups_per_mini_batch": 8, "learning_rate": 1e-4, **own["optimisation"]},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
        resources={"lending": {"over_steps": OVER_STEPS}} if lends else {},
    )


async def run_once(client: GatewayClient, trial: Trial) -> dict[str, float]:
    """Wait for the end of a run, and read its figures."""
    await until_completed(client, trial.id)
    names = ("time/step_seconds", "time/wait_seconds", "time/lent_seconds", "time/device_seconds")
    values: dict[str, dict[int, float]] = {}
    for name in names:
        page = await client.call("GET", f"{trial.path}/metrics", params={"names": name, "limit": 1000})
        values[name] = {point["step"]: point["value"] for point in page["items"]}
    told, waited, lent, back = (values[name] for name in names)
    steps = [step for step in told if step > OVER_STEPS + 1]
    seconds = sum(told[step] + back.get(step, 0.0) for step in steps)
    return {
        "steps_per_second": len(steps) / seconds,
        "wait_share": sum(waited[step] for step in steps) / seconds,
        "lent_share": sum(lent.get(step, 0.0) for step in steps) / seconds,
        "lent_steps": float(sum(lent.get(step, 0.0) > 0 for step in steps)),
    }


async def measure(rounds: int, steps: int) -> list[dict[str, Any]]:
    """Run every case, with and without lending in turn."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with (
            running_fleet(directory / "fleet") as fleet,
            joining(fleet.data, directory / "lent.log", "--pool", LENT),
        ):
            async with fleet.client() as client:
                for case in CASES:
                    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
                    for _ in range(rounds):
                        for lends in (False, True):
                            spec = spec_of(case, directory, steps, lends=lends)
                            trial = await Trial.start(fleet, client, spec)
                            found[lends].append(await run_once(client, trial))
                            print(f"{case}, lending {lends}: {found[lends][-1]}", flush=True)
                    rates = {
                        lends: statistics.median(each["steps_per_second"] for each in found[lends]) for lends in found
                    }
                    rows.append(
                        {
                            "case": case,
                            "steps_per_second": rates[False],
                            "with_lending": rates[True],
                            "ratio": rates[True] / rates[False],
                            "lent_steps": sum(each["lent_steps"] for each in found[True]),
                            "runs": {str(lends): each for lends, each in found.items()},
                        }
                    )
    return rows


def main() -> None:
    """Measure, and print a ratio for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="of both ways in turn")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.rounds, arguments.steps))
    for row in rows:
        print(
            f"{row['case']}: {row['steps_per_second']:.2f} steps/s, {row['with_lending']:.2f} with lending "
            f"(ratio {row['ratio']:.2f}); devices were lent in {row['lent_steps']:.0f} steps"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
