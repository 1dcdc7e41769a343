"""How much memory trainer and engine take together when they take turns, against the larger of both alone.

``python -m benchmarks.time_sharing [--steps 2] [--hidden 768] [--layers 12]``

A model of about 100 M parameters with random weights is trained for a few on-policy steps, side by side and then in
turns (``resources.sharing: time``). Memory is what trainer's worker and engine have resident, sampled many times a
second: proportional set size, so that an image which both map counts once. ``alone`` is the most that one of them had
in the run side by side. Losses of both runs are compared.
"""

import argparse
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

ENGINE, WORKER = "flotilla.services.rollout.engines.process.child", "flotilla.services.trainer.worker"
SAMPLE_SECONDS = 0.02
MEBIBYTE = 1 << 20
LIMIT = 1.25
"""What is asked for: the peak of both together over the larger alone."""
TOLERANCE = 1e-5


@dataclass
class Peaks:
    """Most bytes of each process, and of both at one moment."""

    alone: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    together: int = 0

    def add(self, now: dict[str, int]) -> None:
        """Note a moment."""
        for name, size in now.items():
            self.alone[name] = max(self.alone[name], size)
        self.together = max(self.together, sum(now.values()))


@contextlib.contextmanager
def watched() -> Iterator[Peaks]:
    """Sample the memory of this process's trainer and engine while the block runs."""
    peaks, over = Peaks(), threading.Event()

    def watch() -> None:
        known: dict[int, str] = {}
        looked = 0.0
        while not over.wait(SAMPLE_SECONDS):
            if time.monotonic() - looked > 1.0:
                known, looked = _processes(), time.monotonic()
            now: dict[str, int] = defaultdict(int)
            for pid, name in known.items():
                now[name] += _resident(pid)
            peaks.add(now)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _processes() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            found.update((child.pid, name) for name in (ENGINE, WORKER) if name in words)
    return found


def _resident(pid: int) -> int:
    """Read a process's proportional set size, in bytes; 0 once it is gone."""
    with contextlib.suppress(OSError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def write_experiment(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write model and rows, and return the spec; half of all answers are right."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from examples.arithmetic.problems import training_set, worked_solution
    from examples.arithmetic.settings import settings_of
    from examples.arithmetic.tokenizer import build_tokenizer

    settings = settings_of("standard", 0)
    problems = training_set(64, settings.problems, Random(0))
    tokenizer = build_tokenizer([p.prompt + worked_solution(p) for p in problems], settings.model.vocab_size)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=arguments.hidden // 12,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    print(f"model: {model.num_parameters() / 1e6:.0f} M parameters, float32", flush=True)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [{"prompt": p.prompt, "answer": "0"} for p in problems]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "grade.py").write_text(
        "import zlib\n\n\ndef score(sample):\n"
        "    return float(zlib.crc32((sample.id + sample.response).encode()) % 2)\n",
        encoding="utf-8",
    )
    return {
        "name": "time-sharing",
        "seed": 7,
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "train.jsonl"), "label_column": "answer"},
        "rollout": {
            "group_size": 4,
            "sampling": {"max_new_tokens": 16},
            "engine": {"slots": 8, "context_tokens": 128, "threads": 1},
            "task_seconds": 600,
        },
        "reward": {"components": [{"kind": "custom", "path": f"{directory / 'grade.py'}:score"}]},
        "optimisation": {"steps": arguments.steps, "groups_per_mini_batch": 2, "learning_rate": 1e-5},
        "asynchrony": {"publication": {"transport": "shared_memory"}},
        "checkpoint": {"every_steps": 100},
        "parallelism": {"threads": 1},
    }


def run(directory: Path, spec: dict[str, Any], sharing: str) -> tuple[Peaks, list[float], float]:
    """Run the experiment; returns peaks, losses by step and seconds."""
    path = directory / f"{sharing}.json"
    path.write_text(json.dumps({**spec, "resources": {"sharing": sharing}}), encoding="utf-8")
    began = time.monotonic()
    command = ["run", str(path), "--plain", "--runs", str(directory / "runs"), "--name", sharing]
    with watched() as peaks:
        code = subprocess.run([sys.executable, "-m", "flotilla", *command], check=False).returncode
    if code:
        sys.exit(f"the run with sharing {sharing} ended with code {code}")
    return peaks, losses_of(directory / "runs" / sharing), time.monotonic() - began


def losses_of(run_directory: Path) -> list[float]:
    """Read the loss of each step from the run's database."""
    (path,) = run_directory.rglob("gateway.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT step, value FROM metrics WHERE name = 'loss/total' ORDER BY sequence")
        found = dict(rows.fetchall())
    return [found[step] for step in sorted(found)]


def main() -> None:
    """Run both and print the comparison; code 1 where it is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = write_experiment(Path(folder), arguments)
        results = {sharing: run(Path(folder), spec, sharing) for sharing in ("none", "time")}
    side, turns = results["none"], results["time"]
    for sharing, (peaks, losses, seconds) in results.items():
        alone = ", ".join(f"{name.split('.')[1]} {size / MEBIBYTE:.0f}" for name, size in peaks.alone.items())
        print(f"{sharing:5} together {peaks.together / MEBIBYTE:6.0f} MiB (alone {alone}); {seconds:.0f} s; {losses}")
    ratio = turns[0].together / max(side[0].alone.values())
    before = side[0].together / max(side[0].alone.values())
    difference = max((abs(one - other) for one, other in zip(side[1], turns[1], strict=True)), default=float("nan"))
    print(f"peak of both over the larger alone: {ratio:.3f} in turns, {before:.3f} side by side (at most {LIMIT})")
    print(f"largest difference of a loss: {difference:.2e} (at most {TOLERANCE:g})")
    sys.exit(not (ratio <= LIMIT and difference <= TOLERANCE))


if __name__ == "__main__":
    main()
