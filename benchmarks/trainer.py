"""Trained tokens per second of the learner, beside a plain loop and TRL's update on the same batch with the same model.

*plain*: transformers' model on rows padded to the longest sequence of the batch, logits of all positions, one
clipped loss, AdamW. *TRL*: the loss of its ``GRPOTrainer`` on samples padded and cut as it does, in an environment of
its own whose interpreter ``FLOTILLA_TRL_PYTHON`` names (``pip install trl``); left out where that is not set. All make
one update of one step: the forward and backward passes, the clip of the gradient, AdamW. Only sampled tokens count.
Rounds are interleaved; figures are medians. *earlier*: the learner of another checkout of this project, which
``--earlier`` names, beside the present one, each in a process of its own.

Parts, each of which ends within ``--seconds`` (but for a start and one round, which are always made):

- ``uniform`` and ``long_tailed``: the learner beside those that ``--beside`` names.
- ``step``: the learner beside the earlier one; left out where ``--earlier`` is not given.

The share of the peak is 6 floating point operations per parameter and token (prompts and samples, no padding; a prompt
counts for each of its samples, though it is computed once), over what a matrix product of 1024 x 1024 reaches in the
same rounds.

``python -m benchmarks.trainer [--part uniform long_tailed step] [--beside plain trl] [--earlier DIR] [--json FILE]``
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.models import SIZES, write_model
from benchmarks.trainer_updates import (
    CLIP,
    GROUP_SIZE,
    LEARNING_RATE,
    PROMPT_TOKENS,
    Batch,
    load_policy,
    our_update,
    plain_update,
    timed,
)

PEAK_SIZE = 1024
TRL_PYTHON = "FLOTILLA_TRL_PYTHON"
TRL_UPDATE = Path(__file__).with_name("trl_update.py")
OUR_UPDATE = Path(__file__).with_name("trainer_updates.py").resolve()
OURS, EARLIER, PLAIN, TRL, PEAK = "flotilla", "earlier", "plain", "trl", "peak"
LENGTHS = {"uniform": "uniform", "long_tailed": "long_tailed", "step": "uniform"}
END_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """Trained tokens per second on one batch; None for what was not run.

    Attributes:
        rounds: that were counted.
        peak_bytes: greatest resident memory of this process so far; the plain loop has run in it, too.
    """

    model: str
    part: str
    samples: int
    rounds: int
    flotilla: float
    plain: float | None
    trl: float | None
    earlier: float | None
    share_of_peak: float
    peak_bytes: int

    def line(self) -> str:
        """Format it for people."""
        others = (
            f"{rate:9.0f} {self.flotilla / rate:6.2f}x" if rate else f"{'-':>9} {'-':>7}"
            for rate in (self.plain, self.trl, self.earlier)
        )
        start = f"{self.model:5} {self.part:12} {self.samples:4} {self.rounds:6} {self.flotilla:9.0f}"
        return f"{start} {' '.join(others)} {self.share_of_peak:8.1%}"


HEADER = "model part            n rounds  flotilla     plain  ratio       TRL  ratio   earlier  ratio  of peak"


def make_batch(name: str, num_samples: int, vocab_size: int, *, tokens: int, micro_tokens: int) -> Batch:
    """Draw a step's samples: ``uniform`` lengths, or ``long_tailed`` ones of about the same mean (log-normal)."""
    random = np.random.default_rng(0)
    lengths = [tokens] * num_samples
    if name == "long_tailed":
        drawn = random.lognormal(np.log(tokens / 2), 1.0, num_samples)
        lengths = np.clip(drawn, 4, 8 * tokens).astype(int).tolist()

    def some(count: int) -> list[int]:
        found: list[int] = random.integers(2, vocab_size, count).tolist()
        return found

    prompts = [prompt for _ in range(num_samples // GROUP_SIZE) for prompt in [some(PROMPT_TOKENS)] * GROUP_SIZE]
    log_probs = [(-np.log(vocab_size) + 0.01 * random.standard_normal(length)).tolist() for length in lengths]
    rewards = [float(number % 2) for number in range(num_samples)]
    return Batch(prompts, [some(length) for length in lengths], log_probs, rewards, micro_tokens)


@contextmanager
def child(command: Sequence[str], facts: Mapping[str, object], **environment: str) -> Iterator[Callable[[], float]]:
    """Give a call of another process's update, which returns its seconds.

    The process is given the name of a file with the facts, makes an update for each line, and answers with its seconds.

    Raises:
        RuntimeError: it does not start, or ends.
    """
    with tempfile.TemporaryDirectory() as directory:
        given = Path(directory) / "batch.json"
        given.write_text(json.dumps(facts))
        process = subprocess.Popen(
            [*command, str(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=os.environ | environment,
        )
        requests, answers = process.stdin, process.stdout
        assert requests is not None and answers is not None

        def run() -> float:
            requests.write("go\n")
            requests.flush()
            answer = answers.readline()
            if not answer:
                raise RuntimeError(f"{' '.join(command)} ended: its error is above")
            return float(answer)

        try:
            yield run
        finally:
            requests.close()
            process.wait(END_SECONDS)


def seconds_at_peak() -> float:
    """Measure the least time that a matrix product of 1024 x 1024 takes."""
    left, right = torch.randn(2, PEAK_SIZE, PEAK_SIZE)
    return min(timed(lambda: torch.mm(left, right)) for _ in range(5))


def alternate(
    runs: Mapping[str, Callable[[], float]], *, rounds: int, end: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, list[float]]:
    """Time all of them, one after the other in each round, the order turned round every second time.

    The first round is not counted, the second is always made, and none that would end after the end if it took as
    long as the longest.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    longest = 0.0
    for number in range(rounds + 1):
        started = clock()
        if number > 1 and started + longest > end:
            break
        for name in list(runs) if number % 2 else reversed(list(runs)):
            taken = runs[name]()
            if number:
                seconds[name].append(taken)
        longest = max(longest, clock() - started)
        print(f"  round {number} of at most {rounds}: {longest:.1f} s", file=sys.stderr)
    return seconds


def measure(part: str, model: Path, options: argparse.Namespace) -> Row:
    """Run a part."""
    end = time.monotonic() + options.seconds
    vocab_size = SIZES[options.model]["vocab_size"]
    sizes = {"tokens": options.tokens, "micro_tokens": options.micro_tokens}
    batch = make_batch(LENGTHS[part], options.samples, vocab_size, **sizes)
    facts = {"learning_rate": LEARNING_RATE, "clip": CLIP, "threads": options.threads, "group_size": GROUP_SIZE}
    facts |= asdict(batch) | {"advantages": batch.advantages, "model": str(model)}
    runs: dict[str, Callable[[], float]] = {}
    with ExitStack() as children:
        if part == "step":
            ourselves = [sys.executable, "-P", str(OUR_UPDATE)]
            for name, checkout in ((OURS, OUR_UPDATE.parents[1]), (EARLIER, options.earlier.resolve())):
                runs[name] = children.enter_context(child(ourselves, facts, PYTHONPATH=str(checkout)))
        else:
            ours = our_update(model, batch)
            runs[OURS] = lambda: timed(ours)
        if part != "step" and PLAIN in options.beside:
            plain = plain_update(model, batch)
            runs[PLAIN] = lambda: timed(plain)
        if part != "step" and TRL in options.beside and (python := os.environ.get(TRL_PYTHON)):
            runs[TRL] = children.enter_context(child([python, str(TRL_UPDATE)], facts))
        runs[PEAK] = seconds_at_peak
        seconds = alternate(runs, rounds=options.rounds, end=end)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    rate = {name: batch.num_sampled / value for name, value in middle.items()}
    operations = 6 * _computing_parameters(model) * batch.num_computed
    return Row(
        model=options.model,
        part=part,
        samples=len(batch.prompts),
        rounds=len(seconds[OURS]),
        flotilla=rate[OURS],
        plain=rate.get(PLAIN),
        trl=rate.get(TRL),
        earlier=rate.get(EARLIER),
        share_of_peak=operations / middle[OURS] / (2 * PEAK_SIZE**3 / middle[PEAK]),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _computing_parameters(model: Path) -> int:
    """Count parameters that each token is multiplied with: the tied embedding counts once, as output layer."""
    return sum(each.numel() for each in load_policy(model).parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _read_options(arguments)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", options.model)
        print(HEADER)
        for part in options.part:
            if part == "step" and options.earlier is None:
                continue
            rows.append(measure(part, model, options))
            print(rows[-1].line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("--part", nargs="+", choices=sorted(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--beside", nargs="*", choices=(PLAIN, TRL), default=[PLAIN, TRL])
    parser.add_argument("--earlier", type=Path, help="another checkout of this project, for the part step")
    parser.add_argument("--model", choices=sorted(SIZES), default="36M")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="mean of sampled tokens, about")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="bound on the positions of a forward pass")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12, help="of each part, at most")
    parser.add_argument("--seconds", type=float, default=110.0, help="that each part may take")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
