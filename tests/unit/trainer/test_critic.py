"""A critic that begins as a model of its own, with its head where that is a reward model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from flotilla.services.gateway.preflight.checks import paths_of
from flotilla.services.gateway.preflight.models import models_of
from flotilla.services.trainer.checkpoint.manager import beginning, fill_alone, restored_from
from flotilla.services.trainer.models.critic import Critic
from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, ModelError
from tests.fleet import tiny_model
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import a_spec, uneven_groups
from tests.unit.trainer.test_lora import a_state

CPU = torch.device("cpu")


def spec_of(path: Path, **value_loss: Any) -> ExperimentSpec:
    return a_spec(
        model={"path": str(tiny_model())},
        algorithm={"advantage": {"kind": "gae"}, "value_loss": {"path": str(path)} | value_loss},
        optimisation={"steps": 9, "groups_per_mini_batch": 2, "learning_rate": 1e-3},
    )


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """A classifier of the policy's kind and tokenizer, with other weights."""
    folder = tmp_path / "reward-model"
    shutil.copytree(tiny_model(), folder)
    torch.manual_seed(5)
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(tiny_model(), num_labels=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder


def critic_of(spec: ExperimentSpec) -> Critic:
    critic = beginning(spec, CPU).learner.critic
    assert critic is not None
    return critic


def test_a_critic_begins_with_the_body_and_the_head_of_a_reward_model(reward_model: Path) -> None:
    critic = critic_of(spec_of(reward_model))
    expected: nn.Module = AutoModelForSequenceClassification.from_pretrained(reward_model)

    own = {name: tensor for name, tensor in critic.state().items() if name.startswith("weight/")}
    theirs = dict(expected.state_dict())

    assert torch.equal(own.pop("weight/value_head.weight"), theirs.pop("score.weight"))
    assert not own.pop("weight/value_head.bias").any()
    assert {f"weight/{name.removeprefix('model.')}" for name in theirs} == set(own)
    assert all(torch.equal(own[f"weight/{name.removeprefix('model.')}"], value) for name, value in theirs.items())


def test_a_model_without_such_a_head_gives_its_body_alone() -> None:
    critic, copied = critic_of(spec_of(tiny_model())), critic_of(a_spec_without_path())

    own, same = critic.state(), copied.state()

    assert own.keys() == same.keys()
    assert all(torch.equal(own[name], same[name]) for name in own if name.startswith("weight/"))


def a_spec_without_path() -> ExperimentSpec:
    return a_spec(model={"path": str(tiny_model())}, algorithm={"advantage": {"kind": "gae"}})


def test_it_learns_and_goes_on_with_the_same_bits(reward_model: Path, tmp_path: Path) -> None:
    spec = spec_of(reward_model)
    learner = beginning(spec, CPU).learner
    first = learner.train(uneven_groups(2, seed=1), 1)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    fill_alone(learner, folder)
    expected = learner.train(uneven_groups(2, seed=2), 2)

    restored = restored_from(spec, StoredCheckpoint(1, folder, a_state(spec, 1)), CPU).learner
    found = restored.train(uneven_groups(2, seed=2), 2)

    assert found.metrics == expected.metrics
    assert first.metrics["value/mean"] != 0, "a reward model's head has scores at once"


@pytest.mark.parametrize(("own", "expected"), [(None, 2), (0, 0), (4, 4)])
def test_its_warm_up_is_the_policys_unless_it_has_its_own(own: int | None, expected: int) -> None:
    spec = a_spec(
        model={"path": str(tiny_model())},
        algorithm={"advantage": {"kind": "gae"}, "value_loss": {"warmup_updates": own}},
        optimisation={"steps": 9, "groups_per_mini_batch": 2, "learning_rate": 1e-3, "warmup_updates": 2},
    )
    learner = beginning(spec, CPU).learner
    assert learner.critic is not None

    learner.train(uneven_groups(2, seed=1), 1)

    rate = learner.critic.optimizer._adam.param_groups[0]["lr"]
    assert rate == pytest.approx(1e-3 / max(expected, 1))


def test_another_architecture_or_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "gpt2"
    shutil.copytree(tiny_model(), other)
    (other / "model.safetensors").unlink()
    ARCHITECTURES["GPT-2"]().save_pretrained(other)
    swapped = tmp_path / "swapped"
    shutil.copytree(tiny_model(), swapped)
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (first, a), (second, b) = list(vocabulary.items())[20:22]
    vocabulary[first], vocabulary[second] = b, a
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(ModelError, match=r"value_loss\.path: .* is a gpt2, and model.path a qwen3"):
        critic_of(spec_of(other))
    with pytest.raises(ModelError, match=r"value_loss\.path: the tokenizer of .* gives 2 tokens"):
        critic_of(spec_of(swapped))


def test_its_path_is_found_and_checked_as_the_models_is(tmp_path: Path) -> None:
    document = {
        "name": "tiny",
        "model": {"path": "/policy"},
        "data": {"path": "/rows.jsonl"},
        "reward": {"components": [{"kind": "numeric"}]},
        "algorithm": {"advantage": {"kind": "gae"}, "value_loss": {"path": "models/rm/big"}},
        "optimisation": {"steps": 1},
    }
    spec = validate_spec(resolve_paths(document, tmp_path))

    assert models_of(spec)["algorithm.value_loss.path"].path == str(tmp_path / "models/rm/big")
    assert paths_of(spec)["algorithm.value_loss.path"] == str(tmp_path / "models/rm/big")
    local = {"advantage": {"kind": "gae"}, "value_loss": {"path": "models/rm/big", "revision": "main"}}
    with pytest.raises(InvalidSpec, match="revision has an effect only where path"):
        validate_spec(resolve_paths(document | {"algorithm": local}, tmp_path))
