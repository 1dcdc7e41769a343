"""Groups and models that the trainer's tests are about."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla.services.trainer.data.live_settings import LiveSettings
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.live_changes import AdoptAnswer, AdoptRequest
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.testing.builders import a_task

VOCABULARY = 32


def a_model(**config: Any) -> Qwen3ForCausalLM:
    """Make a random Qwen3 of 2 layers."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(defaults | config))).eval()


def a_trajectory(
    prompt: int, turns: Sequence[int], reward: float | None, *, seed: int = 0, version: int = 0, **fields: Any
) -> Trajectory:
    """Make a trajectory: a prompt, then sampled tokens and observations in turn (the first turn is sampled)."""
    generator = np.random.default_rng(seed)
    mask = [0] * prompt
    for number, length in enumerate(turns):
        mask += [1 - number % 2] * length
    made = Trajectory(
        token_ids=generator.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        log_probs=np.where(np.array(mask), -3.4 - 0.1 * generator.random(len(mask)), 0).astype(np.float32),
        versions=fields.pop("versions", ((0, version),)),
        finish_reason=FinishReason.STOP,
    )
    return made if reward is None else made.graded(GradeStatus.SCORED, reward)


def uneven_groups(count: int = 4, size: int = 4, *, seed: int = 0, prompt: int = 0) -> list[Group]:
    """Make groups of very uneven lengths; some have several turns.

    Args:
        prompt: tokens of the prompt that a group's members have in common; 0 for one of its own each.
    """
    generator = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        members = []
        for member in range(size):
            turns = [int(generator.integers(1, 30))]
            if member % 3 == 2:
                turns += [int(generator.integers(1, 5)), int(generator.integers(1, 9))]
            length = prompt or int(generator.integers(2, 9))
            members.append(a_trajectory(length, turns, float(generator.normal()), seed=seed + 97 * number + member))
            members[-1].token_ids[:prompt] = members[0].token_ids[:prompt]
        groups.append(Group(a_task(number, group_size=size), tuple(members)))
    return groups


def a_group(rewards: Sequence[float | None], task: Task | int = 0, **fields: Any) -> Group:
    """Make a group with these rewards; None for one without."""
    made = task if isinstance(task, Task) else a_task(task, group_size=len(rewards))
    return Group(made, tuple(a_trajectory(3, [4], reward, seed=n, **fields) for n, reward in enumerate(rewards)))


def a_spec(**sections: Any) -> ExperimentSpec:
    """Make a small spec; sections are merged into the defaults."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": "/nowhere"},
        "data": {"path": "unused.jsonl"},
        "rollout": {"group_size": 4},
        "reward": {"components": [{"kind": "exact"}]},
        "optimisation": {"steps": 5, "groups_per_mini_batch": 4, "learning_rate": 1e-3},
        "asynchrony": {"staleness_threshold": 0},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | dict(values)
    return validate_spec(document)


def no_changes(spec: ExperimentSpec) -> LiveSettings:
    """Settings of an experiment of which nothing is changed."""

    async def ask(_: AdoptRequest) -> AdoptAnswer:
        raise AssertionError("nothing was changed")

    return LiveSettings(spec, (), ask, lambda _: None)
