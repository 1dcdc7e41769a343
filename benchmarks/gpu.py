"""What a machine with one NVIDIA GPU shows of this project, in parts, the most valuable first.

``decoding``: tokens per second of the embedded engine with Triton's kernels and with torch's operators, the largest
model first. ``adapters``: publications of adapters alone: their bytes, and how long sampling pauses for them.
``proof``: what reading the served weights back costs, and that it finds faults. ``throughput``: trained tokens per
second beside a plain loop, and their share of what matrix products reach. ``profile``: what a step of the learner
spends the GPU's time on, and how long the GPU waits. ``halving``: passes that do not fit into the
memory. ``tinker``: updates of the Tinker service's models beside the same on the CPU. ``engine``: log-probabilities of
the embedded engine in bfloat16 beside transformers', at the shapes of Qwen3 with 0.6 and 4 billion parameters and
random weights, and its tokens per second beside ``generate`` and the bound that reading weights and cache sets.
``fleet``: a whole fleet for twenty steps on one GPU, engine and trainer beside each other, and its ledger. ``images``:
fleets of small models that see. ``compiled``: compiled layers. ``asynchronous``: the same fleet in lockstep and with
stale answers. ``training``: steps in bfloat16 with one rank, whole, in FSDP2, and of a mixture of experts, beside the
same steps in float32 on the CPU. ``resume``: an optimiser and a whole run that go on from what was saved. ``sharing``:
a fleet in turns, with the memory of both. ``update``: how long sampling pauses while new weights are served, from
shared memory and from the disk, with a spare copy and without. ``lora``: adapters in a fleet. ``options``: memory kept
on the host, checkpointed activations, stale answers. ``example``: the README's main example. ``pairs``: two
ranks of a trainer over NCCL, and weights over a group of NCCL, on one GPU. ``jobs``: other jobs and options: KTO,
teachers, a critic, publications of 8 bits, 4-bit bases, kernels of Liger, profiles, devices left to ``auto``.
``servers``:
SGLang and vLLM as engines, where their interpreters are named.

``python -m benchmarks.gpu [--part NAME] [--seconds 560] [--cpu-rehearsal] [--json FILE]``; the rehearsal runs every
part in small on the CPU, so that the script itself is tried without one. Each part is a process of its own: one
that fails, hangs or breaks its CUDA context says so, and the next one runs. Figures are written as they come. The exit
code counts the parts with a failure.
"""

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = {
    "decoding": "gpu_engine",
    "adapters": "gpu_publications",
    "proof": "gpu_publications",
    "throughput": "gpu_trainer",
    "profile": "gpu_profile",
    "halving": "gpu_trainer",
    "tinker": "gpu_trainer",
    "engine": "gpu_engine",
    "fleet": "gpu_fleets",
    "images": "gpu_variants",
    "compiled": "gpu_variants",
    "asynchronous": "gpu_variants",
    "training": "gpu_training",
    "resume": "gpu_resume",
    "sharing": "gpu_fleets",
    "update": "gpu_engine",
    "lora": "gpu_fleets",
    "options": "gpu_fleets",
    "example": "gpu_fleets",
    "pairs": "gpu_pairs",
    "jobs": "gpu_jobs",
    "servers": "gpu_fleets",
}
ROOT = Path(__file__).resolve().parents[1]
PART_SECONDS = 560.0
LEAST_SECONDS = 30.0
"""A part is not begun with less than this left."""
KEPT_SECONDS = 100.0
"""Of the time for all parts, for each that comes later."""
MOST_THREADS = 8
"""Of a part that computes on the CPU beside a GPU."""
END_SECONDS = 20.0
"""For a part's processes to end when they are told to; then they are killed."""

Figures = dict[str, Any]


def run_here(part: str, *, rehearses: bool, report: Path) -> None:
    """Run a part in this process; figures are written as they come."""
    # Imported here: whoever only starts parts needs no torch, and no GPU of its own.
    import torch
    import transformers

    from benchmarks.gpu_place import GPU, REHEARSAL

    transformers.utils.logging.disable_progress_bar()
    place = REHEARSAL if rehearses else GPU
    figures: Figures = {"torch": torch.__version__, "transformers": transformers.__version__, "device": place.device}
    # Who ends the part is told where it was.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    started = time.perf_counter()
    try:
        if place.is_gpu:
            if not torch.cuda.is_available():
                raise RuntimeError("there is no GPU that torch can use here; --cpu-rehearsal tries this without one")
            figures["device"] = torch.cuda.get_device_name()
        # Many more threads than the machine lends are slower than one, and torch counts the host's.
        torch.set_num_threads(min(torch.get_num_threads(), MOST_THREADS) if place.is_gpu else 1)
        for name, found in getattr(importlib.import_module(f"benchmarks.{MODULES[part]}"), f"part_{part}")(place):
            figures[name] = found
            print(f"{part}, {name}: {json.dumps(found)}", flush=True)
            write(report, figures)
    except Exception:
        figures["failed"] = traceback.format_exc()
        print(f"{part} failed: {figures['failed']}", flush=True)
    figures["part_seconds"] = time.perf_counter() - started
    write(report, figures)


def run_apart(part: str, *, rehearses: bool, seconds: float) -> Figures:
    """Run a part in a process of its own, and give what it has found, to its end or not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--alone", str(report)]
        command += ["--cpu-rehearsal"] if rehearses else []
        # Services run in folders of their own, and this checkout may not be installed.
        known = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([str(ROOT), *([known] if known else [])])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        why = None
        try:
            code = process.wait(seconds)
            if code:
                why = f"the part's process ended with exit code {code}"
        except subprocess.TimeoutExpired:
            why = f"the part was ended after {seconds:.0f} s"
        finally:
            end_group(process)
        figures: Figures = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    return figures if why is None else {**figures, "failed": why}


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process and of what it started."""
    end = time.monotonic() + END_SECONDS
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def has_failed(figures: Any) -> bool:
    """Whether something says why it failed, at any depth; a ledger counts by that name, too."""
    if not isinstance(figures, dict):
        return False
    return isinstance(figures.get("failed"), str) or any(has_failed(each) for each in figures.values())


def write(report: Path, content: Figures) -> None:
    """Replace a report as a whole: who reads it may come at any moment."""
    unfinished = report.with_name(f"{report.name}.part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(report)


def main() -> int:
    """Run the parts that were asked for; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=MODULES, action="append", help="only this one; may be repeated")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every part in small, on the CPU")
    parser.add_argument("--seconds", type=float, help="for all parts together: none is begun that has no time")
    parser.add_argument(
        "--json", type=Path, help="write the figures there; else to gpu.json in the folder $OUT, if set"
    )
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts, rehearses = arguments.part or list(MODULES), arguments.cpu_rehearsal
    if arguments.alone is not None:
        run_here(parts[0], rehearses=rehearses, report=arguments.alone)
        return 0
    folder = os.environ.get("OUT")
    report = arguments.json or (Path(folder) / "gpu.json" if folder else None)
    end = time.monotonic() + (arguments.seconds or PART_SECONDS * len(parts))
    results: dict[str, Figures] = {}
    for later, part in zip(reversed(range(len(parts))), parts, strict=True):
        left = end - time.monotonic() - END_SECONDS
        if left < LEAST_SECONDS:
            results[part] = {"failed": f"left out: {max(left, 0):.0f} s were left"}
        else:
            seconds = min(max(left - later * KEPT_SECONDS, LEAST_SECONDS), PART_SECONDS)
            results[part] = run_apart(part, rehearses=rehearses, seconds=seconds)
        if report is not None:
            write(report, results)
    print(json.dumps(results, indent=1), flush=True)
    return sum(has_failed(each) for each in results.values())


if __name__ == "__main__":
    sys.exit(main())
