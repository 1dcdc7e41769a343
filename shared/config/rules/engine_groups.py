"""What a weight group of the trainer and the ranks of engines cannot do."""

from flotilla.shared.config.rules.devices import pipeline_stages
from flotilla.shared.config.sections.engine import EngineConfig, SglangEngineConfig
from flotilla.shared.config.sections.publication import PublicationConfig


def check_engine_group(engine: EngineConfig, publication: PublicationConfig, *, shares_devices: bool) -> None:
    """Check what else a spec asks for, where its engines are members of the weight group.

    Args:
        engine: of the rollouts.
        publication: how weights reach them.
        shares_devices: whether trainer and rollouts take turns on the same devices.

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
    if shares_devices:
        raise ValueError(
            f"{name} needs trainer and engines on different devices at the same time: set resources.sharing to none, "
            "or update_weights_from to disk"
        )
    if (stages := pipeline_stages(engine.options)) > 1:
        raise ValueError(
            f"{name} numbers the ranks of tensor parallelism, and the {stages} stages of pp_size would have the same: "
            "leave it out, or set update_weights_from to disk"
        )
