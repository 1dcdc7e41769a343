"""Asynchronous against synchronous training: trained tokens per second, and time to a fixed held-out accuracy.

The hard arithmetic preset (answers of 3 to 12 operations: their lengths have a long tail by themselves) on a whole
fleet, once per mode, with the same model, task, seed and number of steps:

- *on_policy*: T=1, η=0; generation and training take turns;
- *stream*: T=4, η=0; groups are trained as they come, four steps per version;
- *stale*: T=4, η=0.5, samples in flight finish under the old weights;
- *partial*: T=4, η=0.5, samples in flight are interrupted and go on under the new weights.

The rollout service with its engine has one core, the trainer service with its worker the other. Gateway, reward and
Redis share the trainer's core, or the rollout's with ``--small-services rollout``.

**The bound.** First the stages run alone, each on its core, on the same fleet and with T=4: all groups are generated
while the training process is stopped (SIGSTOP), then trained while nothing is left to generate. That gives sampled
tokens per second of generation, and tokens per second of training, prompts included, since they cost as much there. A
mode that generated G tokens (evaluations and filtered groups included) and trained N cannot take less than
max(G / generation rate, N / training rate): perfect overlap. Its *share* is that time over the time it took, from
the end of its first version to the end of its last step. Both rates are those of the first policy, whose answers are
shorter than later ones; *busy* is a second look that does not depend on them: the part of its time in which the
trainer computed, and so the share where training is the longer stage.

``python -m benchmarks.async_vs_sync [--quick] [--modes stale,partial] [--steps 64] [--json FILE]``
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flotilla.launch_file import read_launch_file, run_prepare
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import ROOT, RunningFleet, running_fleet

PRESET = ROOT / "examples" / "arithmetic" / "hard.yaml"
MODES: dict[str, dict[str, Any]] = {
    "on_policy": {"trigger_parameter_sync_step": 1, "staleness_threshold": 0.0, "on_weight_update": "drain"},
    "stream": {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.0, "on_weight_update": "drain"},
    "stale": {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.5, "on_weight_update": "drain"},
    "partial": {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.5, "on_weight_update": "interrupt"},
}
ASYNCHRONOUS = ("stale", "partial")
BAR = 0.85
EVALUATE_STEPS = 16
STEPS_PER_VERSION = 4
HELDOUT_ROWS = 128
ACCURACY = 0.5
POLL_SECONDS = 0.1
ALONE_SECONDS = 120.0
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Rates:
    """What each stage does alone, tokens per second of wall time with a core of its own."""

    generation: float
    training: float


def prepared_spec(steps: int, directory: Path, seed: int) -> dict[str, Any]:
    """Make the preset's model and data if they are missing, and give the common part of every mode's spec."""
    launch = read_launch_file(PRESET, [f"seed={seed}"])
    asyncio.run(run_prepare(launch, lambda line: print(f"prepare: {line}", flush=True)))
    spec: dict[str, Any] = launch.document
    heldout = directory / "heldout.jsonl"
    rows = Path(spec["evaluation"]["path"]).read_text(encoding="utf-8").splitlines(keepends=True)
    heldout.write_text("".join(rows[:HELDOUT_ROWS]), encoding="utf-8")
    spec["optimisation"]["steps"] = steps
    spec["evaluation"]["path"] = str(heldout)
    return spec


def pin(fleet: RunningFleet, small: str) -> None:
    """Give the rollout's processes one core and the trainer's the other; what they start later inherits it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for each stage")
    rollout, trainer = cores[0], cores[1]
    other = rollout if small == "rollout" else trainer
    for service in psutil.Process(fleet.process.pid).children():
        words = service.cmdline()
        core = (
            trainer
            if "flotilla.services.trainer" in words
            else rollout
            if "flotilla.services.rollout" in words
            else other
        )
        for process in [service, *service.children(recursive=True)]:
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


class Trial:
    """One experiment on a fleet of its own, watched from outside."""

    def __init__(self, fleet: RunningFleet, client: GatewayClient, experiment_id: str) -> None:
        self.fleet, self.client, self.id = fleet, client, experiment_id
        self._cursor: str | None = None
        self.points: dict[str, dict[int, float]] = {}
        self.seen_at: dict[int, float] = {}
        """Step -> when its metrics were first seen, on the monotonic clock."""

    async def look(self) -> dict[str, Any]:
        """Read the new metrics and the experiment."""
        while True:
            params = {"limit": 1000} | ({"after": self._cursor} if self._cursor else {})
            page = await self.client.call("GET", f"/v1/experiments/{self.id}/metrics", params=params)
            for point in page["items"]:
                self.points.setdefault(point["name"], {})[point["step"]] = point["value"]
                if point["name"] == "tokens/trained":
                    self.seen_at.setdefault(point["step"], time.monotonic())
            if page["next"] is None:
                break
            self._cursor = page["next"]
        view: dict[str, Any] = await self.client.call("GET", f"/v1/experiments/{self.id}")
        if view["state"] == "failed":
            raise SystemExit(f"the experiment failed: {view.get('failure')}")
        return view

    async def until(self, condition: Callable[[dict[str, Any]], object]) -> None:
        """Look until the experiment is as wanted, with a deadline."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition(await self.look()):
            if time.monotonic() > end:
                raise SystemExit(f"the experiment stood still: {sorted(self.seen_at)[-1:]} steps were done")
            await asyncio.sleep(POLL_SECONDS)

    async def generated(self) -> int:
        """Count the tokens of all groups that were generated so far, in both lanes."""
        ledgers = await self.client.call("GET", f"/v1/experiments/{self.id}/ledger")
        return int(sum(ledger["tokens"]["generated"] for ledger in ledgers.values()))

    def processed(self, step: int) -> float:
        """Count the tokens that a step's forward passes go through, prompts included."""
        means = self.points["completion_tokens/mean"][step] + self.points["prompt_tokens/mean"][step]
        return means * self.points["samples/in_step"][step]

    async def ledger(self) -> dict[str, Any]:
        """Read the training lane's ledger."""
        return dict((await self.client.call("GET", f"/v1/experiments/{self.id}/ledger"))["train"])

    def processor_seconds(self) -> dict[str, float]:
        """Sum the CPU time of the fleet's processes by service."""
        sums: dict[str, float] = {}
        for child in psutil.Process(self.fleet.process.pid).children(recursive=True):
            try:
                words, times = child.cmdline(), child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            names = [word.split(".")[2] for word in words if word.startswith("flotilla.services.")]
            name = names[0] if names else "redis" if "valkey" in " ".join(words) else "other"
            sums[name] = round(sums.get(name, 0.0) + times.user + times.system, 2)
        return sums


@asynccontextmanager
async def trial(spec: dict[str, Any], directory: Path, small: str) -> AsyncIterator[Trial]:
    """Start an experiment on a fleet of its own, pinned."""
    with running_fleet(directory) as fleet:
        async with fleet.client() as client:
            end = time.monotonic() + PATIENCE_SECONDS
            while len((await client.call("GET", "/v1/services"))["items"]) < 3:
                if time.monotonic() > end:
                    raise SystemExit("the fleet did not come up")
                await asyncio.sleep(POLL_SECONDS)
            pin(fleet, small)
            view = await client.call("POST", "/v1/experiments", body=spec)
            await client.call("POST", f"/v1/experiments/{view['id']}/start")
            yield Trial(fleet, client, view["id"])


async def alone(spec: dict[str, Any], steps: int, directory: Path, small: str) -> Rates:
    """Measure each stage while the other stands still: generate what ``steps`` need, then train it."""
    asynchrony = spec["asynchrony"] | {"staleness_threshold": steps / STEPS_PER_VERSION - 1}
    asynchrony |= {"trigger_parameter_sync_step": STEPS_PER_VERSION, "on_weight_update": "drain"}
    spec = {**spec, "evaluation": None, "asynchrony": asynchrony}
    spec["optimisation"] = spec["optimisation"] | {"steps": steps}
    needed = steps * spec["optimisation"]["groups_per_mini_batch"]
    async with trial(spec, directory, small) as one:
        await one.until(lambda view: view["state"] == "running" and one.fleet.pids("flotilla.services.trainer.worker"))
        worker = psutil.Process(one.fleet.pids("flotilla.services.trainer.worker")[0])
        members = [worker, *worker.children(recursive=True)]
        for each in members:
            each.suspend()
        try:
            generation = await _generation_rate(one, needed)
        finally:
            for each in members:
                each.resume()
        await one.until(lambda _: len(one.seen_at) == steps)
    # What steps take when their groups are there; those of the first version warm up.
    times, warm = one.points, range(STEPS_PER_VERSION + 1, steps + 1)
    seconds = sum(times["time/step_seconds"][step] - times["time/wait_seconds"][step] for step in warm)
    return Rates(generation, sum(one.processed(step) for step in warm) / seconds)


async def _generation_rate(one: Trial, needed: int) -> float:
    """Tokens per second while tasks wait, so that every slot is busy."""
    marks: list[tuple[float, int]] = []
    end = time.monotonic() + ALONE_SECONDS
    while time.monotonic() < end:
        ledger, now = await one.ledger(), time.monotonic()
        tokens = ledger["tokens"]["generated"]
        if tokens and ledger["waiting"]["tasks"]:
            marks.append((now, tokens))
        at_work = (ledger["waiting"][hop] + ledger["claimed"][hop] for hop in ("tasks", "generated"))
        if ledger["outstanding"] >= needed and not sum(at_work):
            break
        await asyncio.sleep(POLL_SECONDS)
    else:
        raise SystemExit(f"generation alone took longer than {ALONE_SECONDS:g} s")
    if len(marks) < 2 or marks[-1][0] - marks[0][0] < 1:
        raise SystemExit("generation alone was too short to measure: use more steps")
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


async def run_mode(spec: dict[str, Any], name: str, rates: Rates, directory: Path, small: str) -> dict[str, Any]:
    """Run one mode to its last step and say how it did."""
    asynchrony = spec["asynchrony"] | MODES[name]
    every = max(1, EVALUATE_STEPS // asynchrony["trigger_parameter_sync_step"])
    spec = {**spec, "asynchrony": asynchrony, "evaluation": spec["evaluation"] | {"every_versions": every}}
    steps, first = spec["optimisation"]["steps"], asynchrony["trigger_parameter_sync_step"]
    generated_at: dict[int, int] = {}
    cpu_before: dict[str, float] = {}
    cpu_after: dict[str, float] = {}
    async with trial(spec, directory, small) as one:
        while len(one.seen_at) < steps:
            await one.look()
            done = len(one.seen_at)
            if done >= first and done not in generated_at:
                cpu_after = one.processor_seconds()
                cpu_before = cpu_before or cpu_after
            generated_at[done] = await one.generated()
            await asyncio.sleep(POLL_SECONDS)
        cpu = {key: round(value - cpu_before.get(key, 0.0), 2) for key, value in cpu_after.items()}
        await one.until(lambda view: view["state"] != "running")
    return describe(one, first, steps, generated_at, rates, cpu)


def describe(
    one: Trial, first: int, steps: int, generated_at: dict[int, int], rates: Rates, cpu: dict[str, float]
) -> dict[str, Any]:
    """Put a mode's figures together."""
    wall = one.seen_at[steps] - one.seen_at[first]
    trained = one.points["tokens/trained"][steps] - one.points["tokens/trained"][first]
    begun = min(done for done in generated_at if done >= first)
    generated = generated_at[max(generated_at)] - generated_at[begun]
    generation_seconds = generated / rates.generation
    training_seconds = sum(one.processed(step) for step in range(first + 1, steps + 1)) / rates.training
    bound = max(generation_seconds, training_seconds)
    steady = range(first + 1, steps + 1)
    parts = ("wait", "pace", "compute", "publish", "checkpoint", "publication")
    accuracy = one.points.get("evaluation/accuracy", {})
    start = min(one.seen_at.values()) - one.points["time/step_seconds"][min(one.seen_at)]
    reached = [step for step, value in sorted(accuracy.items()) if value >= ACCURACY and step in one.seen_at]
    return {
        "wall_seconds": round(wall, 2),
        "trained_tokens": int(trained),
        "generated_tokens": generated,
        "trained_tokens_per_second": round(trained / wall, 1),
        "generation_alone_seconds": round(generation_seconds, 2),
        "training_alone_seconds": round(training_seconds, 2),
        "sum_seconds": round(generation_seconds + training_seconds, 2),
        "bound_seconds": round(bound, 2),
        "share_of_bound": round(bound / wall, 3),
        "trainer_busy": round(sum(one.points["time/compute_seconds"][step] for step in steady) / wall, 3),
        "seconds_to_accuracy": round(one.seen_at[reached[0]] - start, 1) if reached else None,
        "accuracy_by_step": {step: round(value, 3) for step, value in sorted(accuracy.items())},
        "seconds": {part: round(sum(one.points[f"time/{part}_seconds"][step] for step in steady), 2) for part in parts},
        "processor_seconds": cpu,
        "completion_tokens": {
            "mean": round(statistics.fmean(one.points["completion_tokens/mean"][step] for step in steady), 1),
            "max": max(one.points["completion_tokens/max"][step] for step in steady),
        },
        "max_lag": max(one.points["lag/max"][step] for step in steady),
    }


async def measure(arguments: argparse.Namespace, spec: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Measure the stages alone, then every mode."""
    spec["checkpoint"]["every_steps"] = max(4, arguments.steps // 4 * 4)
    rates = await alone(spec, arguments.alone_steps, directory / "alone", arguments.small_services)
    print(
        f"alone: generation {rates.generation:.0f} tokens/s, training {rates.training:.0f} tokens/s (prompts included)",
        flush=True,
    )
    results = {}
    for name in arguments.modes.split(","):
        result = await run_mode(spec, name, rates, directory / name, arguments.small_services)
        results[name] = result
        print(
            f"{name:>9}: {result['trained_tokens_per_second']:>8.0f} trained tokens/s, {result['wall_seconds']:.1f} s; "
            f"bound {result['bound_seconds']:.1f} s, sum of stages {result['sum_seconds']:.1f} s, "
            f"share {result['share_of_bound']:.2f}, busy {result['trainer_busy']:.2f}; "
            f"accuracy {ACCURACY}: {result['seconds_to_accuracy']} s; "
            f"{json.dumps(result['seconds'])} {json.dumps(result['processor_seconds'])}",
            flush=True,
        )
    return {
        "alone": {"generation_per_second": round(rates.generation, 1), "training_per_second": round(rates.training, 1)},
        "steps": arguments.steps,
        "small_services": arguments.small_services,
        "bar": BAR,
        "reached": {name: results[name]["share_of_bound"] >= BAR for name in ASYNCHRONOUS if name in results},
        "modes": results,
    }


def main() -> None:
    """Run the modes one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few steps: shows the overlap, not the accuracy")
    parser.add_argument("--steps", type=int, help="steps of each mode, a multiple of 4 (64; 16 when quick)")
    parser.add_argument(
        "--alone-steps", type=int, help="steps for the stages alone, a multiple of 4 (24; 12 when quick)"
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--small-services", choices=("trainer", "rollout"), default="trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (16 if arguments.quick else 64)
    arguments.alone_steps = arguments.alone_steps or (12 if arguments.quick else 24)
    try:
        with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as directory:
            spec = prepared_spec(arguments.steps, Path(directory), arguments.seed)
            report = asyncio.run(measure(arguments, spec, Path(directory)))
    except FlotillaError as error:
        raise SystemExit(f"the benchmark ended: {error.detail}") from error
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
