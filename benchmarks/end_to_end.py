"""The whole fleet against TRL's ``GRPOTrainer``, on all cores of one machine: same checkpoint, data, batch and reward.

TRL is in an environment of its own, whose interpreter ``FLOTILLA_TRL_PYTHON`` names (``pip install trl``); without it
only our figures are there. Four parts:

- *equal_work*: seconds per step of the hard arithmetic preset (16 groups of 8), no filter, no evaluation: as many
  samples and optimiser updates per step. ``on_policy``: generation and training take turns on both sides. ``behind``:
  samples may be a version old: ours as the preset has it, TRL generates for two steps at a time. At least 3.5x is
  wanted.
- *accuracy*: time until greedy answers to the held-out problems are 80 % right, with the preset as it is. Weights are
  kept every second step on both sides, and judged afterwards by one and the same code. At least 3x is wanted.
- *real_size*: seconds per step of a Qwen3 of 36 million parameters with random weights, 32 samples of 64 tokens, and
  default settings. The reward is a checksum of the answer, since none would ever be right. At least 1.6x is wanted.
- *large*: the same with the shape of Qwen3-0.6B, 16 samples of 32 tokens: ``lora``, adapters of rank 16 on all linear
  layers (TRL's by ``peft``), and ``full``, all weights. At least 2x is wanted. Takes half an hour and 20 GB of memory,
  so it is run only where it is named.

``--dtype bfloat16`` has the two with random weights in bfloat16, on both sides.

Neither side's start counts: ours is counted from when the experiment runs, TRL's from when its training begins, and
steps from when the first ones are over. The sides take turns, seed by seed, and so does who is first. Figures are
medians over seeds. TRL computes in float32 (or ``--dtype``), without recomputing activations, a step's samples in one
pass, on all cores.

``python -m benchmarks.end_to_end [--part equal_work accuracy real_size large] [--seeds 0 1 2] [--json FILE]``
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import plain_rewards
from benchmarks.end_to_end_runs import Run, Shown, run_ours, run_trl, saying
from benchmarks.held_out import accuracies
from benchmarks.models import write_model
from examples.arithmetic.problems import training_set, worked_solution
from examples.arithmetic.settings import settings_of
from examples.arithmetic.tokenizer import build_tokenizer
from flotilla.launch_file import read_launch_file, run_prepare
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.policy_loss import PpoConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError
from tests.fleet import ROOT

PRESET = ROOT / "examples" / "arithmetic" / "hard.yaml"
WANTED = {"equal_work": 3.5, "accuracy": 3.0, "real_size": 1.6, "large": 2.0}
ACCURACY = 0.8
KEEP_EVERY = 2
SYNCHRONOUS = ["asynchrony.staleness_threshold=0", "asynchrony.on_weight_update=drain"]
ROWS = 200


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        steps, warmup: of equal_work; the first ones and the last are not counted.
        learning_steps: of accuracy.
        real, large: models with random weights.
        held_out: problems that accuracy is measured on.
    """

    steps: int = 41
    warmup: int = 8
    learning_steps: int = 70
    real: "RandomModel" = field(default_factory=lambda: RandomModel("36M", steps=8, warmup=2))
    large: "RandomModel" = field(default_factory=lambda: RandomModel("0.6B", steps=5, warmup=2, groups=2, tokens=32))
    held_out: int = 512


@dataclass(frozen=True)
class RandomModel:
    """A model of a given shape, and what is run with it.

    Attributes:
        shape: its name in ``benchmarks.models``.
        steps, warmup: the first ones and the last are not counted.
        groups: of 8 samples each, in a step.
        tokens: of each sample.
        dtype: of the weights.
    """

    shape: str
    steps: int
    warmup: int
    groups: int = 4
    tokens: int = 64
    dtype: str = "float32"


QUICK = Size(
    steps=5,
    warmup=1,
    learning_steps=4,
    real=RandomModel("tiny", steps=4, warmup=1),
    large=RandomModel("tiny", steps=4, warmup=1, groups=2, tokens=32),
    held_out=64,
)
LORA_RANK = 16


@dataclass(frozen=True)
class Trial:
    """What both sides are given.

    Attributes:
        spec: the experiment.
        rows: training data that both read.
        reward: the function of ``plain_rewards``.
        steps_per_generation: of TRL; 2: samples of the second step are a version old.
    """

    spec: ExperimentSpec
    rows: Path
    reward: str
    steps_per_generation: int = 1

    def for_trl(self, keep_every: int) -> dict[str, Any]:
        """Return the same experiment as the settings of ``trl_run``."""
        spec, optimisation = self.spec, self.spec.optimisation
        loss = spec.algorithm.policy_loss
        assert isinstance(loss, PpoConfig)
        return {
            "model": spec.model.path,
            "rows": str(self.rows),
            "reward": self.reward,
            "samples": spec.groups_per_step * spec.rollout.group_size,
            "group_size": spec.rollout.group_size,
            "max_new_tokens": spec.rollout.sampling.max_new_tokens,
            "steps": optimisation.steps,
            "learning_rate": optimisation.learning_rate,
            "warmup_updates": optimisation.warmup_updates,
            "betas": optimisation.betas,
            "max_grad_norm": optimisation.max_grad_norm,
            "weight_decay": optimisation.weight_decay,
            "clip_low": loss.clip_low,
            "clip_high": loss.clip_high,
            "seed": spec.seed,
            "steps_per_generation": self.steps_per_generation,
            "threads": len(os.sched_getaffinity(0)),
            "keep_every": keep_every,
            "dtype": "float32" if spec.model.dtype == "auto" else spec.model.dtype,
            "lora": None if spec.model.lora is None else {"rank": spec.model.lora.rank, "alpha": spec.model.lora.alpha},
        }


def hard(seed: int, *overrides: str) -> Trial:
    """Make the hard preset's model and data if they are missing, and an experiment on them."""
    launch = read_launch_file(PRESET, [f"seed={seed}", "evaluation=null", *overrides])
    asyncio.run(run_prepare(launch, lambda line: print(f"  prepare: {line}", file=sys.stderr, flush=True)))
    return Trial(launch.spec, Path(str(launch.spec.data.path)), "numeric")


def with_random_weights(seed: int, directory: Path, model: RandomModel, lora_rank: int | None = None) -> Trial:
    """Write a model with random weights, and an experiment on it that sets nothing that it need not."""
    settings = settings_of("standard", 0)
    problems = training_set(ROWS, settings.problems, random.Random(seed))
    texts = [problem.prompt + worked_solution(problem) for problem in problems]
    tokenizer = build_tokenizer(texts, settings.model.vocab_size)
    written = write_model(directory / "model", model.shape, model.dtype)
    tokenizer.save_pretrained(written)
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p.prompt, "answer": str(p.answer)}) + "\n" for p in problems))
    spec = {
        "name": "random-weights",
        "seed": seed,
        "model": {
            "path": str(written),
            "dtype": model.dtype,
            "lora": None if lora_rank is None else {"rank": lora_rank},
        },
        "data": {"path": str(rows), "label_column": "answer"},
        "rollout": {"group_size": 8, "sampling": {"max_new_tokens": model.tokens}},
        "reward": {"components": [{"kind": "custom", "path": f"{plain_rewards.__file__}:score"}]},
        "optimisation": {"steps": model.steps, "groups_per_mini_batch": model.groups, "learning_rate": 1e-5},
    }
    return Trial(validate_spec(spec), rows, "checksum")


def both(trial: Trial, what: str, directory: Path, *, trl_first: bool, keep_every: int = 0) -> tuple[Run, Run | None]:
    """Run both sides, one after the other."""
    directory.mkdir(parents=True)
    steps = trial.spec.optimisation.steps
    folders = os.pathsep.join([str(ROOT), str(directory)])

    def ours() -> Run:
        spec = trial.spec.model_dump(mode="json")
        return run_ours(spec, directory / "fleet", Shown(f"{what} flotilla", steps), FLOTILLA_CODE_FOLDERS=folders)

    def theirs() -> Run | None:
        return run_trl(trial.for_trl(keep_every), directory / "trl", Shown(f"{what} TRL", steps))

    if trl_first:
        found = theirs()
        return ours(), found
    return ours(), theirs()


def row(part: str, mode: str, seed: int, ours: float | None, theirs: float | None, **more: Any) -> dict[str, Any]:
    """Put a comparison's figures together; ``ours`` and ``theirs`` are seconds."""
    ratio = theirs / ours if ours and theirs else None
    return {"part": part, "mode": mode, "seed": seed, "flotilla": ours, "trl": theirs, "ratio": ratio, **more}


def per_step(part: str, mode: str, seed: int, runs: tuple[Run, Run | None], warmup: int) -> dict[str, Any]:
    """Compare the seconds per step of two runs."""
    ours, theirs = runs
    return row(
        part,
        mode,
        seed,
        ours.seconds_per_step(warmup),
        None if theirs is None else theirs.seconds_per_step(warmup),
        tokens=ours.tokens_per_step(warmup),
        trl_tokens=None if theirs is None else theirs.tokens_per_step(warmup),
        waited=statistics.fmean(ours.waited[warmup:-1]),
        computed=statistics.fmean(ours.computed[warmup:-1]),
    )


def equal_work(seed: int, number: int, directory: Path, size: Size) -> Iterator[dict[str, Any]]:
    """Compare steps of equal work."""
    common = [f"optimisation.steps={size.steps}", "reward.filter_zero_spread=false"]
    for mode, overrides, per_generation in (("on_policy", SYNCHRONOUS, 1), ("behind", [], 2)):
        trial = hard(seed, *common, *overrides)
        trial = Trial(trial.spec, trial.rows, trial.reward, per_generation)
        runs = both(trial, f"equal_work {mode} seed {seed}", directory / mode, trl_first=bool(number % 2))
        yield per_step("equal_work", mode, seed, runs, size.warmup)


def real_size(seed: int, number: int, directory: Path, size: Size) -> Iterator[dict[str, Any]]:
    """Compare steps of a model of real size."""
    directory.mkdir(parents=True)
    trial = with_random_weights(seed, directory, size.real)
    runs = both(trial, f"real_size seed {seed}", directory / "runs", trl_first=bool(number % 2))
    yield per_step("real_size", "default", seed, runs, size.real.warmup)


def large(seed: int, number: int, directory: Path, size: Size) -> Iterator[dict[str, Any]]:
    """Compare steps of adapters, and of all weights, of a large model."""
    for mode, rank in (("lora", LORA_RANK), ("full", None)):
        folder = directory / mode
        folder.mkdir(parents=True)
        trial = with_random_weights(seed, folder, size.large, rank)
        runs = both(trial, f"large {mode} seed {seed}", folder / "runs", trl_first=bool(number % 2))
        yield per_step("large", mode, seed, runs, size.large.warmup)


def accuracy(seed: int, number: int, directory: Path, size: Size) -> Iterator[dict[str, Any]]:
    """Compare the time to a held-out accuracy."""
    kept = [f"optimisation.steps={size.learning_steps}", f"checkpoint.every_steps={KEEP_EVERY}"]
    trial = hard(seed, *kept, f"checkpoint.keep={size.learning_steps}")
    what = f"accuracy seed {seed}"
    ours, theirs = both(trial, what, directory, trl_first=bool(number % 2), keep_every=KEEP_EVERY)
    problems = trial.rows.with_name("heldout.jsonl")
    curves = []
    for name, run in (("flotilla", ours), ("TRL", theirs)):
        with saying(f"{what} {name}: judging", lambda text: print(f"  {text}", file=sys.stderr, flush=True)):
            curves.append({} if run is None else accuracies(run.kept, trial.spec, problems, size.held_out, ACCURACY))
    times = [seconds_to(run, curve) for run, curve in zip((ours, theirs), curves, strict=True)]
    yield row("accuracy", "preset", seed, *times, curve=curves[0], trl_curve=curves[1])


def seconds_to(run: Run | None, curve: Mapping[int, float]) -> float | None:
    """Return when a run first was as accurate as wanted, in seconds from its start; None if it never was."""
    reached = [step for step, value in sorted(curve.items()) if value >= ACCURACY]
    return run.seconds_until(reached[0]) if run is not None and reached else None


Part = Callable[[int, int, Path, Size], Iterator[dict[str, Any]]]
PARTS: dict[str, Part] = {"equal_work": equal_work, "accuracy": accuracy, "real_size": real_size, "large": large}
USUAL = [part for part in PARTS if part != "large"]


def lines_of(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the medians of each part and mode."""
    lines = ["part        mode       seeds  flotilla       TRL    ratio  wanted   (seconds; medians)"]
    for part, mode in dict.fromkeys((each["part"], each["mode"]) for each in found):
        rows = [each for each in found if (each["part"], each["mode"]) == (part, mode)]
        cells = []
        for name, form in (("flotilla", "{:9.3f}"), ("trl", "{:9.3f}"), ("ratio", "{:7.2f}x")):
            values = [each[name] for each in rows if each[name] is not None]
            shown = form.format(statistics.median(values)) if values else f"{'-':>9}"[-8 if name == "ratio" else -9 :]
            cells.append(shown)
        lines.append(f"{part:11} {mode:10} {len(rows):5} {' '.join(cells)} {WANTED[part]:6.1f}x")
    return lines


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the parts, seed by seed, and print."""
    size: Size = QUICK if arguments.quick else Size()
    if arguments.steps is not None:
        models = {name: replace(getattr(size, name), steps=arguments.steps) for name in ("real", "large")}
        size = replace(size, steps=arguments.steps, learning_steps=arguments.steps, **models)
    models = {name: replace(getattr(size, name), dtype=arguments.dtype) for name in ("real", "large")}
    size = replace(size, **models)
    found = []
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as directory:
        for number, seed in enumerate(arguments.seeds):
            for part in arguments.part:
                for each in PARTS[part](seed, number, Path(directory) / part / str(seed), size):
                    found.append(each)
                    facts = {key: round(value, 3) if isinstance(value, float) else value for key, value in each.items()}
                    print(json.dumps(facts), flush=True)
    for line in lines_of(found):
        print(line, flush=True)
    return found


def main() -> int:
    """Run what the command line asks for; 130 after Ctrl-C, with nothing left running."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=USUAL)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run (41, 70, 8 and 5 by part)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of random weights")
    parser.add_argument("--quick", action="store_true", help="a few steps of each: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    # A SIGTERM ends it like an error: fleets and children are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        found = run(arguments)
    except KeyboardInterrupt:
        print("ended by Ctrl-C", file=sys.stderr)
        return 130
    except FlotillaError as error:
        raise SystemExit(f"the benchmark ended: {error.detail}") from error
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
