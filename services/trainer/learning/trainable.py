"""Which weights of the policy train, and how all of them are laid out for images and kept versions."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from flotilla.services.trainer.models.critic import Critic
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.log_probs import Policy, hidden_states
from flotilla.services.trainer.models.lora import Adapters
from flotilla.services.trainer.models.quantised import PackedWeight, packed_layers
from flotilla.services.trainer.models.routers import RouterLosses
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters, StreamedParameters
from flotilla.shared.config.rules.publication import publishes_adapters
from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.errors import ModelError
from flotilla.shared.models.routers import Routing
from flotilla.shared.vision.processor import ImageProcessor, processor_of
from flotilla.shared.vision.tower import Tower, tower_parts

CRITIC = "algorithm.value_loss.path"
Weights = FlatParameters | ShardedParameters


def choose_trained(model: nn.Module, spec: ExperimentSpec) -> Adapters | None:
    """Freeze what the spec says, or give a model the adapters that alone train; before it is sharded.

    Raises:
        ModelError: the spec names weights or layers that are not there, or leaves nothing to train.
    """
    _freeze(model, spec.optimisation.freeze)
    return None if spec.model.lora is None else Adapters(model, spec.model.lora, seed=spec.seed)


def freeze_tower(spec: ExperimentSpec, model: nn.Module) -> None:
    """Freeze the vision tower of a policy, or of a critic's initial model, if the spec asks for it."""
    if spec.model.vision_tower == "frozen":
        for part in tower_parts(model.base_model):
            part.requires_grad_(False)


def processor_for(spec: ExperimentSpec, loaded: LoadedModel) -> ImageProcessor | None:
    """Load the processor of the images that prompts have; None where they have none.

    Raises:
        ModelError: the model takes no images.
    """
    images = spec.data.images
    if images is None:
        return None
    return processor_of(loaded.source, images)


def tower_of(body: Any, processor: ImageProcessor, ranks: Ranks) -> Tower:
    """Make what computes images with a model, once it is known what of it trains."""
    is_frozen = not any(each.requires_grad for part in tower_parts(body) for each in part.parameters())

    def most(count: int) -> int:
        return int(ranks.largest(torch.tensor(count, device=ranks.device)))

    return Tower(body, processor, is_frozen=is_frozen, most=most)


def show_images(
    spec: ExperimentSpec,
    processor: ImageProcessor | None,
    policies: Iterable[Policy],
    teachers: Iterable[tuple[LoadedModel, Policy]],
    critic: Critic | None,
    own: LoadedModel | None,
    ranks: Ranks,
) -> list[Tower]:
    """Let models take the images of prompts; one that takes none by itself may teach rows without any.

    Args:
        spec: the experiment.
        processor: of the policy; None: prompts have no images.
        policies: of its architecture.
        teachers: in the spec's order, each with what it was loaded as.
        critic: of the policy's architecture, too.
        own: what the critic began as, if that was no copy of the policy.
        ranks: that divide all of them; the critic has its own.

    Returns:
        What computes the images, of each model that takes some.

    Raises:
        ModelError: one computes its rows in a way that does not go with images, or its processor gives an image other
            tokens.
    """
    towers = list[Tower]()
    if processor is None:
        return towers

    def tower(body: Any, made: ImageProcessor, sharing: Ranks) -> Tower:
        towers.append(tower_of(body, made, sharing))
        return towers[-1]

    for each in policies:
        each.show_images(tower(each.base, processor, ranks))
    for field, (loaded, teacher) in zip(other_models(spec), teachers, strict=False):
        if loaded.takes_images:
            teacher.show_images(tower(teacher.base, _alike(spec, processor, field, loaded), ranks))
    if critic is not None:
        processor = processor if own is None else _alike(spec, processor, CRITIC, own)
        shown = tower(critic.body, processor, critic.ranks)
        critic.show_images(partial(hidden_states, critic.body, tower=shown))
    return towers


def _alike(spec: ExperimentSpec, processor: ImageProcessor, field: str, loaded: LoadedModel) -> ImageProcessor:
    """Load the processor of another model than the policy, which must give images the same tokens."""
    own = processor_for(spec, loaded)
    assert own is not None
    processor.check_alike(own, field)
    return own


def prepare_routers(policy: Policy, spec: ExperimentSpec) -> None:
    """Enable router replay and auxiliary router losses of the policy, if the spec has them.

    Raises:
        ModelError: its model has no such routers.
    """
    # Before the losses, whose gradient comes back through what a router gives at last.
    if spec.algorithm.router_replay is not None:
        policy.routing = Routing(policy.model)
    if spec.optimisation.router is not None:
        policy.routers = RouterLosses(policy.model, spec.optimisation.router)


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    weights = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [name for name in weights if fnmatchcase(name, pattern)]
        if not found:
            raise ModelError(
                f"optimisation.freeze: no weight of the model is called {pattern!r}; they are called such as "
                f"{', '.join(list(weights)[:3])}"
            )
        for name in found:
            weights[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in weights.values()):
        raise ModelError("optimisation.freeze names every weight of the model, and nothing is left to train")


def image_weights(model: nn.Module, adapters: Adapters | None, ranks: Ranks, spec: ExperimentSpec) -> Weights:
    """Lay out what is published: the checkpoint's weights, unpacked and with adapters added, or adapters alone.

    Raises:
        ModelError: the model's files cannot be read.
    """
    wire_dtype = getattr(torch, spec.asynchrony.publication.wire_dtype or "", None)
    label = adapters.label(spec.model) if adapters is not None and publishes_adapters(spec) else None
    if adapters is not None and label is not None:
        if ranks.is_several:
            return ShardedParameters(
                model, is_leader=ranks.is_leader, wire_dtype=wire_dtype, names=adapters.names, label=label
            )
        return FlatParameters(model, wire_dtype=wire_dtype, names=adapters.names, label=label)
    names, increment = None, None
    if adapters is not None:
        own = adapters.names
        names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]
        increment = adapters.increment
    packed = {f"{name}.weight": PackedWeight(layer) for name, layer in packed_layers(model).items()}
    if ranks.is_several or packed:
        kind = ShardedParameters if ranks.is_several else StreamedParameters
        return kind(
            model,
            is_leader=ranks.is_leader,
            wire_dtype=wire_dtype,
            names=names,
            increment=increment,
            packed=packed,
        )
    return FlatParameters(model, wire_dtype=wire_dtype, names=names, increment=increment)


def kept_weights(model: nn.Module, adapters: Adapters | None, ranks: Ranks, published: Weights) -> Weights:
    """Lay out what a kept version holds: what differs between versions, which may be adapters alone."""
    if adapters is None or published.layout.metadata:  # which adapters have that are published alone
        return published
    if ranks.is_several:
        return ShardedParameters(model, is_leader=ranks.is_leader, names=adapters.names)
    return FlatParameters(model, names=adapters.names)
