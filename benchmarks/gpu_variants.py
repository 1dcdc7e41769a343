"""The parts of ``benchmarks.gpu`` that run fleets of another kind: models that see, compiled layers, stale answers."""

import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from benchmarks.gpu_fleets import FLEET_SECONDS, GRADER, QUICK_SECONDS, run_fleet, write_experiment
from benchmarks.gpu_place import Figures, Found, Place, attempted
from benchmarks.gpu_trainer import step_batch
from benchmarks.trainer_updates import groups_of, our_learner
from tests.vision_models import COLOURS, KINDS, a_picture, save_vision_model

GAP = "correction/"
"""What names of metrics begin with that say how far apart the log-probabilities of engine and trainer are."""
COMPILED_LAYERS = 2
COMPILED_STEPS = 3
SAME_NORM = 0.02
ASYNCHRONOUS_STEPS = 12


def part_images(place: Place) -> Found:
    """Run fleets of models that see, and compare what engine and trainer make of a picture."""
    for kind in (*KINDS, "qwen3_5"):
        with tempfile.TemporaryDirectory() as folder:
            spec = write_pictures(place, Path(folder), kind)
            found = attempted(partial(run_fleet, place, Path(folder), spec, f"images-{kind.replace('_', '-')}"))
            yield kind, found
            gaps = {name: value for name, value in found.get("last_step", {}).items() if name.startswith(GAP)}
            yield f"{kind}, engine beside trainer", gaps


def write_pictures(place: Place, directory: Path, kind: str) -> dict[str, Any]:
    """Write a random model that sees and rows with pictures, and give the spec, on-policy."""
    size, random = place.fleet, Random(0)
    save_vision_model(directory / "model", kind, hidden=64)
    rows = []
    for number in range(64):
        colour = random.choice(list(COLOURS))
        shape = 8 * random.randint(2, 4), 8 * random.randint(2, 4)
        rows.append(
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": "<image> which colour is this ?"}],
                "images": [{"bytes": a_picture(colour, shape), "path": None}],
                "ability": "sight",
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"split": "train", "index": number},
            }
        )
    (directory / "grade.py").write_text(GRADER, encoding="utf-8")
    parquet.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    return {
        "name": "images",
        "seed": 7,
        "model": {"path": str(directory / "model"), "dtype": place.dtype},
        "data": {"path": str(directory / "train.parquet"), "format": "verl", "images": {"max_pixels": 1024}},
        "rollout": {
            "group_size": size.group_size,
            "sampling": {"max_new_tokens": 4},
            "engine": {"device": place.device, "slots": size.slots, "context_tokens": 128},
        },
        "reward": {"components": [{"kind": "custom", "path": f"{directory / 'grade.py'}:score"}]},
        "optimisation": {
            "steps": size.short_steps,
            "groups_per_mini_batch": size.groups,
            "learning_rate": 1e-3,
        },
        "asynchrony": {"staleness_threshold": 0.0, "on_weight_update": "drain"},
        "checkpoint": {"every_steps": 1000},
        "parallelism": {"device": place.device},
    }


def part_compiled(place: Place) -> Found:
    """Run a whole fleet of a few layers, compiled, then compare such steps in this process with steps as they are."""
    few = replace(place.fleet.shape, layers=min(place.fleet.shape.layers, COMPILED_LAYERS))
    small = replace(place, fleet=replace(place.fleet, shape=few))
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(small, Path(folder))
        spec["optimisation"] |= {"steps": COMPILED_STEPS, "compile_layers": True}
        limit = QUICK_SECONDS if place.is_gpu else FLEET_SECONDS
        yield "fleet", attempted(partial(run_fleet, small, Path(folder), spec, "compiled", limit))
    found = {}
    for compiles in (False, True):
        name = "compiled" if compiles else "as they are"
        found[name] = attempted(partial(compiled_steps, place, compiles=compiles))
        yield name, found[name]
        place.free()
    if not any("failed" in each for each in found.values()):
        norms = [each["gradient_norms"] for each in found.values()]
        worst = max(abs(one - other) / abs(one) for one, other in zip(*norms, strict=True))
        yield "largest_relative_difference_of_a_norm", worst
        assert worst <= SAME_NORM, found


def compiled_steps(place: Place, *, compiles: bool) -> Figures:
    """Train a few steps, and say how long each took and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    shape = place.fleet.shape
    shape = replace(shape, layers=min(shape.layers, COMPILED_LAYERS))
    batch = step_batch(place, shape, "uniform")
    counters.clear()
    with tempfile.TemporaryDirectory() as directory:
        model = place.model(shape)
        model.config.save_pretrained(directory)
        learner = our_learner(Path(directory), batch, model, {"optimisation": {"compile_layers": compiles}})
        groups, seconds, norms = groups_of(batch), [], []
        for step in range(1, COMPILED_STEPS + 1):
            started = time.perf_counter()
            norms.append(learner.train(groups, step).updates[-1].grad_norm)
            place.finish()
            seconds.append(time.perf_counter() - started)
            print(f"  compiles: {compiles}, step {step}: {seconds[-1]:.2f} s", flush=True)
    told = {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")}
    return {"seconds_of_steps": seconds, "gradient_norms": norms, "compiler": told, "layers": shape.layers}


def part_asynchronous(place: Place) -> Found:
    """Run the same work in lockstep and with answers that may be stale: steps per second of both."""
    ways = {
        "lockstep": {"staleness_threshold": 0.0, "on_weight_update": "drain"},
        "asynchronous": {"staleness_threshold": 0.5, "on_weight_update": "interrupt"},
    }
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(place, Path(folder))
        spec["optimisation"]["steps"] = min(place.fleet.steps, ASYNCHRONOUS_STEPS)
        found = {}
        for name, how in ways.items():
            found[name] = attempted(partial(run_fleet, place, Path(folder), {**spec, "asynchrony": how}, name))
            yield name, found[name]
    if any("failed" in each for each in found.values()):
        return
    rates = [each["rates"]["steps_per_second"] for each in found.values()]
    yield "asynchronous_steps_per_lockstep_step", rates[1] / rates[0]
