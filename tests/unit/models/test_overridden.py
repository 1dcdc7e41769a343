"""``model.overrides``: other values in a model's config, for everything that loads it."""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.services.rollout.engines.decoders.architecture import architecture_of
from flotilla.services.rollout.engines.decoders.checkpoint import read_config
from flotilla.services.rollout.engines.servers.model import read_served_model
from flotilla.services.trainer.checkpoint.export import export
from flotilla.services.trainer.checkpoint.manager import beginning, fill_alone
from flotilla.services.trainer.models.loading import load_model
from flotilla.shared.checkpoints.folders import MODEL
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.errors import InvalidSpec, ModelError
from flotilla.shared.models.hub import has_config, model_directory
from flotilla.shared.models.weight_files import safetensors_files
from tests.fleet import tiny_model
from tests.unit.trainer.builders import a_spec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def overridden(overrides: Mapping[str, Any], path: Path | None = None) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path or tiny_model()), "overrides": overrides})


def test_a_model_without_overrides_is_read_where_it_is() -> None:
    assert model_directory(overridden({})) == tiny_model()


def test_engines_and_servers_read_the_overridden_config_and_the_models_own_weights() -> None:
    directory = model_directory(overridden({"max_position_embeddings": 32_768}))
    config, own = read_config(directory), read_config(tiny_model())

    assert config == own | {"max_position_embeddings": 32_768}
    assert architecture_of(config).max_positions == 32_768
    assert read_served_model(directory).max_positions == 32_768
    assert [file.resolve() for file in safetensors_files(directory)] == safetensors_files(tiny_model())


def test_a_mapping_changes_the_keys_below_it_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"a": 1, "b": 2}, "c": 3}')
    directory = model_directory(overridden({"text_config": {"b": 4}, "c": {"d": 5}}, tmp_path))

    assert read_config(directory) == {"text_config": {"a": 1, "b": 4}, "c": {"d": 5}}


def test_files_that_come_later_are_there_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = model_directory(overridden({"a": 1}, tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    assert model_directory(overridden({"a": 1}, tmp_path)) == first
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert model_directory(overridden({"a": 2}, tmp_path)) != first


def test_a_file_that_the_model_has_lost_is_gone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model-1.safetensors").write_bytes(b"old")
    directory = model_directory(overridden({"a": 1}, model))
    (model / "model-1.safetensors").rename(model / "model-2.safetensors")

    assert model_directory(overridden({"a": 1}, model)) == directory
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model-2.safetensors"]


def test_threads_make_a_directory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    both, write = threading.Barrier(2, timeout=30), Path.write_text

    def write_together(path: Path, *given: Any, **named: Any) -> int:
        num = write(path, *given, **named)
        both.wait()
        return num

    monkeypatch.setattr(Path, "write_text", write_together)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(model_directory, overridden({"a": 1}, tmp_path)) for _ in range(2)]

    assert made[0].result() == made[1].result()


def test_a_model_that_is_not_there_stays_so(tmp_path: Path) -> None:
    model = overridden({"a": 1}, tmp_path / "none")

    assert model_directory(model) == tmp_path / "none" and not has_config(model)


def test_a_directory_that_cannot_be_made_is_a_message(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")

    with pytest.raises(ModelError, match=r"model.overrides: .* cannot be made"):
        model_directory(overridden({"rms_norm_eps": 0.5}))


def test_the_trainer_computes_with_overrides_and_its_checkpoint_keeps_them(tmp_path: Path) -> None:
    token_ids = torch.arange(8)[None]

    def logits(overrides: Mapping[str, Any]) -> torch.Tensor:
        spec = a_spec(model={"path": str(tiny_model()), "overrides": overrides})
        learner = beginning(spec, CPU).learner
        (tmp_path / str(len(overrides))).mkdir()
        fill_alone(learner, tmp_path / str(len(overrides)), ("model",))
        found: torch.Tensor = learner.loaded.model(token_ids).logits.detach()
        return found

    own, changed = logits({}), logits({"rms_norm_eps": 0.5})

    assert not torch.allclose(own, changed)
    assert json.loads((tmp_path / "1" / "model" / "config.json").read_text())["rms_norm_eps"] == 0.5


def test_a_key_that_the_models_kind_does_not_know_is_refused_when_it_is_loaded() -> None:
    spec = a_spec(model={"path": str(tiny_model()), "overrides": {"max_positions": 8}})

    with pytest.raises(ModelError, match=r"model.overrides: \w+ has no max_positions"):
        beginning(spec, CPU)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("model_type", "llama", "another path"), ("_attn_implementation", "eager", "set model.attention"),
     ("attention_dropout", 0.1, "without dropout"), ("resid_pdrop", 0.1, "without dropout"),
     ("torch_dtype", "float16", "set model.dtype"), ("auto_map", {}, "never run")],
)  # fmt: skip
def test_what_another_key_of_a_spec_says_or_would_differ_from_the_engine_is_no_override(
    key: str, value: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        overridden({key: value})
    overridden({"attention_dropout": 0.0, "rope_scaling": {"factor": 2.0}})


def test_overrides_do_not_reach_a_server_that_runs_already() -> None:
    engine = {"kind": "sglang", "url": "http://127.0.0.1:9"}

    with pytest.raises(InvalidSpec, match=r"model.overrides does not reach the server at rollout.engine.url"):
        a_spec(model={"path": "m", "overrides": {"a": 1}}, rollout={"engine": engine})


def test_an_exported_adapter_keeps_the_config_that_it_was_trained_under(tmp_path: Path) -> None:
    base = tiny_model()
    theta = {"rope_type": "default", "rope_theta": 77.0}
    model = {"path": str(base), "overrides": {"rope_parameters": theta, "max_position_embeddings": 64}}
    learner = beginning(a_spec(model=model | {"lora": {"rank": 2}}), CPU).learner
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    fill_alone(learner, folder)

    export(folder / MODEL, tmp_path / "exported")

    config = read_config(tmp_path / "exported")
    assert (config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]) == (77.0, 64)
    ids = torch.arange(5, 25)[None]
    exported = load_model(tmp_path / "exported", dtype="float32", device=CPU).model
    torch.testing.assert_close(exported(ids).logits, learner.loaded.model(ids).logits)
