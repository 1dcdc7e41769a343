"""The part of ``benchmarks.gpu`` with short fleets of other jobs and options: each says whether it runs on a GPU."""

import copy
import gzip
import json
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_fleets import FLEET_SECONDS, QUICK_SECONDS, run_fleet, write_experiment
from benchmarks.gpu_place import Figures, Found, Place, attempted

JOB_STEPS = 3
PROFILED_STEP, PROFILED_VERSION = 2, 1
KERNEL = '"cat": "kernel"'
"""How a trace of torch's profiler marks a kernel of the GPU."""


def part_jobs(place: Place) -> Found:
    """Run a short fleet of each job and option."""
    yield "routers replayed", attempted(partial(replayed, place))
    with tempfile.TemporaryDirectory() as folder:
        base = write_experiment(place, Path(folder))
        base["optimisation"]["steps"] = JOB_STEPS
        for name, changes in variants(place, Path(folder)).items():
            if isinstance(changes, str):
                yield name, changes
                continue
            spec = merged(base, changes)
            found = attempted(partial(ran, place, Path(folder), spec, name.replace(" ", "-")))
            yield name, found


def variants(place: Place, folder: Path) -> dict[str, dict[str, Any] | str]:
    """Say what differs from the fleet of the other parts; a text says why one is left out."""
    teacher = {"path": str(folder / "model"), "dtype": place.dtype}
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "label": n % 2} for n in range(64)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    of_rows: dict[str, Any] = {"data": {"path": str(folder / "answers.jsonl"), "label_column": None}}
    lora = {"rank": 16, "alpha": 32}
    return {
        "devices and type left to auto": {
            "model": {"dtype": "auto"},
            "parallelism": {"device": "auto"},
            "rollout": {"engine": {"device": "auto"}},
        },
        "liger": {"model": {"kernels": "liger"}}
        if find_spec("liger_kernel") and place.is_gpu
        else "left out: no liger-kernel, or no GPU",
        "4-bit base": {"model": {"lora": {**lora, "quantisation": {"dtype": "nf4"}}}}
        if find_spec("bitsandbytes")
        else "left out: no bitsandbytes",
        "int8 publications": {"asynchrony": {"publication": {"quantisation": "int8"}}},
        "fp8 publications": {"asynchrony": {"publication": {"quantisation": "fp8"}}},
        "critic": {"algorithm": {"advantage": {"kind": "gae"}}},
        "on-policy distillation": {"algorithm": {"distillation": {**teacher, "coefficient": 1.0}}},
        "profiles": {
            "tracking": {
                "profiler": {"steps": [PROFILED_STEP], "engine_versions": [PROFILED_VERSION], "engine_steps": 8}
            }
        },
        "adapters alone": {"model": {"lora": lora}, "asynchrony": {"publication": {"lora": "adapters"}}},
        "kto": of_rows | {"job": {"kind": "kto", "response_column": "completion", "label_column": "label"}},
        "sft with a teacher": of_rows
        | {
            "job": {
                "kind": "sft",
                "response_column": "completion",
                "distillation": {**teacher, "coefficient": 0.5, "divergence": {"kind": "forward_kl", "top_k": 16}},
            }
        },
    }


def replayed(place: Place) -> Figures:
    """Run a fleet of a mixture of experts whose trainer takes the engine's choice of them."""
    shape = replace(place.experts, vocabulary=place.fleet.shape.vocabulary)
    chosen = replace(place, fleet=replace(place.fleet, shape=shape))
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(chosen, Path(folder))
        spec["optimisation"]["steps"] = JOB_STEPS
        spec["algorithm"] = {"router_replay": "R3", "old_log_probs": "recompute"}
        return ran(chosen, Path(folder), spec, "replayed")


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Change a spec, section by section; jobs on finished answers keep nothing of sampling and grading."""
    spec = copy.deepcopy(base)
    if "job" in changes:
        for name in ("rollout", "reward", "asynchrony"):
            spec.pop(name)
        spec["data"] = {}
    for name, value in changes.items():
        spec[name] = changed(spec.get(name, {}), value)
    return spec


def changed(before: Any, value: Any) -> Any:
    """Put a value in the place of another, key by key where both are mappings."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    return {**before, **{key: changed(before.get(key), each) for key, each in value.items()}}


def ran(place: Place, folder: Path, spec: dict[str, Any], name: str) -> Figures:
    """Run one, and give what of it is worth a look."""
    found = run_fleet(place, folder, spec, name, QUICK_SECONDS if place.is_gpu else FLEET_SECONDS)
    run = folder / "runs" / name
    traces = {path.name: kernels_of(path) for path in sorted(run.rglob("profiles/*.json.gz"))}
    shutil.rmtree(run, ignore_errors=True)
    if "failed" in found:
        return found
    found.pop("moments")
    if "profiler" in spec.get("tracking", {}):
        assert len(traces) == 2, f"there are not two traces: {traces}"
        assert all(traces.values()) or not place.is_gpu, f"a trace has no kernels: {traces}"
        found["kernels_in_traces"] = traces
    return found


def kernels_of(path: Path) -> int:
    """Count the kernels of a GPU in a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().count(KERNEL)
