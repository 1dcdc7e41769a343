"""One update of one step on a given batch: the learner's, and a plain loop's on padded rows.

Run as a child of ``benchmarks.trainer`` it reads a batch from the file that its argument names, makes an update of the
learner for each line of standard input, and writes its seconds: the learner is that of the checkout on its path.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.schemas.trajectory import FinishReason, Group, Trajectory
from flotilla.shared.testing.builders import a_task, graded

GROUP_SIZE = 8
PROMPT_TOKENS = 24
LEARNING_RATE = 1e-5
CLIP = 0.2


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
    learner, groups = our_learner(model, batch), groups_of(batch)

    def run() -> None:
        learner.train(groups, 1)

    return run


def our_learner(
    model: Path, batch: Batch, policy: torch.nn.Module | None = None, sections: Mapping[str, Any] | None = None
) -> Learner:
    """Make a learner with default settings but for the bound on a forward pass.

    Args:
        model: directory that it is loaded from.
        batch: that it will train.
        policy: the model, if it is loaded already.
        sections: of the spec, whose keys are set besides.
    """
    spec: dict[str, Any] = {
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
    spec |= {name: {**spec.get(name, {}), **changes} for name, changes in (sections or {}).items()}
    return Learner(validate_spec(spec), LoadedModel(load_policy(model) if policy is None else policy, model))


def plain_update(model: Path, batch: Batch, policy: torch.nn.Module | None = None) -> Callable[[], None]:
    """Make a call of the loop that one would write without anything of ours."""
    policy = load_policy(model) if policy is None else policy
    device = next(policy.parameters()).device
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
    advantages = torch.tensor(batch.advantages, device=device)
    ids, mask, old = (each.to(device) for each in (ids, mask, old))

    def run() -> None:
        for start in range(0, len(sequences), rows):
            part = slice(start, start + rows)
            logits = policy(input_ids=ids[part], use_cache=False).logits[:, :-1].float()
            log_probs = logits.log_softmax(-1).gather(-1, ids[part, 1:, None]).squeeze(-1)
            ratio = (log_probs - old[part, 1:]).exp()
            gain = advantages[part, None]
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            torch.autograd.backward((loss * mask[part, 1:]).sum() / batch.num_sampled)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def load_policy(model: Path) -> torch.nn.Module:
    """Load the model in float32."""
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


def timed(run: Callable[[], None]) -> float:
    """Measure a call, in seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Answer each line with the seconds of an update of the learner."""
    facts = json.loads(Path(sys.argv[1]).read_text())
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(facts["threads"])
    update = our_update(Path(facts["model"]), Batch(**{each.name: facts[each.name] for each in fields(Batch)}))
    for _ in sys.stdin:
        print(timed(update), flush=True)


if __name__ == "__main__":
    main()
