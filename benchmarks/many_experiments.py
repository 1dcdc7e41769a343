"""Eight experiments with adapters of different ranks on one base, beside one alone: tokens, rewards, memory; CPU.

A fleet of one trainer process, two rollout processes and one reward process serves up to eight experiments at a time.
First one experiment (rank 8) trains there alone, then eight (ranks 1 to 16) at once, which share the base. Tokens are
those that were sampled and trained while all of them trained, per second, and per second of a processor that the whole
fleet took, which others' load on the machine changes less. Memory is what the trainer's worker and the engines have to
themselves (USS) at that time. The reward is the share of digits in an answer.

``python -m benchmarks.many_experiments [--steps 20] [--json FILE]``
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.end_to_end_runs import MEAN_TOKENS, SAMPLES, STEP_ENDS, series_of
from tests.fleet import RunningFleet, make_experiment, running_fleet

RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
ALONE = 8
SECONDS = 780.0
ENGINE, WORKER = "flotilla.services.rollout.engines.process.child", "flotilla.services.trainer.hosting"
REWARD = "reward/mean"
NAMES = (STEP_ENDS, MEAN_TOKENS, SAMPLES, REWARD)
GRADER = '''
"""Reward the share of digits."""


def score(sample):
    return sum(each.isdigit() for each in sample.response) / max(len(sample.response), 1)
'''


@dataclass(frozen=True)
class Found:
    """What some experiments came to.

    Attributes:
        tokens_per_second: of all.
        tokens_per_cpu_second: of all.
        rewards: of each rank: the mean of its first three and of its last three steps.
        engines_mb, trainer_mb: what the processes have to themselves.
        engines: processes.
    """

    tokens_per_second: float
    tokens_per_cpu_second: float
    rewards: Mapping[int, tuple[float, float]]
    engines_mb: float
    trainer_mb: float
    engines: int


def spec_of(directory: Path, rank: int, steps: int) -> dict[str, Any]:
    """Make an experiment."""
    spec = make_experiment(
        directory,
        name=f"rank-{rank}",
        seed=rank,
        model={"path": str(directory / "model"), "dtype": "float32", "lora": {"rank": rank}},
        optimisation={"steps": steps, "groups_per_mini_batch": 8, "learning_rate": 3e-3},
        resources={"rollouts": {"min": 1, "max": 2}, "rewards": {"max": 1}},
    )
    (directory / "digits.py").write_text(GRADER)
    spec["reward"] = {"components": [{"kind": "custom", "path": f"{directory / 'digits.py'}:score"}]}
    spec["rollout"]["group_size"] = 8
    spec["rollout"]["engine"]["slots"] = 64
    return spec


def memory_mb(fleet: RunningFleet, module: str) -> tuple[float, int]:
    """Count what processes of a module have to themselves, and the processes."""
    found = []
    for pid in fleet.pids(module):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid).memory_full_info().uss / 1e6)
    return sum(found), len(found)


def cpu_seconds(fleet: RunningFleet) -> float:
    """Sum the processor time of all processes of a fleet that run."""
    total = 0.0
    for process in psutil.Process(fleet.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def measure(fleet: RunningFleet, specs: Mapping[int, dict[str, Any]]) -> Found:
    """Train experiments at once.

    Raises:
        SystemExit: one failed, or took too long.
    """
    async with fleet.client() as client:
        ids = {
            rank: (
                await client.call("POST", "/v1/experiments", body=spec, params={"start": True}, deadline_seconds=60)
            )["id"]
            for rank, spec in specs.items()
        }
        end, sizes = time.monotonic() + SECONDS, ((0.0, 0), (0.0, 0))
        looks: list[tuple[float, float]] = []
        while True:
            views = [await client.call("GET", f"/v1/experiments/{each}", deadline_seconds=60) for each in ids.values()]
            if all(view["state"] == "completed" for view in views):
                break
            if any(view["state"] == "failed" for view in views) or time.monotonic() > end:
                raise SystemExit(f"the experiments are at {[(view['state'], view['problem']) for view in views]}")
            if all(view["state"] == "running" and view["step"] > 1 for view in views):
                sizes = memory_mb(fleet, ENGINE), memory_mb(fleet, WORKER)
                looks.append((time.time(), cpu_seconds(fleet)))
            await asyncio.sleep(1.0)
        figures = {rank: await series_of(client, f"/v1/experiments/{each}", NAMES) for rank, each in ids.items()}
    (first, before), (last, after) = looks[0], looks[-1]
    tokens = sum(
        each[MEAN_TOKENS][step][0] * each[SAMPLES][step][0]
        for each in figures.values()
        for step, (_, at) in each[STEP_ENDS].items()
        if first < at <= last
    )
    rewards = {rank: [each[REWARD][step][0] for step in sorted(each[REWARD])] for rank, each in figures.items()}
    learnt = {rank: (fmean(each[:3]), fmean(each[-3:])) for rank, each in rewards.items()}
    (engines, count), (trainer, _) = sizes
    return Found(tokens / (last - first), tokens / (after - before), learnt, engines, trainer, count)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each experiment (default: 20)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-") as folder:
        directory = Path(folder)
        with running_fleet(directory / "fleet", rollouts=2, rewards=1, experiments=len(RANKS)) as fleet:
            one = asyncio.run(measure(fleet, {ALONE: spec_of(directory, ALONE, chosen.steps)}))
            specs = {rank: spec_of(directory, rank, chosen.steps) for rank in RANKS}
            eight = asyncio.run(measure(fleet, specs))
    columns = ("tokens/s", 9), ("per CPU s", 9), ("engines", 8), ("engines MB", 11), ("trainer MB", 11)
    print(" ".join((" " * 8, *(f"{name:>{width}}" for name, width in columns))), " reward, first and last steps")
    for name, found in (("alone", one), ("eight", eight)):
        told = ", ".join(f"r{rank} {before:.2f} {after:.2f}" for rank, (before, after) in found.rewards.items())
        sizes = f"{found.engines:>8} {found.engines_mb:>11.0f} {found.trainer_mb:>11.0f}"
        print(f"{name:>8} {found.tokens_per_second:>9.0f} {found.tokens_per_cpu_second:>9.0f} {sizes}  {told}")
    print(
        f"eight / alone: {eight.tokens_per_second / one.tokens_per_second:.2f}, per second of a processor "
        f"{eight.tokens_per_cpu_second / one.tokens_per_cpu_second:.2f}"
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"alone": asdict(one), "eight": asdict(eight)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
