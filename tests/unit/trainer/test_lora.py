"""Adapters train alone, and what is published is the model with them merged, as peft merges it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from flotilla.services.trainer.checkpoint.export import merged
from flotilla.services.trainer.checkpoint.manager import beginning, fill_alone, restored_from
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.models.lora import Adapters
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.shared.checkpoints.folders import MODEL, OPTIMIZER, CheckpointState, StoredCheckpoint
from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import ADAPTER, check_directory
from flotilla.shared.weights.image.image import WeightImage
from tests.fleet import tiny_model
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups
from tests.unit.trainer.peft.models import LORA, MODELS

GOLDENS = Path(__file__).parent / "peft"


def spec_of(lora: dict[str, Any] | None = None, **sections: Any) -> ExperimentSpec:
    optimisation = {"steps": 4, "groups_per_mini_batch": 2, "learning_rate": 1e-2} | sections.pop("optimisation", {})
    model = {"path": "/nowhere", "lora": {"rank": 4} if lora is None else lora} | sections.pop("model", {})
    return a_spec(model=model, optimisation=optimisation, **sections)


def image_of(weights: FlatParameters, directory: Path) -> dict[str, torch.Tensor]:
    """Write an image and read it as the file that it is."""
    with WeightImage.create(weights.layout.image_bytes, directory=directory) as image:
        weights.snapshot_into(image)
        return load_file(image.path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_alone_are_trained_and_published_with_the_weights(name: str, tmp_path: Path) -> None:
    make = ARCHITECTURES[name]
    learner = Learner(spec_of(), LoadedModel(make(), Path()))
    model, adapters = learner.loaded.model, learner.adapters
    assert adapters is not None

    norm = learner.train(uneven_groups(2), 1).updates[-1].grad_norm

    assert norm > 0
    before = dict(make().named_parameters())
    for key, parameter in model.named_parameters():
        if key not in adapters.names:
            assert torch.equal(parameter, before[key]), key
    assert {key.partition("/")[2] for key in learner.optimizer.state()} == adapters.names
    assert isinstance(learner.weights, FlatParameters)
    image = image_of(learner.weights, tmp_path)
    plain = FlatParameters(make())
    assert {key: tensor.shape for key, tensor in image.items()} == {
        spec.name: torch.Size(spec.shape) for spec in plain.layout.tensors
    }
    merged = make()
    published = FlatParameters(merged)
    with WeightImage.create(plain.layout.image_bytes, directory=tmp_path) as written:
        learner.weights.snapshot_into(written)
        published.load_from(written)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)
    with adapters.disabled():
        base = Policy(make(), temperature=1.0).model  # computes as the learner's does
        torch.testing.assert_close(base(ids).logits, model(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_are_those_that_peft_merges(name: str, tmp_path: Path) -> None:
    golden = load_file(GOLDENS / f"{name}.safetensors")
    model = MODELS[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(golden[f"base/{key}"])
    adapters = Adapters(model, LoraConfig.model_validate(LORA[name]), seed=0)
    adapters.load({key.removeprefix("adapter/"): golden[key] for key in golden if key.startswith("adapter/")})
    names = [key for key, _ in model.named_parameters() if key not in adapters.names]

    image = image_of(FlatParameters(model, names=names, increment=adapters.increment), tmp_path)

    for key, tensor in image.items():
        torch.testing.assert_close(tensor, golden[f"merged/{key}"], atol=1e-6, rtol=0, msg=key)


def test_the_reference_is_the_model_without_its_adapters() -> None:
    algorithm = {"kl": {"placement": "loss"}}
    groups = [uneven_groups(2, seed=seed) for seed in range(3)]
    own = Learner(spec_of(algorithm=algorithm), LoadedModel(a_model(), Path()))
    other = Learner(spec_of(algorithm=algorithm), LoadedModel(a_model(), Path()))
    other.adapters, explicit = None, LoadedModel(a_model(), Path())
    other.reference = Learner(a_spec(algorithm=algorithm), LoadedModel(a_model(), Path()), explicit).reference

    found = [own.train(each, step).metrics["kl/mean"] for step, each in enumerate(groups, 1)]
    expected = [other.train(each, step).metrics["kl/mean"] for step, each in enumerate(groups, 1)]

    assert found[-1] > 0
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("algorithm", [{}, {"old_log_probs": "recompute_at_version"}], ids=["plain", "versions"])
def test_a_restored_learner_goes_on_as_if_never_ended(algorithm: dict[str, Any], tmp_path: Path) -> None:
    base = tiny_model()
    spec = spec_of({"rank": 4, "dropout": 0.3}, model={"path": str(base)}, algorithm=algorithm)
    device = torch.device("cpu")
    learner = beginning(spec, device).learner
    learner.train(uneven_groups(2, seed=1), 1)
    learner.keep_version(1, 0)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    fill_alone(learner, folder)
    expected = dict(learner.train(uneven_groups(2, seed=2), 2).metrics)

    stored = StoredCheckpoint(1, folder, a_state(spec, learner.optimizer.updates - 1))
    restored = restored_from(spec, stored, device).learner
    found = dict(restored.train(uneven_groups(2, seed=2), 2).metrics)

    assert found == expected
    whole = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert (folder / MODEL / ADAPTER).stat().st_size < whole / 3
    assert (folder / OPTIMIZER).stat().st_size < whole
    assert not (folder / MODEL / "model.safetensors").exists()


def a_state(spec: ExperimentSpec, updates: int) -> CheckpointState:
    return CheckpointState(
        experiment_id="e",
        step=1,
        version=1,
        updates=updates,
        trained=[],
        seed=spec.seed,
        kl_coefficient=None,
        totals={},
        spec=spec.model_dump(mode="json"),
        software={},
        files={},
    )


def test_what_is_dropped_is_drawn_by_the_step_alone() -> None:
    def losses(dropout: float) -> float:
        learner = Learner(spec_of({"rank": 4, "dropout": dropout}), LoadedModel(a_model(), Path()))
        learner.train(uneven_groups(2, seed=1), 1)
        torch.rand(7)
        return learner.train(uneven_groups(2, seed=2), 2).updates[-1].grad_norm

    assert losses(0.5) == losses(0.5)
    assert losses(0.5) != losses(0.0)


@pytest.mark.parametrize(
    ("name", "lora", "reason"),
    [
        ("Qwen3-MoE", {"targets": ["q_proj", "gate_up_proj"]}, "the weights of all experts in one"),
        ("Qwen3", {"targets": ["q_proj", "query"]}, "'query' is no layer of the model"),
        ("Qwen3", {"targets": ["embed_tokens"]}, "a Embedding and no linear layer"),
        ("Qwen3", {"targets": ["lm_head"]}, "the output layer"),
        ("Qwen3", {"exclude": ["query"]}, "no linear layer of the model is called 'query'"),
        ("GPT-2", {"targets": ["c_attn"], "exclude": ["attn.c_attn"]}, "no layer is left"),
    ],
)
def test_a_layer_that_cannot_be_adapted_is_refused_with_its_reason(
    name: str, lora: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        Adapters(ARCHITECTURES[name](), LoraConfig.model_validate({"rank": 2, **lora}), seed=0)


def test_layers_are_chosen_by_the_ends_of_their_names() -> None:
    config = LoraConfig.model_validate(
        {"rank": 2, "targets": ["q_proj", "v_proj"], "exclude": ["layers.1.self_attn.q_proj"]}
    )

    adapters = Adapters(a_model(), config, seed=0)

    assert [name.removeprefix("model.layers.") for name in adapters.layers] == [
        "0.self_attn.q_proj",
        "0.self_attn.v_proj",
        "1.self_attn.v_proj",
    ]


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    def made(rank: int) -> Adapters:
        model: nn.Module = a_model()
        return Adapters(model, LoraConfig(rank=rank), seed=0)

    save_file({key: each.clone() for key, each in made(2).tensors().items()}, tmp_path / ADAPTER)

    with pytest.raises(ModelError, match="another shape"):
        made(3).load(load_file(tmp_path / ADAPTER))


def test_targets_must_name_something() -> None:
    with pytest.raises(ValidationError, match="targets names no layer"):
        LoraConfig(rank=2, targets=())


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_checkpoint_is_one_model(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    MODELS[name]().save_pretrained(base)  # type: ignore[operator]
    (base / "tokenizer_config.json").write_text("{}")
    spec = spec_of(LORA[name], model={"path": str(base)})
    learner = Learner(spec, LoadedModel(MODELS[name](), base))
    learner.train(uneven_groups(2), 1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    fill_alone(learner, folder)
    assert isinstance(learner.weights, FlatParameters)
    expected = image_of(learner.weights, tmp_path)

    model = merged(folder / MODEL).model

    found = image_of(FlatParameters(model), tmp_path)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=0, rtol=0, msg=key)
    with pytest.raises(ModelError, match="flotilla export"):
        check_directory(folder / MODEL)
