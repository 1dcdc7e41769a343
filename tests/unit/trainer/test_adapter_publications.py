"""A version of adapters alone: what is published, and what an engine that adds it to its model's files computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from flotilla.services.rollout.engines.decoders.base import Decoder
from flotilla.services.rollout.engines.embedded.loading import load_decoder
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.lora import Adapters
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.weights.named_weights import NamedWeights
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.model import LoraConfig, ModelConfig
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from flotilla.shared.weights.image.image import WeightImage
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import a_spec, uneven_groups

IDS = np.arange(12, dtype=np.int64)


def a_learner(directory: Path, make: Any = ARCHITECTURES["Qwen3"], **sections: Any) -> Learner:
    """Save a model, and make what trains adapters beside it and publishes them alone."""
    model = make()
    model.save_pretrained(directory)
    publication = {"lora": "adapters"} | sections.pop("publication", {})
    spec = a_spec(
        model={"path": str(directory), "lora": {"rank": 4} | sections.pop("lora", {})},
        optimisation={"steps": 4, "groups_per_mini_batch": 2, "learning_rate": 1e-2},
        asynchrony={"publication": publication},
        **sections,
    )
    return Learner(spec, LoadedModel(model, directory))


def published(learner: Learner, directory: Path) -> Path:
    """Write an image, which stays."""
    assert isinstance(learner.weights, FlatParameters)
    image = WeightImage.create(learner.weights.layout.image_bytes, directory=directory)
    learner.weights.snapshot_into(image)
    return image.hand_over()


def an_engine(directory: Path, **settings: Any) -> Decoder:
    return load_decoder(EngineSettings(str(directory), slots=2, context_tokens=64, **settings)).decoder


def log_probs(decoder: Decoder) -> torch.Tensor:
    return decoder.prefill([IDS], [[0]]).float().log_softmax(-1)


def own_log_probs(learner: Learner) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = learner.loaded.model(torch.from_numpy(IDS)[None]).logits[:, -1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_engine_adds_published_adapters_to_the_weights_of_its_model(name: str, tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model", ARCHITECTURES[name])
    decoder = an_engine(tmp_path / "model")
    before = log_probs(decoder)
    learner.train(uneven_groups(2), 1)

    decoder.stage(published(learner, tmp_path))
    decoder.switch()

    assert (log_probs(decoder) - before).abs().max() > 1e-3
    torch.testing.assert_close(log_probs(decoder), own_log_probs(learner), atol=1e-4, rtol=0)
    decoder.release()
    decoder.restore()
    torch.testing.assert_close(log_probs(decoder), before, atol=1e-5, rtol=0)


def test_adapters_that_are_published_alone_make_the_weights_that_are_published_merged(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    learner.train(uneven_groups(2), 1)
    model, adapters = learner.loaded.model, learner.adapters
    assert adapters is not None
    alone, merged = an_engine(tmp_path / "model"), an_engine(tmp_path / "model")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in adapters.names]

    alone.stage(published(learner, tmp_path))
    learner.weights = FlatParameters(model, names=names, increment=adapters.increment)
    merged.stage(published(learner, tmp_path))

    alone.switch()
    merged.switch()
    torch.testing.assert_close(log_probs(alone), log_probs(merged), atol=0, rtol=0)


def test_an_image_of_adapters_is_the_file_that_peft_reads(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    assert learner.adapters is not None

    image = published(learner, tmp_path)

    found, own = load_file(image), learner.adapters.tensors()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)


def test_a_manifest_of_adapters_names_their_base(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    assert isinstance(learner.weights, FlatParameters)
    pool = ImagePool(learner.weights, directory=tmp_path, base=learner.spec.model)

    manifest = pool.manifest(pool.snapshot(), 1)
    base = checksum_of(safetensors_files(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    without = pool.manifest(pool.snapshot(), 2)

    pool.close()
    assert manifest.digest is not None and without.digest is None, "nobody knows the sums without the base"
    assert manifest.base == without.base == base
    assert {spec.name for spec in manifest.tensors} == set(learner.adapters.tensors() if learner.adapters else ())


def test_adapters_of_another_base_are_not_served(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    other = ARCHITECTURES["Qwen3"]()
    with torch.no_grad():
        other.lm_head.weight += 1e-3
    other.save_pretrained(tmp_path / "other")
    decoder = an_engine(tmp_path / "other")
    before = log_probs(decoder)

    with pytest.raises(WeightTransferFailed, match="the adapters are for a base with checksum"):
        decoder.stage(published(learner, tmp_path))

    torch.testing.assert_close(log_probs(decoder), before, atol=0, rtol=0)


def test_rounded_adapters_are_those_that_the_trainer_keeps_of_a_version(tmp_path: Path) -> None:
    learner = a_learner(
        tmp_path / "model",
        publication={"wire_dtype": "bfloat16"},
        algorithm={"old_log_probs": "recompute_at_version"},
    )
    decoder = an_engine(tmp_path / "model")
    learner.train(uneven_groups(2), 1)
    decoder.stage(published(learner, tmp_path))
    decoder.switch()
    learner.keep_version(1, 0)
    assert learner.versions is not None

    with learner.versions.using(1):
        kept = own_log_probs(learner)

    torch.testing.assert_close(log_probs(decoder), kept, atol=1e-4, rtol=0)


def test_adapters_of_a_model_whose_files_call_weights_otherwise_are_published_merged(tmp_path: Path) -> None:
    model = ARCHITECTURES["GPT-2"]()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): each for name, each in tensors.items()}, tmp_path / "model.safetensors"
    )

    adapters = Adapters(model, LoraConfig(rank=2), seed=0)

    assert adapters.label(ModelConfig(path=str(tmp_path))) is None


SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TINY = SMALL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


@pytest.mark.parametrize(("config", "parameters", "at_most"), [(SMALL, 31e6, 0.03), (TINY, 1e5, 0.35)])
def test_adapters_of_rank_16_are_at_most_3_percent_of_a_version_of_31_million_parameters(
    config: dict[str, Any], parameters: float, at_most: float
) -> None:
    with torch.device("meta"):
        model: nn.Module = Qwen2ForCausalLM(Qwen2Config(**config))
    whole = NamedWeights.of(model, None).layout.image_bytes
    adapters = Adapters(model, LoraConfig(rank=16), seed=0)

    alone = NamedWeights.of(model, None, adapters.names).layout.image_bytes

    assert sum(each.numel() for each in model.parameters()) > parameters
    assert at_most / 2 < alone / whole <= at_most
