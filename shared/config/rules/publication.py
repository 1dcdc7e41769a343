"""What goes with the ways in which weights are published, and whether versions are adapters alone."""

from collections.abc import Collection, Mapping

from flotilla.shared.config.rules.devices import pipeline_stages
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import (
    MAX_ADAPTER_RANK,
    EngineConfig,
    ServerEngineConfig,
    SglangEngineConfig,
)
from flotilla.shared.config.sections.publication import PublicationConfig
from flotilla.shared.config.tree import Sections
from flotilla.shared.schemas.engine import with_adapters

KEY = "asynchrony.publication.lora"


def publishes_adapters(spec: Sections) -> bool:
    """Whether adapters travel alone; merged into the weights they travel also as long as nothing is decided."""
    return spec.model.lora is not None and spec.asynchrony.publication.lora == "adapters"


def needs_whole_weights(spec: Sections) -> str | None:
    """Return what of a spec with adapters needs whole weights; None where adapters alone do."""
    engine, publication = spec.rollout.engine, spec.asynchrony.publication
    if spec.model.quantisation is not None:
        return "model.lora.quantisation makes another base of the weights of model.path"
    if isinstance(engine, ServerEngineConfig) and (why := _whole_at_server(spec, engine)) is not None:
        return why
    if publication.quantisation is not None:
        return f"{QUANTISATION} quantises whole weights"
    if publication.delta is not None:
        return "asynchrony.publication.delta sends what differs of whole weights"
    return None


def _whole_at_server(spec: Sections, engine: ServerEngineConfig) -> str | None:
    """Return why a server needs whole weights; None where it adds adapters to those that it has."""
    if not engine.TAKES_ADAPTERS:
        return f"rollout.engine.kind {engine.kind} takes whole weights: {WITHOUT_ADAPTERS[engine.kind]}"
    if engine.url is not None:
        return "the server at rollout.engine.url takes whole weights"
    if spec.asynchrony.on_weight_update is OnWeightUpdate.CONTINUE:
        return (
            f"asynchrony.on_weight_update continue needs whole weights: with rollout.engine.kind {engine.kind} a "
            "sample keeps the adapters that it began with"
        )
    if spec.shares_devices:
        return f"{spec.resources.turns} has the server read whole weights when it wakes"
    if spec.model.lora is not None and spec.model.lora.rank > MAX_ADAPTER_RANK:
        return f"model.lora.rank {spec.model.lora.rank} is above the {MAX_ADAPTER_RANK} that vLLM has room for"
    return None


WITHOUT_ADAPTERS: Mapping[str, str] = {
    "sglang": "on a CPU its adapters need memory that is pinned for a GPU, and on a GPU this has not been tried",
}


def check_adapters(spec: Sections) -> None:
    """Check that adapters are published as the spec asks for.

    Raises:
        ValueError: they are not, or there are none.
    """
    asked = spec.asynchrony.publication.lora
    if asked == "auto":
        return
    if spec.model.lora is None:
        raise ValueError(f"{KEY} {asked} has no effect without model.lora: leave it out")
    if asked == "adapters" and (why := needs_whole_weights(spec)) is not None:
        raise ValueError(f"{KEY} adapters sends adapters alone, and {why}: leave {KEY} out, or set it to merged")


QUANTISATION = "asynchrony.publication.quantisation"


def decide_publication(spec: Sections, rollouts: Mapping[str, Collection[str]]) -> tuple[str, str | None] | None:
    """Decide what ``auto`` is on the rollouts that an experiment gets first.

    Args:
        spec: of the experiment.
        rollouts: the engines that each of them can start, and ``with_adapters`` of those that take adapters.

    Returns:
        The key's value, and why it is ``merged``; None where nothing is open.
    """
    if spec.asynchrony.publication.lora != "auto" or spec.model.lora is None or not rollouts:
        return None
    why, kind = needs_whole_weights(spec), spec.rollout.engine.kind
    if why is None and isinstance(spec.rollout.engine, ServerEngineConfig):
        why = f"rollout.engine.kind {kind} takes only adapters if {KEY} is adapters"
    unable = [name for name, engines in rollouts.items() if with_adapters(kind) not in engines]
    if why is None and unable:
        why = f"the engine of {unable[0]} takes whole weights"
    return ("adapters", None) if why is None else ("merged", why)


def check_engine_group(engine: EngineConfig, publication: PublicationConfig, *, turns: str | None) -> None:
    """Check what else a spec asks for, where its engines are members of the weight group.

    Args:
        engine: of the rollouts.
        publication: how weights reach them.
        turns: the key by which trainer and rollouts take turns on the same devices.

    Raises:
        ValueError: they cannot be, or it has no effect then.
    """
    if not isinstance(engine, SglangEngineConfig) or engine.update_weights_from != "distributed":
        return
    name = "rollout.engine.update_weights_from distributed"
    if not publication.may_broadcast:
        raise ValueError(
            f"{name} broadcasts, and asynchrony.publication.transport {publication.transport} does not: set that to "
            "auto, group, gloo or nccl, or update_weights_from to disk"
        )
    if publication.delta is not None:
        raise ValueError(
            f"{name} sends whole tensors, which engines load: leave asynchrony.publication.delta out, or set "
            "update_weights_from to disk"
        )
    if turns is not None:
        raise ValueError(
            f"{name} needs trainer and engines on different devices at the same time: leave {turns} out, or set "
            "update_weights_from to disk"
        )
    if (stages := pipeline_stages(engine.options)) > 1:
        raise ValueError(
            f"{name} numbers the ranks of tensor parallelism, and the {stages} stages of pp_size would have the same: "
            "leave it out, or set update_weights_from to disk"
        )
