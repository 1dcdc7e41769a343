"""Does every algorithm learn? Each setting trains the arithmetic example from the same start, for a few steps.

One process, synchronous: the embedded engine samples, the numeric verifier grades, the trainer's own ``Learner`` makes
two optimiser updates per step (so ratios differ from 1 in the second), the new weights go back into the engine. Budget
by default: 20 steps of 16 groups of 8, with 3 seeds; held-out accuracy is that of greedy answers to 256 problems that
share no chain of operations with a training problem.

``python -m benchmarks.ablation --prepared DIR [--steps 20] [--seeds 3] [--settings grpo rloo] [--json FILE]``: DIR
is what ``examples/arithmetic/prepare.py`` made. Prints a table; exit code 1 if a run did not raise accuracy.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flotilla.services.reward.filtering import keeps
from flotilla.services.reward.shaping import Graded, shape
from flotilla.services.reward.verifiers.numeric import NumericVerifier
from flotilla.services.rollout.engines.base import Completion, GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import load_model
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.reward import NumericConfig
from flotilla.shared.config.sections.shaping import GroupFilterConfig, OverlongConfig, ShapingConfig, SpreadAboveConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.grading import GradingSample
from flotilla.shared.schemas.task import Message, Task, sample_seed
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory

MAX_NEW_TOKENS = 40
GROUP_SIZE = 8
NUM_EVALUATED = 256


PLAIN = ShapingConfig()


@dataclass(frozen=True)
class Setting:
    """One algorithm: its section of a spec, and what happens to rewards before it."""

    algorithm: dict[str, Any]
    shaping: ShapingConfig = PLAIN
    group_filter: GroupFilterConfig | None = None


SETTINGS: dict[str, Setting] = {
    "grpo": Setting({"policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}}),
    "rloo": Setting({"advantage": {"kind": "rloo"}}),
    "reinforce++-baseline": Setting({"advantage": {"kind": "reinforce_plus_plus_baseline"}}),
    "ppo with a critic": Setting(
        {"advantage": {"kind": "gae"}, "value_loss": {"learning_rate": 1e-3}, "policy_loss": {"kind": "ppo"}}
    ),
    "gspo": Setting(
        {
            "policy_loss": {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03},
            "aggregation": {"mode": "seq-mean-token-mean"},
        }
    ),
    "cispo": Setting({"policy_loss": {"kind": "cispo"}}),
    "dapo": Setting(
        {"policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28}, "aggregation": {"mode": "token-mean"}},
        ShapingConfig(overlong=OverlongConfig(max_length=MAX_NEW_TOKENS, buffer=8)),
        SpreadAboveConfig(),
    ),
    "dr. grpo": Setting(
        {
            "advantage": {"kind": "dr_grpo"},
            "aggregation": {"mode": "seq-mean-token-sum-norm", "fixed_length": MAX_NEW_TOKENS},
        }
    ),
    "decoupled ppo": Setting({"old_log_probs": "recompute"}),
    "kl_cov": Setting({"policy_loss": {"kind": "kl_cov", "fraction": 0.02}}),
}


@dataclass(frozen=True)
class Outcome:
    """What training gave: shares of right greedy answers, and of right sampled ones in the last steps."""

    accuracy_before: float
    accuracy_after: float
    reward_at_end: float
    seconds: float


@dataclass(frozen=True)
class Problems:
    """Prompts and labels of one file, encoded as a rollout would."""

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, renderer: ChatRenderer) -> "Problems":
        """Read a file of the example's."""
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        prompts = tuple(renderer.prompt_ids((Message("user", row["prompt"]),)) for row in rows)
        return cls(prompts, tuple(row["prompt"] for row in rows), tuple(str(row["answer"]) for row in rows))


class Ablation:
    """Trains one setting.

    Args:
        prepared: what the example's preparation made.
        setting: the algorithm.
        steps: training steps.
        seed: of problems and samples.
    """

    def __init__(self, prepared: Path, setting: Setting, steps: int, seed: int) -> None:
        self._setting, self._seed, self._steps = setting, seed, steps
        self._spec = _spec(prepared / "model", setting, steps, seed)
        self._learner = Learner(self._spec, load_model(prepared / "model", dtype="float32", device=torch.device("cpu")))
        self._engine = TorchEngine(EngineSettings(str(prepared / "model"), slots=128, context_tokens=128))
        self._images = ImagePool(self._learner.weights)
        self._renderer = ChatRenderer.from_directory(str(prepared / "model"))
        self._verifier = NumericVerifier(NumericConfig())
        self._train = Problems.read(prepared / "train.jsonl", self._renderer)
        self._held_out = Problems.read(prepared / "heldout.jsonl", self._renderer)

    def run(self) -> Outcome:
        """Train, and measure before and after."""
        started, rewards = time.perf_counter(), []
        before = self.accuracy()
        order = iter(random.Random(self._seed).sample(range(len(self._train.prompts)), len(self._train.prompts)))
        try:
            for step in range(1, self._steps + 1):
                groups, sampled = self._groups(order, step)
                rewards.append(sampled)
                self._learner.train(groups, step)
                self._engine.request_update(step, self._images.snapshot(), step, OnWeightUpdate.DRAIN)
                self._drain()
            return Outcome(before, self.accuracy(), float(np.mean(rewards[-3:])), time.perf_counter() - started)
        finally:
            self._images.close()

    def accuracy(self) -> float:
        """Share of right greedy answers to held-out problems."""
        sampling = SamplingParameters(MAX_NEW_TOKENS, greedy=True)
        numbers = range(NUM_EVALUATED)
        requests = [GenerationRequest(str(n), self._held_out.prompts[n], (0,), sampling) for n in numbers]
        answers = self._generate(requests)
        return float(np.mean(self._grade(self._held_out, numbers, [answers[str(n)][0] for n in numbers])))

    def _groups(self, order: Iterator[int], step: int) -> tuple[list[Group], float]:
        """Sample groups until a step's worth has passed the filter; also the mean grade of all that was sampled."""
        wanted = self._spec.groups_per_step
        found: list[Group] = []
        grades: list[float] = []
        while len(found) < wanted:
            numbers = [next(order) for _ in range(wanted - len(found))]
            answers = self._generate([self._request(number, step) for number in numbers])
            for number in numbers:
                completions = answers[str(number)]
                graded = self._grade(self._train, [number] * len(completions), completions)
                grades += graded
                group = self._group(number, completions, graded)
                rewards = [t.reward for t in group.trajectories if t.reward is not None]
                if self._setting.group_filter is None or keeps(rewards, self._setting.group_filter):
                    found.append(group)
        return found, float(np.mean(grades))

    def _request(self, number: int, step: int) -> GenerationRequest:
        seeds = tuple(sample_seed(self._seed * 1_000_003 + step * 20_011 + number, k) for k in range(GROUP_SIZE))
        return GenerationRequest(str(number), self._train.prompts[number], seeds, SamplingParameters(MAX_NEW_TOKENS))

    def _group(self, number: int, completions: Sequence[Completion], grades: Sequence[float]) -> Group:
        answers = [
            Graded(grade, len(c.token_ids), c.finish_reason is FinishReason.LENGTH)
            for grade, c in zip(grades, completions, strict=True)
        ]
        rewards = shape(answers, self._setting.shaping).rewards
        made = [
            _trajectory(self._train.prompts[number], completion, float(reward))
            for completion, reward in zip(completions, rewards, strict=True)
        ]
        task = Task(number, number, (Message("user", self._train.texts[number]),), GROUP_SIZE, number)
        return Group(task, tuple(made))

    def _grade(self, problems: Problems, numbers: Sequence[int], completions: Sequence[Completion]) -> list[float]:
        samples = [
            GradingSample(
                id=f"{number}/{k}",
                prompt=problems.texts[number],
                response=self._renderer.text(completion.token_ids.tolist()),
                label=problems.labels[number],
            )
            for k, (number, completion) in enumerate(zip(numbers, completions, strict=True))
        ]
        return [grade.reward or 0.0 for grade in asyncio.run(self._verifier.score(samples))]

    def _generate(self, requests: Sequence[GenerationRequest]) -> dict[str, Sequence[Completion]]:
        for request in requests:
            self._engine.submit(request)
        return self._drain()

    def _drain(self) -> dict[str, Sequence[Completion]]:
        ended: dict[str, Sequence[Completion]] = {}
        while not self._engine.is_idle:
            outcomes = self._engine.step()
            ended |= {o.request_id: o.completions for o in outcomes if isinstance(o, Generated)}
        return ended


def _spec(model: Path, setting: Setting, steps: int, seed: int) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "ablation",
            "seed": seed,
            "model": {"path": str(model)},
            "data": {"path": "train.jsonl"},
            "rollout": {"group_size": GROUP_SIZE, "sampling": {"max_new_tokens": MAX_NEW_TOKENS}},
            "reward": {"components": [{"kind": "numeric"}]},
            "algorithm": setting.algorithm,
            "optimisation": {
                "steps": steps,
                "groups_per_mini_batch": 8,
                "learning_rate": 3e-4,
                "warmup_updates": 4,
                "micro_batch_tokens": 8192,
            },
            "asynchrony": {"require_batches": 2},
        }
    )


def _trajectory(prompt: Sequence[int], completion: Completion, reward: float) -> Trajectory:
    sampled = len(completion.token_ids)
    made = Trajectory(
        token_ids=np.concatenate([np.array(prompt, dtype=np.int32), completion.token_ids]),
        loss_mask=np.array([0] * len(prompt) + [1] * sampled, dtype=np.uint8),
        log_probs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), completion.log_probs]),
        versions=((0, completion.versions[0][1]),),
        finish_reason=completion.finish_reason,
    )
    return made.graded(GradeStatus.SCORED, reward)


def main() -> int:
    """Train the settings and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__)
    parser.add_argument("--prepared", type=Path, required=True, help="output of examples/arithmetic/prepare.py")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Outcome]] = {}
    print("| setting | held-out before | after, mean | after, worst seed | sampled reward at the end | seconds a run |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.settings:
        runs = [Ablation(options.prepared, SETTINGS[name], options.steps, seed).run() for seed in range(options.seeds)]
        found[name] = runs
        after = [run.accuracy_after for run in runs]
        cells = (f"{runs[0].accuracy_before:.1%}", f"{np.mean(after):.1%}", f"{min(after):.1%}")
        end, taken = (float(np.mean([getattr(run, key) for run in runs])) for key in ("reward_at_end", "seconds"))
        print(f"| {name} | {' | '.join(cells)} | {end:.2f} | {taken:.0f} |", flush=True)
        if options.json is not None:
            settings = {name: [asdict(run) for run in runs] for name, runs in found.items()}
            options.json.write_text(json.dumps({"steps": options.steps, "settings": settings}, indent=2) + "\n")
    return 0 if all(run.accuracy_after > run.accuracy_before for runs in found.values() for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
