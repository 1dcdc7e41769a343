"""Writes one whole model of a checkpoint that holds adapters: for whoever loads no adapters."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.trainer.checkpoint.files import copy_companions
from services.trainer.models.loading import LoadedModel, load_model
from services.trainer.models.lora import Adapters
from shared.config.lora import LoraConfig
from shared.config.model import ModelConfig
from shared.errors import InvalidRequest, ModelError
from shared.model_files import ADAPTER, ADAPTER_CONFIG
from shared.model_hub import model_directory


def export(source: Path, directory: Path) -> None:
    """Write a model with its adapters merged; blocks.

    Args:
        source: a checkpoint's model, or any directory of an adapter that peft wrote.
        directory: to be made.

    Raises:
        InvalidRequest: there is nothing to merge, or the directory exists.
        ModelError: the adapter or the weights that it is added to cannot be read.
    """
    if not (source / ADAPTER_CONFIG).is_file():
        raise InvalidRequest(f"{source} has no {ADAPTER_CONFIG}: its weights are whole already")
    if directory.exists():
        raise InvalidRequest(f"{directory} exists already: name a directory that can be made")
    transformers.logging.disable_progress_bar()
    loaded = merged(source)
    directory.mkdir(parents=True)
    loaded.model.save_pretrained(directory)  # type: ignore[operator]
    copy_companions(source, directory)


def merged(source: Path) -> LoadedModel:
    """Load a model and merge an adapter into its weights.

    Raises:
        ModelError: one of both cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(source / ADAPTER)
        config = _config_of(found)
        base = ModelConfig(path=found["base_model_name_or_path"], revision=found.get("revision"))
        dtype = _dtype_of(source, tensors)
    except (OSError, ValueError, KeyError, TypeError, ValidationError, SafetensorError) as error:
        raise ModelError(f"the adapter in {source} cannot be read: {error}") from error
    is_scored = found.get("task_type") == "SEQ_CLS"
    loaded = load_model(model_directory(base), dtype=dtype, device=torch.device("cpu"), scores=is_scored)
    adapters = Adapters(loaded.model, config, seed=0)
    adapters.load(tensors)
    adapters.merge()
    return loaded


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


def _dtype_of(source: Path, tensors: dict[str, torch.Tensor]) -> str:
    path = source / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    written = config.get("dtype") or config.get("torch_dtype")
    return str(written or next(iter(tensors.values())).dtype).removeprefix("torch.")
