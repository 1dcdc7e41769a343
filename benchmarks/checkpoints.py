"""How long a step waits for a checkpoint: for the whole of it, or until its state is copied into memory.

Both ways in turns with the same learner: the pause is what training stands still for; a copy is then written (flushed
to the disk, checksums, renamed) while steps are trained, which is compared with steps while nothing is. Figures are
medians, and the ratio is that of each round's own two. The directory decides which disk it is.

``python -m benchmarks.checkpoints [--model 36M] [--threads 2] [--rounds 5] [--directory DIR] [--json FILE]``
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.models import SIZES, write_model
from benchmarks.trainer import make_batch
from benchmarks.trainer_updates import groups_of, our_learner
from flotilla.services.trainer.checkpoint.manager import CheckpointManager, CopiedCheckpoint, Progress
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.schemas.trajectory import Group

MICRO_TOKENS = 4096


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds, in seconds.

    Attributes:
        checkpoint_bytes: of all files.
        pause_at_once, pause_copied: what training stands still for.
        pause_ratio: the first over the second.
        written: a copied checkpoint, from the copy's end until it is durable.
        step, step_beside: a step while nothing is written, and the mean of those while a copy is.
    """

    model: str
    checkpoint_bytes: int
    pause_at_once: float
    pause_copied: float
    pause_ratio: float
    written: float
    step: float
    step_beside: float

    def lines(self) -> str:
        """Format them for people."""
        return (
            f"{self.model}, {self.checkpoint_bytes / 1e6:.0f} MB on disk\n"
            f"pause: {self.pause_at_once:.3f} s at once, {self.pause_copied:.3f} s copied, "
            f"{self.pause_ratio:.1f}x shorter\n"
            f"written after {self.written:.3f} s beside the steps\n"
            f"a step: {self.step:.3f} s, {self.step_beside:.3f} s while a copy is written "
            f"({self.step_beside / self.step - 1:+.0%})"
        )


class Bench:
    """One learner whose checkpoints are written into a directory."""

    def __init__(self, learner: Learner, groups: Sequence[Group], directory: Path) -> None:
        self._learner, self._groups, self._directory = learner, groups, directory
        self._manager = CheckpointManager("benchmark", CheckpointStorage(directory, keep=1))
        self._progress = Progress.start()
        self._line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=1_000_000)

    def step(self) -> None:
        """Train a step, the same groups again."""
        self._progress.step += 1
        self._learner.train(self._groups, self._progress.step)

    def save(self) -> Path:
        """Write a checkpoint at once."""
        return self._manager.save(self._learner, self._progress, self._line)

    def copy(self) -> CopiedCheckpoint:
        """Copy one into memory."""
        copied = self._manager.copy(self._learner, self._progress, self._line)
        if copied is None:
            raise SystemExit("too little memory is free for a copy")
        return copied

    def write(self, copied: CopiedCheckpoint) -> None:
        """Write it to the disk."""
        self._manager.write(copied)


def measure(bench: Bench, model: str, rounds: int) -> Figures:
    """Take turns."""
    found: dict[str, list[float]] = {name: [] for name in ("at once", "copied", "written", "step", "beside")}
    size = 0
    for number in range(rounds + 1):
        round_of = dict.fromkeys(found, 0.0)
        round_of["step"] = timed(bench.step)
        started = time.perf_counter()
        path = bench.save()
        round_of["at once"] = time.perf_counter() - started
        size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        bench.step()
        started = time.perf_counter()
        copied = bench.copy()
        round_of["copied"] = time.perf_counter() - started
        round_of["written"], round_of["beside"] = _beside(bench, copied)
        if number:  # the first warms up
            for name, value in round_of.items():
                found[name].append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = [a / b for a, b in zip(found["at once"], found["copied"], strict=True)]
    return Figures(
        model,
        size,
        medians["at once"],
        medians["copied"],
        statistics.median(ratios),
        medians["written"],
        medians["step"],
        medians["beside"],
    )


def _beside(bench: Bench, copied: CopiedCheckpoint) -> tuple[float, float]:
    """Write a copy while steps are trained; returns the seconds of both, those of a step on average."""
    seconds: list[float] = []

    def write() -> None:
        seconds.append(timed(lambda: bench.write(copied)))

    writing, steps = threading.Thread(target=write), []
    writing.start()
    while writing.is_alive():
        steps.append(timed(bench.step))
    writing.join()
    return seconds[0], statistics.fmean(steps)


def timed(work: Callable[[], None]) -> float:
    """Measure the seconds of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="36M")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="mean of sampled tokens, about")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where checkpoints are written; default: temporary files")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    vocabulary = SIZES[options.model]["vocab_size"]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        model = write_model(Path(directory) / "model", options.model)
        batch = make_batch("uniform", options.samples, vocabulary, tokens=options.tokens, micro_tokens=MICRO_TOKENS)
        bench = Bench(our_learner(model, batch), groups_of(batch), Path(directory) / "checkpoints")
        figures = measure(bench, options.model, options.rounds)
    print(figures.lines())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
