"""Trained tokens per second of the learner, beside a plain loop and TRL's update on the same batch with the same model.

*plain*: transformers' model on rows padded to the longest sequence of the batch, logits of all positions, one
clipped loss, AdamW. *TRL*: the loss of its ``GRPOTrainer`` on samples padded and cut as it does, in an environment of
its own whose interpreter ``FLOTILLA_TRL_PYTHON`` names (``pip install trl``); left out where that is not set. All make
one update of one step: the forward and backward passes, the clip of the gradient, AdamW. Only sampled tokens count.
Rounds are interleaved; figures are medians.

The share of the peak is 6 floating point operations per parameter and token (prompts and samples, no padding; a prompt
counts for each of its samples, though it is computed once), over what a matrix product of 1024 x 1024 reaches in the
same rounds.

``python -m benchmarks.trainer [--model 36M] [--threads 2] [--rounds 5] [--json FILE]``
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from services.trainer.learning.learner import Learner
from services.trainer.models.loading import LoadedModel
from shared.config.load import validate_spec
from shared.schemas.trajectory import FinishReason, Group, Trajectory
from shared.testing.builders import a_task, graded

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 256, "vocab_size": 428,
    },
    "36M": {
        "hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 8192,
    },
}  # fmt: skip
GROUP_SIZE = 8
PROMPT_TOKENS = 24
LEARNING_RATE = 1e-5
CLIP = 0.2
PEAK_SIZE = 1024
TRL_PYTHON = "FLOTILLA_TRL_PYTHON"
CHILD = Path(__file__).with_name("trl_update.py")
START_SECONDS = 300.0


@dataclass(frozen=True)
class Batch:
    """A step's samples.

    Attributes:
        prompts, completions: token ids of each sample, in groups of 8.
        log_probs: of the sampled tokens.
        rewards: one per sample.
        micro_tokens: bound on the positions of one forward pass.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    log_probs: list[list[float]]
    rewards: list[float]
    micro_tokens: int

    @property
    def num_sampled(self) -> int:
        """Tokens that are trained."""
        return sum(map(len, self.completions))

    @property
    def num_computed(self) -> int:
        """Tokens that a forward pass without any padding reads."""
        return self.num_sampled + sum(map(len, self.prompts))

    @property
    def advantages(self) -> list[float]:
        """Of each sample, as GRPO has them."""
        rewards = np.array(self.rewards).reshape(-1, GROUP_SIZE)
        spread = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4
        found: list[float] = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).reshape(-1).tolist()
        return found


@dataclass(frozen=True)
class Row:
    """Trained tokens per second on one batch.

    Attributes:
        peak_bytes: greatest resident memory of this process so far; the plain loop has run in it, too.
    """

    model: str
    lengths: str
    samples: int
    flotilla: float
    plain: float
    trl: float | None
    share_of_peak: float
    peak_bytes: int

    def line(self) -> str:
        """Format it for people."""
        trl = f"{self.trl:9.0f} {self.flotilla / self.trl:7.2f}x" if self.trl else f"{'-':>9} {'-':>8}"
        rates = f"{self.flotilla:9.0f} {self.plain:9.0f} {self.flotilla / self.plain:7.2f}x {trl}"
        return f"{self.model:5} {self.lengths:12} {self.samples:4} {rates} {self.share_of_peak:8.1%}"


HEADER = "model lengths         n  flotilla     plain  vs plain     TRL   vs TRL  of peak"


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


def groups_of(batch: Batch) -> list[Group]:
    """Make the groups that the learner is given."""
    groups = []
    for start in range(0, len(batch.prompts), GROUP_SIZE):
        members = range(start, start + GROUP_SIZE)
        task = a_task(start // GROUP_SIZE, group_size=GROUP_SIZE)
        group = Group(task, tuple(_trajectory(batch, number) for number in members))
        groups.append(graded(group, [batch.rewards[number] for number in members]))
    return groups


def _trajectory(batch: Batch, number: int) -> Trajectory:
    prompt, completion = batch.prompts[number], batch.completions[number]
    return Trajectory(
        token_ids=np.array(prompt + completion, dtype=np.int32),
        loss_mask=np.array([0] * len(prompt) + [1] * len(completion), dtype=np.uint8),
        log_probs=np.array([0.0] * len(prompt) + batch.log_probs[number], dtype=np.float32),
        versions=((0, 0),),
        finish_reason=FinishReason.STOP,
        text="",
    )


def our_update(model: Path, batch: Batch) -> Callable[[], None]:
    """Make a call of one step of the learner, with default settings but for the bound on a forward pass."""
    spec = validate_spec(
        {
            "name": "benchmark",
            "model": {"path": str(model)},
            "data": {"path": "rows.jsonl"},
            "reward": {"components": [{"kind": "numeric"}]},
            "rollout": {"group_size": GROUP_SIZE, "engine": {"context_tokens": 4096}},
            "samples": None,
            "optimisation": {
                "steps": 1000,
                "groups_per_mini_batch": len(batch.prompts) // GROUP_SIZE,
                "learning_rate": LEARNING_RATE,
                "micro_batch_tokens": batch.micro_tokens,
            },
        }
    )
    learner = Learner(spec, LoadedModel(_loaded(model), model))
    groups = groups_of(batch)

    def run() -> None:
        learner.train(groups, 1)

    return run


def plain_update(model: Path, batch: Batch) -> Callable[[], None]:
    """Make a call of the loop that one would write without anything of ours."""
    policy = _loaded(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, fused=True)
    sequences = [prompt + completion for prompt, completion in zip(batch.prompts, batch.completions, strict=True)]
    width = max(map(len, sequences))
    rows = max(1, batch.micro_tokens // width)
    ids, mask, old = (
        torch.zeros(len(sequences), width, dtype=kind) for kind in (torch.int64, torch.bool, torch.float32)
    )
    for number, sequence in enumerate(sequences):
        ids[number, : len(sequence)] = torch.tensor(sequence)
        mask[number, PROMPT_TOKENS : len(sequence)] = True
        old[number, PROMPT_TOKENS : len(sequence)] = torch.tensor(batch.log_probs[number])
    advantages = torch.tensor(batch.advantages)

    def run() -> None:
        for start in range(0, len(sequences), rows):
            part = slice(start, start + rows)
            logits = policy(input_ids=ids[part], use_cache=False).logits[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, ids[part, 1:, None]).squeeze(-1)
            ratio = (log_probs - old[part, 1:]).exp()
            gain = advantages[part, None]
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            torch.autograd.backward((loss * mask[part, 1:]).sum() / batch.num_sampled)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


@contextmanager
def trl_update(model: Path, batch: Batch, threads: int) -> Iterator[Callable[[], float] | None]:
    """Give a call of TRL's update, which returns its seconds; None where no interpreter is named.

    Raises:
        RuntimeError: it does not start, or ends.
    """
    python = os.environ.get(TRL_PYTHON)
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        given = Path(directory) / "batch.json"
        facts = {"learning_rate": LEARNING_RATE, "clip": CLIP, "threads": threads, "group_size": GROUP_SIZE}
        given.write_text(json.dumps(asdict(batch) | facts | {"advantages": batch.advantages, "model": str(model)}))
        command = [python, str(CHILD), str(given)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=directory)

        def run() -> float:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            if not answer:
                raise RuntimeError(f"{python} {CHILD.name} ended: its error is above")
            return float(answer)

        try:
            yield run
        finally:
            assert child.stdin is not None
            child.stdin.close()
            child.wait(START_SECONDS)


def timed(run: Callable[[], None]) -> float:
    """Measure a call, in seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def peak_operations() -> float:
    """Measure what a matrix product reaches, in floating point operations per second."""
    left, right = torch.randn(2, PEAK_SIZE, PEAK_SIZE)
    return 2 * PEAK_SIZE**3 / min(timed(lambda: torch.mm(left, right)) for _ in range(5))


def measure(model: Path, name: str, lengths: str, batch: Batch, *, rounds: int, threads: int) -> Row:
    """Time all of them, one after the other in each round; the first round is not counted."""
    ours, plain = our_update(model, batch), plain_update(model, batch)
    num_parameters = _computing_parameters(model)
    seconds: dict[str, list[float]] = {"flotilla": [], "plain": [], "trl": [], "peak": []}
    with trl_update(model, batch, threads) as trl:
        for number in range(rounds + 1):
            found = {"flotilla": timed(ours), "plain": timed(plain), "peak": peak_operations()}
            if trl is not None:
                found["trl"] = trl()
            if number:
                for key, value in found.items():
                    seconds[key].append(value)
            print(f"  {name} {lengths}: round {number} of {rounds}", file=sys.stderr)
    rate = {key: batch.num_sampled / statistics.median(values) for key, values in seconds.items() if values}
    per_second = 6 * num_parameters * batch.num_computed / statistics.median(seconds["flotilla"])
    return Row(
        model=name,
        lengths=lengths,
        samples=len(batch.prompts),
        flotilla=rate["flotilla"],
        plain=rate["plain"],
        trl=rate.get("trl"),
        share_of_peak=per_second / statistics.median(seconds["peak"]),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def write_model(directory: Path, size: str) -> Path:
    """Write a model with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[size], max_position_embeddings=4096, tie_word_embeddings=True)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(directory)
    return directory


def _loaded(model: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


def _computing_parameters(model: Path) -> int:
    """Count parameters that each token is multiplied with: the tied embedding counts once, as output layer."""
    return sum(each.numel() for each in _loaded(model).parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="36M")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="mean of sampled tokens, about")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="bound on the positions of a forward pass")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", options.model)
        print(HEADER)
        for lengths in ("uniform", "long_tailed"):
            batch = make_batch(
                lengths,
                options.samples,
                SIZES[options.model]["vocab_size"],
                tokens=options.tokens,
                micro_tokens=options.micro_tokens,
            )
            rows.append(measure(model, options.model, lengths, batch, rounds=options.rounds, threads=options.threads))
            print(rows[-1].line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
