"""The part of ``benchmarks.gpu`` that says what a step of the learner spends: its operators, and how the GPU waits."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_place import Figures, Found, Place, Shape, attempted
from benchmarks.gpu_trainer import learner_of, step_batch
from benchmarks.trainer_updates import groups_of

SHOWN = 15
"""Operators, those that take the most of the device's time."""
WARM_UPS = 2
"""Steps before it: the second has the bound of a pass that the first has measured."""


def part_profile(place: Place) -> Found:
    """Profile one step of the smallest model, with answers of one length and long-tailed ones."""
    shape = next(iter(place.shapes.values()))
    for lengths in ("uniform", "long_tailed"):
        yield lengths, attempted(partial(profiled, place, shape, lengths))
        place.free()


def profiled(place: Place, shape: Shape, lengths: str) -> Figures:
    """Profile one step, beside the same one without a profiler."""
    batch = step_batch(place, shape, lengths)
    with tempfile.TemporaryDirectory() as directory:
        learner, groups = learner_of(place, shape, batch, directory), groups_of(batch)
        for step in range(1, WARM_UPS + 1):
            learner.train(groups, step)
        steps = iter(range(WARM_UPS + 1, 100))
        seconds = place.seconds(lambda: learner.train(groups, next(steps)), rounds=1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.is_gpu else [])]
        with profile(activities=activities) as found:
            learner.train(groups, next(steps))
            place.finish()
        trace = Path(directory) / "trace.json"
        found.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    averages: Any = found.key_averages()
    order = "self_device_time_total" if place.is_gpu else "self_cpu_time_total"
    largest = sorted(averages, key=lambda each: -getattr(each, order))[:SHOWN]
    figures: Figures = {
        "step_seconds": seconds,
        "operators": {each.key[:80]: [round(getattr(each, order) / 1e3, 2), each.count] for each in largest},
    }
    if spans:
        first = min(each["ts"] for each in spans)
        whole = max(each["ts"] + each["dur"] for each in spans) - first
        figures |= {"kernels": len(spans), "device_span_seconds": whole / 1e6, "idle_share": 1 - busy(spans) / whole}
        figures["peak_gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def busy(spans: list[dict[str, Any]]) -> float:
    """Sum the time in which something is computed, what overlaps once."""
    total, end = 0.0, 0.0
    for each in sorted(spans, key=lambda each: float(each["ts"])):
        until = each["ts"] + each["dur"]
        total += max(0.0, until - max(each["ts"], end))
        end = max(end, until)
    return total
