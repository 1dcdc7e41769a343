"""The models of a spec, and that they are there."""

import json
from collections.abc import Mapping
from typing import Any

from flotilla.shared.config.rules.devices import tensor_parallel
from flotilla.shared.config.sections.judge import HostedModelConfig
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.errors import InvalidSpec, ModelError
from flotilla.shared.models.hub import fetch_small, has_config, model_directory
from flotilla.shared.net.absence import absent_or
from flotilla.shared.vision.kinds import GRID_MODELS, IMAGE_MODELS, TILE_MODELS, kind_of


def check_model(spec: ExperimentSpec) -> None:
    """Check that the directories of all models are there; of a hub's model, config and tokenizer are fetched.

    Raises:
        ModelError: one is missing, or has no readable config.json; or the hub does not give it.
    """
    for field, model in models_of(spec).items():
        config = _check_model(field, model)
        if field == "model.path":
            _check_heads(spec, config)
            _check_images(spec, config)


def models_of(spec: ExperimentSpec) -> dict[str, ModelConfig]:
    """List the models of a spec by the dotted field of their path: of policy, teacher, critic and reward models."""
    models = {"model.path": spec.model} | other_models(spec)
    for where, component in spec.reward.graders.items():
        if isinstance(component, HostedModelConfig):
            models[f"{where}.path"] = component.model
    return models


def teachers_of_text(spec: ExperimentSpec) -> dict[str | None, str]:
    """Find the teachers that the trainer loads and that take no images: field by data source; None: of all."""
    distillation = spec.algorithm.distillation
    if distillation is None:
        return {}
    of_all: list[tuple[str | None, ...]] = [(None,)]
    of_sources = [each.data_sources for each in distillation.teachers] or of_all
    kinds = {field: kind_of(model_directory(model))[0] for field, model in distillation.models.items()}
    return {
        source: f"algorithm.distillation.{field}"
        for (field, kind), sources in zip(kinds.items(), of_sources, strict=False)
        for source in sources
        # What is not known is said where the model is loaded.
        if kind is not None and kind not in IMAGE_MODELS
    }


def _check_heads(spec: ExperimentSpec, config: Mapping[str, Any]) -> None:
    """Check that a server that each rollout starts can divide the model's layers among its devices."""
    size = tensor_parallel(spec)
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads") if isinstance(text, Mapping) else None
    if size == 1 or not spec.samples_answers or not isinstance(heads, int) or heads % size == 0:
        return
    kind = "resources.rollouts.devices" if spec.resources.rollouts.devices != "auto" else "rollout.engine.options"
    raise InvalidSpec(f"{kind}: {size} devices do not divide the model's {heads} attention heads: choose a divisor")


def _check_images(spec: ExperimentSpec, config: Mapping[str, Any]) -> None:
    """Check that the engine computes images of the model's kind."""
    kind, engine = config.get("model_type"), spec.rollout.engine.kind
    if spec.data.images is not None and spec.samples_answers and engine != "torch" and kind in TILE_MODELS:
        raise InvalidSpec(
            f"data.images: with {kind} the embedded engine alone computes images (rollout.engine.kind torch), and "
            f"here it is {engine}, which is given those of {', '.join(sorted(GRID_MODELS))}"
        )


def _check_model(field: str, model: ModelConfig) -> Mapping[str, Any]:
    if model.is_hub_name and not has_config(model):
        fetch_small(model)
    directory = model_directory(model)
    if not directory.is_dir():
        raise ModelError(f"{field}: there is no directory {directory}", path=str(directory), field=field)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        detail = f"{field}: cannot read config.json in {directory}: {error}"
        raise absent_or(error, ModelError(detail, path=str(directory), field=field)) from None
    except ValueError:
        return {}  # what is wrong with it is said where the model is loaded
    return config if isinstance(config, Mapping) else {}
