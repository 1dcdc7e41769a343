"""The parts of ``benchmarks.gpu`` that run whole fleets: on one device, with random weights."""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_place import Figures, Found, Place, attempted
from examples.arithmetic.problems import training_set, worked_solution
from examples.arithmetic.settings import settings_of
from examples.arithmetic.tokenizer import build_tokenizer

FLEET_SECONDS = 240.0
QUICK_SECONDS = 85.0
"""On a GPU."""
SERVER_SECONDS = 480.0
"""With an engine that compiles at its start."""
SAMPLE_SECONDS = 0.1
LAST_CHARACTERS = 4000
LOADED = "engine loaded"
"""What the log of a rollout says with the name of the decoder."""
GRADER = """\
import zlib


def score(sample):
    return float(zlib.crc32((sample.id + sample.response).encode()) % 2)
"""
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "arithmetic" / "experiment.yaml"
SERVERS = {"sglang": "FLOTILLA_SGLANG_PYTHON", "vllm": "FLOTILLA_VLLM_PYTHON"}


def write_experiment(place: Place, directory: Path) -> dict[str, Any]:
    """Write a model, rows and a grader that finds half of all answers right, and give the spec, on-policy."""
    size = place.fleet
    settings = settings_of("standard", 0)
    problems = training_set(64, settings.problems, Random(0))
    tokenizer = build_tokenizer([p.prompt + worked_solution(p) for p in problems], settings.model.vocab_size)
    config = size.shape.config
    assert len(tokenizer) <= size.shape.vocabulary
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=place.torch_dtype)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [{"prompt": p.prompt, "answer": "0"} for p in problems]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "grade.py").write_text(GRADER, encoding="utf-8")
    return {
        "name": "gpu",
        "seed": 7,
        "model": {"path": str(directory / "model"), "dtype": place.dtype},
        "data": {"path": str(directory / "train.jsonl"), "label_column": "answer"},
        "rollout": {
            "group_size": size.group_size,
            "sampling": {"max_new_tokens": size.new_tokens},
            "engine": {"device": place.device, "slots": size.slots, "context_tokens": size.context_tokens},
        },
        "reward": {"components": [{"kind": "custom", "path": f"{directory / 'grade.py'}:score"}]},
        "optimisation": {"steps": size.steps, "groups_per_mini_batch": size.groups, "learning_rate": 1e-6},
        "asynchrony": {"staleness_threshold": 0.0, "on_weight_update": "drain"},
        "checkpoint": {"every_steps": 1000},
        "parallelism": {"device": place.device},
    }


@contextmanager
def device_memory(place: Place) -> Iterator[list[float]]:
    """Sample how much of the device's memory all its processes use, in bytes, while the block runs; GPUs only."""
    used, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            free, whole = torch.cuda.mem_get_info()
            used.append(float(whole - free))

    thread = threading.Thread(target=watch, daemon=True)
    if place.is_gpu:
        thread.start()
    try:
        yield used
    finally:
        over.set()
        if place.is_gpu:
            thread.join()


def run_fleet(
    place: Place,
    directory: Path,
    spec: Mapping[str, Any],
    name: str,
    seconds: float = FLEET_SECONDS,
    *,
    continues: bool = False,
) -> Figures:
    """Run an experiment to its end, hold its ledger against what was issued, and give what it came to.

    Args:
        place: where it runs.
        directory: of the spec and of its run.
        spec: of the experiment.
        name: of the experiment.
        seconds: after which it is ended.
        continues: whether it goes on from the checkpoint of the run of this name.
    """
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**spec, "name": name}), encoding="utf-8")
    command = [sys.executable, "-m", "flotilla", "run", str(path), "--runs", str(directory / "runs"), "--plain"]
    command += ["--continue"] if continues else []
    before = torch.cuda.mem_get_info()[0] if place.is_gpu else 0
    started, began = time.perf_counter(), datetime.now(UTC)
    run = directory / "runs" / name
    output = directory / f"{name}.output"
    with device_memory(place) as used, output.open("wb") as file:
        try:
            ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False)
            code = str(ended.returncode)
        except subprocess.TimeoutExpired:
            code = f"none after {seconds:.0f} s"
    taken = time.perf_counter() - started
    if code != "0":
        logs = {path.name: tail_of(path) for path in [output, *sorted((run / "fleet" / "logs").glob("*.log"))]}
        return {"failed": f"exit code: {code}", "seconds": taken, "logs": logs}
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    ledger = summary["ledger"]
    resolved = sum(sum(ledger[kind].values()) for kind in ("filtered", "dropped", "failed"))
    found = ledger["outstanding"] + ledger["planned"] + ledger["trained"] + resolved
    steps = spec["optimisation"]["steps"]
    assert summary["steps"] == steps, summary["steps"]
    assert ledger["issued"] == found, f"the ledger does not balance: {ledger}"
    assert ledger["trained"] == steps * spec["optimisation"]["groups_per_mini_batch"], ledger
    figures: Figures = {
        "seconds": taken,
        "steps": steps,
        "tokens_trained": summary["tokens_trained"],
        "tokens_generated": summary["tokens_generated"],
        "rates": rates_of(run),
        "moments": moments_of(run, began),
        "losses": losses_of(run),
        "last_step": last_step_of(run),
        "ledger": ledger,
        "predicted_gigabytes": predicted_of(run),
        "engine": [line for path in (run / "fleet" / "logs").glob("rollout*.log") for line in said(path, LOADED)],
    }
    if place.is_gpu:
        whole = torch.cuda.mem_get_info()[1]
        figures["peak_gigabytes_of_the_device"] = max(used) / 1e9
        figures["gigabytes_used_before"] = (whole - before) / 1e9
    return figures


def losses_of(run_directory: Path) -> list[float]:
    """Read the loss of each step from the run's database."""
    (path,) = run_directory.rglob("gateway.sqlite")
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT step, value FROM metrics WHERE name = 'loss/total' ORDER BY sequence")
        found = dict(rows.fetchall())
    return [found[step] for step in sorted(found)]


def rates_of(run_directory: Path) -> dict[str, float]:
    """Compute steps and trained tokens per second from the end of the second step to that of the last."""
    (path,) = run_directory.rglob("gateway.sqlite")
    with closing(sqlite3.connect(path)) as database:
        told = "SELECT step, value, at FROM metrics WHERE name = 'tokens/trained_in_step' ORDER BY step"
        rows = database.execute(told).fetchall()[1:]
    if len(rows) < 2:
        return {}
    first, last = (datetime.fromisoformat(at) for _, _, at in (rows[0], rows[-1]))
    seconds = (last - first).total_seconds()
    tokens = sum(value for _, value, _ in rows[1:])
    return {"seconds": seconds, "steps_per_second": (len(rows) - 1) / seconds, "tokens_per_second": tokens / seconds}


def moments_of(run_directory: Path, began: datetime) -> dict[str, float]:
    """Say how many seconds after its start the command reached each moment: first lines of logs, and steps."""
    moments: dict[str, str] = {}
    for path in sorted((run_directory / "fleet" / "logs").glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                told = json.loads(line)
                what = str(told.get("event_state") or told.get("line") or told.get("state") or told["message"])
                name = f"{path.stem}: {what.partition('=')[0][:40]}"
                moments.setdefault(name, told["at"])
    (path,) = run_directory.rglob("gateway.sqlite")
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT step, at FROM metrics WHERE name = 'tokens/trained_in_step' ORDER BY step")
        moments |= {f"step {step}": at for step, at in rows.fetchall()}
    seconds = {name: (datetime.fromisoformat(at) - began).total_seconds() for name, at in moments.items()}
    return dict(sorted(seconds.items(), key=lambda each: each[1]))


def last_step_of(run_directory: Path) -> dict[str, float]:
    """Read every metric of the last step that has a loss."""
    (path,) = run_directory.rglob("gateway.sqlite")
    last = "SELECT MAX(step) FROM metrics WHERE name = 'loss/total'"
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute(f"SELECT name, value FROM metrics WHERE step = ({last}) ORDER BY sequence")
        return dict(rows.fetchall())


def predicted_of(run_directory: Path) -> dict[str, float]:
    """Read what memory was predicted for each process before it loaded its model."""
    logs = (run_directory / "fleet" / "logs").glob("*.log")
    told = [json.loads(line) for path in logs for line in said(path, "memory predicted")]
    return {line["what"]: line["bytes"] / 1e9 for line in told}


def tail_of(path: Path) -> str:
    """Read the end of a log."""
    return path.read_text(encoding="utf-8", errors="replace")[-LAST_CHARACTERS:]


def said(path: Path, phrase: str) -> list[str]:
    """Find what a log says of something."""
    return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if phrase in line]


def part_fleet(place: Place) -> Found:
    """Run a whole fleet on the device, engine and trainer beside each other."""
    with tempfile.TemporaryDirectory() as folder:
        # Ended before the part is, so that its logs are among the figures.
        limit = QUICK_SECONDS if place.is_gpu else FLEET_SECONDS
        yield "fleet", run_fleet(place, Path(folder), write_experiment(place, Path(folder)), "fleet", limit)


def part_sharing(place: Place) -> Found:
    """Run the same experiment side by side and in turns: losses and, on a GPU, memory of both."""
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(place, Path(folder))
        spec["optimisation"]["steps"] = place.fleet.short_steps
        found = {}
        for name, sharing in (("side by side", "none"), ("in turns", "time")):
            chosen = {**spec, "resources": {"sharing": sharing}}
            found[name] = attempted(partial(run_fleet, place, Path(folder), chosen, f"sharing-{sharing}"))
            yield name, found[name]
    if any("failed" in each for each in found.values()):
        return
    losses = [each["losses"] for each in found.values()]
    difference = max(abs(one - other) for one, other in zip(*losses, strict=True))
    yield "largest_difference_of_a_loss", difference
    # In bfloat16 on a GPU two runs of the same differ: that figure is reported, not judged.
    assert place.is_gpu or difference <= 1e-5, f"losses differ by {difference}: {losses}"


def part_lora(place: Place) -> Found:
    """Train adapters in a whole fleet: the engine gets merged weights, the checkpoint holds adapters."""
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(place, Path(folder))
        spec["model"]["lora"] = {"rank": 16, "alpha": 32}
        spec["optimisation"] |= {"steps": place.fleet.short_steps, "learning_rate": 1e-4}
        found = run_fleet(place, Path(folder), spec, "lora")
        yield "fleet", found
        if "failed" in found:
            return
        adapters = sorted((Path(folder) / "runs").rglob("adapter_model.safetensors"))
        assert adapters, "there is no checkpoint of adapters"
        yield "checkpoint_megabytes", adapters[-1].stat().st_size / 1e6


def part_options(place: Place) -> Found:
    """Run fleets with what a trainer on a GPU is asked for: memory kept on the host, stale answers."""
    kept = {"reference": True, "optimiser": True, "activations": True}
    ways: dict[str, dict[str, Any]] = {
        "interrupted and stale answers, two rollouts": {
            "asynchrony": {"staleness_threshold": 1.0, "on_weight_update": "interrupt"},
            "resources": {"rollouts": {"min": 2, "max": 2}},
        },
        "reference, moments and activations on the host": {
            "algorithm": {"kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.001}},
            # What is on a CPU is on the host already: refused there.
            "parallelism": {"offload": kept} if place.is_gpu else {},
        },
        "checkpointed activations": {"optimisation": {"activation_checkpointing": True}},
    }
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(place, Path(folder))
        spec["optimisation"]["steps"] = place.fleet.short_steps
        for number, (name, sections) in enumerate(ways.items()):
            chosen = {**spec, **{key: {**spec.get(key, {}), **changes} for key, changes in sections.items()}}
            yield name, attempted(partial(run_fleet, place, Path(folder), chosen, f"options-{number}"))


def part_example(place: Place) -> Found:
    """Run the README's main example as it stands, but for its device: what the held-out accuracy rises to."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flotilla", "run", str(EXAMPLE), "--runs", folder, "--plain", "--fresh"]
        for key in ("rollout.engine.device", "parallelism.device"):
            command += ["--set", f"{key}={place.device}"]
        command += [] if place.is_gpu else ["--set", "optimisation.steps=5", "--set", "evaluation.every_versions=2"]
        started = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=FLEET_SECONDS, check=False)
        taken = time.perf_counter() - started
        if ended.returncode:
            yield "example", {"failed": (ended.stdout + ended.stderr)[-LAST_CHARACTERS:], "seconds": taken}
            return
        (path,) = Path(folder).rglob("summary.json")
        yield "example", {"seconds": taken, "summary": json.loads(path.read_text(encoding="utf-8"))}


def part_servers(place: Place) -> Found:
    """Run the fleet with SGLang and vLLM as its engine, each where its interpreter is named."""
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(place, Path(folder))
        spec["optimisation"]["steps"] = place.fleet.short_steps
        for kind, variable in SERVERS.items():
            if not os.environ.get(variable):
                yield kind, f"left out: {variable} is not set"
                continue
            engine = {**spec["rollout"]["engine"], "kind": kind, "options": server_options(place, kind)}
            chosen = {**spec, "rollout": {**spec["rollout"], "engine": engine}}
            yield kind, attempted(partial(run_fleet, place, Path(folder), chosen, kind, SERVER_SECONDS))


def server_options(place: Place, kind: str) -> dict[str, Any]:
    """Leave memory to the trainer, which is on the same device."""
    if kind == "sglang":
        return {"mem_fraction_static": 0.3} if place.is_gpu else {}
    return {"gpu_memory_utilization": 0.3} if place.is_gpu else {"kv_cache_memory_bytes": 268435456}
