"""Writes one whole model of a checkpoint that holds adapters, or a moving average of its weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flotilla.services.trainer.checkpoint.files import copy_companions
from flotilla.services.trainer.models.loading import LoadedModel, load_model
from flotilla.services.trainer.models.lora import Adapters
from flotilla.services.trainer.models.quantised import read_description
from flotilla.shared.checkpoints.folders import AVERAGE
from flotilla.shared.config.sections.model import LoraConfig, ModelConfig
from flotilla.shared.errors import InvalidRequest, ModelError
from flotilla.shared.models.hub import ADAPTER, ADAPTER_CONFIG, model_directory
from flotilla.shared.models.overridden import link_with_config
from flotilla.shared.net.absence import absent_or

NOTHING: Mapping[str, Tensor] = {}


def export(source: Path, directory: Path, *, averaged: bool = False) -> None:
    """Write a model with its adapters merged; blocks.

    Args:
        source: a checkpoint's model, or any directory of an adapter that peft wrote.
        directory: to be made.
        averaged: with the moving average that lies beside the checkpoint's model in place of what was trained.

    Raises:
        InvalidRequest: there is nothing to merge or no average, or the directory exists.
        ModelError: the adapter or the weights that it is added to cannot be read.
    """
    is_adapter = (source / ADAPTER_CONFIG).is_file()
    if averaged and not (source.parent / AVERAGE).is_file():
        raise InvalidRequest(f"{source.parent} has no {AVERAGE}: set optimisation.average_decay to keep one")
    if not is_adapter and not averaged:
        raise InvalidRequest(f"{source} has no {ADAPTER_CONFIG}: its weights are whole already")
    if directory.exists():
        raise InvalidRequest(f"{directory} exists already: name a directory that can be made")
    transformers.logging.disable_progress_bar()
    averages = _read(source.parent / AVERAGE) if averaged else {}
    loaded = merged(source, averages) if is_adapter else _averaged(source, averages)
    directory.mkdir(parents=True)
    loaded.model.save_pretrained(directory)  # type: ignore[operator]
    copy_companions(source, directory)


def merged(source: Path, averages: Mapping[str, Tensor] = NOTHING) -> LoadedModel:
    """Load a model and merge an adapter into its weights.

    Args:
        source: directory of the adapter.
        averages: of some of its weights, by their names in memory, in their place.

    Raises:
        ModelError: one of both cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(source / ADAPTER)
        config = _config_of(found)
        base = ModelConfig(path=found["base_model_name_or_path"], revision=found.get("revision"))
        trained = _model_config(source)
        dtype, quantisation = _dtype_of(source, tensors), read_description(trained)
    except (OSError, ValueError, KeyError, TypeError, ValidationError, SafetensorError) as error:
        raise absent_or(error, ModelError(f"the adapter in {source} cannot be read: {error}")) from error
    is_scored = found.get("task_type") == "SEQ_CLS"
    with TemporaryDirectory(prefix="flotilla-export-") as place:
        directory = _with_trained_config(model_directory(base), trained, Path(place))
        cpu = torch.device("cpu")
        loaded = load_model(directory, dtype=dtype, device=cpu, scores=is_scored, quantisation=quantisation)
    adapters = Adapters(loaded.model, config, seed=0)
    adapters.load(tensors)
    _put(averages, loaded.model)
    adapters.merge()
    return loaded


def _with_trained_config(base: Path, trained: dict[str, Any], place: Path) -> Path:
    """Return the base with the config that the adapter was trained under, which ``model.overrides`` may have changed.

    Args:
        base: directory of the model.
        trained: config.json beside the adapter; empty where there is none, as peft leaves it.
        place: empty directory for links.

    Raises:
        ModelError: the links cannot be made.
    """
    if not trained or not base.is_dir():
        return base
    # The quantisation is recorded separately.
    config = {key: value for key, value in trained.items() if key != "quantization_config"}
    try:
        link_with_config(base, json.dumps(config), place)
    except OSError as error:
        raise ModelError(f"{place} cannot be made: {error.strerror or error}") from error
    return place


def _averaged(source: Path, averages: Mapping[str, Tensor]) -> LoadedModel:
    is_scored = "score.weight" in averages
    loaded = load_model(source, dtype=_dtype_of(source, averages), device=torch.device("cpu"), scores=is_scored)
    _put(averages, loaded.model)
    return loaded


@torch.no_grad()
def _put(averages: Mapping[str, Tensor], model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    for name, average in averages.items():
        if name not in weights or weights[name].shape != average.shape:
            raise ModelError(f"{AVERAGE} has {name}, which the model has not in this shape")
        weights[name].copy_(average)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load_file(path)
        return found
    except (OSError, SafetensorError) as error:
        raise absent_or(error, ModelError(f"{path} cannot be read: {error}")) from error


def _config_of(found: dict[str, Any]) -> LoraConfig:
    """Read the section that an adapter was trained under.

    Raises:
        ValueError: it is an adapter of a kind that is not trained here.
    """
    for name in ("use_dora", "rank_pattern", "alpha_pattern", "target_parameters", "layer_replication"):
        if found.get(name):
            raise ValueError(f"{name} is {found[name]!r}: only plain LoRA is merged here, peft merges any")
    if found["peft_type"] != "LORA" or found.get("bias", "none") != "none":
        raise ValueError("it is no plain LoRA without biases: peft merges it")
    return LoraConfig.model_validate(
        {
            "rank": found["r"],
            "alpha": found["lora_alpha"],
            "rank_stabilised": bool(found.get("use_rslora")),
            "targets": found["target_modules"],
        }
    )


def _model_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _dtype_of(source: Path, tensors: Mapping[str, Tensor]) -> str:
    config = _model_config(source)
    written = config.get("dtype") or config.get("torch_dtype")
    return str(written or next(iter(tensors.values())).dtype).removeprefix("torch.")
