"""The critic: it learns returns, holds the policy back while it warms up, and comes back from a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla.services.trainer.checkpoint.manager import CheckpointManager, Progress
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.testing.builders import a_group
from tests.integration.trainer.fleet import save_tiny_model

VOCABULARY = 1000


def a_model(seed: int = 0, width: int = 16) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval()


def a_spec(path: str = "unused", **value_loss: object) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "critic",
            "model": {"path": path},
            "data": {"path": "unused.jsonl"},
            "reward": {"components": [{"kind": "exact"}]},
            "optimisation": {"steps": 20, "groups_per_mini_batch": 2, "learning_rate": 1e-2},
            "algorithm": {"advantage": {"kind": "gae", "lam": 1.0}, "value_loss": {"clip": None, **value_loss}},
        }
    )


def groups(offset: int = 0) -> list[Group]:
    return [a_group(offset, rewards=[1.0, 1.0]), a_group(offset + 1, rewards=[1.0, 1.0])]


def a_learner(spec: ExperimentSpec) -> Learner:
    return Learner(spec, LoadedModel(a_model(), Path(spec.model.path)))


def test_values_approach_the_returns() -> None:
    learner = a_learner(a_spec(warmup_steps=20))

    losses = [learner.train(groups(), step).metrics["loss/value"] for step in range(1, 16)]

    assert losses[0] == pytest.approx(0.5)  # values start at 0, all returns are 1
    assert losses[-1] < 0.1 * losses[0]


def test_whitened_returns_leave_the_values_in_the_rewards_scale() -> None:
    learner = a_learner(a_spec(warmup_steps=20, whiten_returns=True))
    far = [a_group(0, rewards=[100.0, 102.0]), a_group(1, rewards=[98.0, 100.0])]

    means = [learner.train(far, step).metrics["value/mean"] for step in range(1, 4)]
    assert learner.critic is not None
    restored = learner.critic.moments.restore(torch.tensor(means[-1]))

    assert abs(means[-1]) < 3
    assert float(restored) == pytest.approx(100, abs=5)


def test_the_policy_waits_until_the_critic_is_warm() -> None:
    learner = a_learner(a_spec(warmup_steps=2))
    before = [parameter.detach().clone() for parameter in learner.loaded.model.parameters()]
    changed = []

    for step in (1, 2, 3):
        learner.train(groups(), step)
        now = list(learner.loaded.model.parameters())
        changed.append(any(not torch.equal(a, b) for a, b in zip(now, before, strict=True)))

    assert changed == [False, False, True]


def test_the_critic_is_not_the_policy() -> None:
    learner = a_learner(a_spec())
    assert learner.critic is not None
    own = {parameter.data_ptr() for parameter in learner.loaded.model.parameters()}

    learner.train(groups(), 1)

    assert own.isdisjoint({value.data_ptr() for value in learner.critic.state().values()})
    assert not any(name.startswith("value_head") for name, _ in learner.loaded.model.named_parameters())


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    spec = a_spec(str(save_tiny_model(tmp_path / "model")))
    small = [small_tokens(group) for group in groups()]
    manager = CheckpointManager("e", CheckpointStorage(tmp_path / "checkpoints", keep=2))
    begun = manager.restore(spec)
    learner = begun.learner
    learner.train(small, 1)
    line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=2)
    manager.save(learner, Progress(1, IntervalSet.from_list([[0, 1]]), begun.progress.totals), line)

    restored = manager.restore(spec).learner
    expected, actual = learner.train(small, 2).metrics, restored.train(small, 2).metrics

    assert actual == pytest.approx(expected, rel=1e-6)
    assert actual["loss/value"] > 0


def test_a_critic_of_another_model_is_refused() -> None:
    learner = a_learner(a_spec())
    other = Learner(a_spec(), LoadedModel(a_model(width=32), Path("unused")))
    assert learner.critic is not None and other.critic is not None

    with pytest.raises(ModelError, match="critic"):
        learner.critic.load(other.critic.state(), 0)


def small_tokens(group: Group) -> Group:
    """Fold token ids into the small tokenizer's vocabulary."""
    made = tuple(replace(trajectory, token_ids=trajectory.token_ids % 40 + 2) for trajectory in group.trajectories)
    return replace(group, trajectories=made)
