"""What the training processes compute on, and how many there are."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config, DeviceChoice, Threads

RANKS = frozenset(
    {
        "world_size", "num_nodes", "nnodes", "devices", "num_devices", "gpus", "num_gpus",
        "data_parallel", "tensor_parallel_size", "pipeline_parallel", "context_parallel", "sequence_parallel_size",
        "expert_parallel_size", "fsdp", "zero_stage",
    }
)  # fmt: skip
"""What asks for several training processes under other names, with or without ``_size``."""
OF_SEVERAL = (
    "nodes",
    "replicas",
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel",
    "critic",
    "collective_timeout_seconds",
)


class OffloadConfig(Config):
    """What is in the host's memory while a GPU does not need it; on a CPU all of it is there anyhow."""

    parameters: bool = False
    """Sharded weights, their gradients and optimiser state: a GPU has the layer that it computes, and the host's cores
    make the updates. Of all models that the trainer has. Needs several ranks."""
    optimiser: bool = False
    """AdamW's two moments, 8 bytes per trained parameter: an update takes them to the GPU a bucket at a time."""
    reference: bool = False
    """The reference model, which is on the GPU for its pass alone, once per step."""
    activations: bool = False
    """What layers keep for the backward pass, which brings it back: beside `optimisation.activation_checkpointing` the
    input of each layer."""

    @property
    def chosen(self) -> list[str]:
        """Names of what is offloaded."""
        return [name for name in type(self).model_fields if getattr(self, name)]


class CriticParallelismConfig(Config):
    """How the trainer's ranks are divided for the critic; each field as that of ``parallelism``."""

    replicas: int = Field(1, ge=1)
    """Copies of its weights that the ranks keep together (HSDP)."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that compute each of its layers together."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that divide the experts of each of its layers."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that compute the same sequences together (Ulysses)."""


MOST_RANKS: Final = 4096
"""Of one trainer: beyond it a number is rather a slip than a fleet."""


class MixedPrecisionConfig(Config):
    """What layers compute in, where ranks share weights that stay float32 with their gradients and moments (FSDP2)."""

    compute: Literal["bfloat16"] = "bfloat16"
    """Element type that a layer's weights are gathered in, and that it computes in."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Element type that gradients travel and are added up in. bfloat16 halves what travels, and rounds each sum."""


class ParallelismConfig(Config):
    """The trainer: one process on one device, or several ranks, on one machine or several, that share weights and
    work."""

    device: DeviceChoice = "auto"
    """Torch device of the trainer, such as cpu or cuda:0. With several ranks cuda, of which each rank takes one. auto:
    cuda where the first trainer service has a GPU for each rank, else cpu; what was decided then stays."""
    threads: Threads = "auto"
    """Compute threads of each training process. auto: all cores of its host while nothing else of the fleet computes
    there, else a part of them, the larger the more of the time it computes; figures of two runs then differ in their
    last bits. With a number it always takes that many; more than there are free cores make it slower, not faster."""
    ranks: int = Field(1, ge=1, le=MOST_RANKS)
    """Training processes on all machines together. Each keeps a part of weights, gradients and optimiser state (FSDP2),
    and computes a part of each mini-batch. 1 trains in one process that has all of them. Left out, it is
    resources.trainer.devices on each of nodes where that is a number, else 1."""
    nodes: int = Field(1, ge=1, le=MOST_RANKS)
    """Trainer services that the ranks are on, each ranks / nodes of them, usually one service per machine. All of them
    must see the gateway's data directory under the same path. 1: all ranks are on one trainer's machine."""
    replicas: int = Field(1, ge=1)
    """Copies of the weights that the ranks keep together, each divided among ranks / replicas of them (HSDP)."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that compute each layer of the same sequences together, each some of its heads and columns; weights stay
    divided that way while they compute. It divides the ranks, the model's heads and its layers' widths. Models that
    transformers has a plan for."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that divide the experts of each layer of a mixture-of-experts model, each some of them, whole: tokens
    travel to their experts. It divides ranks / replicas and the number of experts, and is a multiple of
    tensor_parallel."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that compute the same sequences together, each a part of their positions (Ulysses): for long sequences. It
    divides the ranks and the model's attention heads."""
    critic: CriticParallelismConfig | None = None
    """How the same ranks are divided for the critic, whose passes they share otherwise then. Null: as the policy."""
    collective_timeout_seconds: float = Field(600.0, ge=10, le=7200)
    """A collective between ranks that takes longer ends the job, which then continues from its checkpoint."""
    offload: OffloadConfig = OffloadConfig()
    """What is in the host's memory while a GPU does not need it."""
    mixed_precision: MixedPrecisionConfig | None = None
    """Compute in another element type than ranks keep their weights in, and add gradients up in one of its own. It
    needs ranks that share weights. model.dtype auto then is float32; with bfloat16, whose masters and moments are
    float32 all the same, `reduce` alone has an effect. Null: all in the weights' own."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_names(cls, values: Any) -> Any:
        asked = (
            [key for key in values if {str(key), str(key).removesuffix("_size")} & RANKS]
            if isinstance(values, Mapping)
            else []
        )
        if asked:
            raise ValueError(
                f"parallelism.{asked[0]} asks for several training processes in a way that there is not: "
                "parallelism.ranks processes share the weights (FSDP2), on parallelism.nodes trainers' machines, in "
                "parallelism.replicas copies (HSDP); of these parallelism.tensor_parallel share each layer, "
                "parallelism.expert_parallel the experts of a layer, or parallelism.sequence_parallel each sequence "
                "(Ulysses); for more samples at a time raise resources.rollouts.min"
            )
        return values

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> "ParallelismConfig":
        if self.ranks == 1:
            for name in OF_SEVERAL:
                if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"parallelism.{name} has no effect while parallelism.ranks is 1: raise ranks, or leave it out"
                    )
        if self.ranks % self.nodes:
            raise ValueError(
                f"parallelism.ranks {self.ranks} counts the ranks of all nodes: parallelism.nodes {self.nodes} must "
                "divide it"
            )
        _check_axes(self.ranks, self, "parallelism")
        if self.critic is not None:
            _check_axes(self.ranks, self.critic, "parallelism.critic")
        if self.ranks > 1 and ":" in self.device:
            raise ValueError(
                f"parallelism.device {self.device} is one device, and parallelism.ranks is {self.ranks}: write cuda, "
                "and each rank takes the device with its number"
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> "ParallelismConfig":
        chosen = self.offload.chosen
        if chosen and self.device == "cpu":
            raise ValueError(
                f"parallelism.offload.{chosen[0]} has no effect while parallelism.device is cpu: the host's memory has "
                "it already; leave it out"
            )
        split = [self.tensor_parallel, *([] if self.critic is None else [self.critic.tensor_parallel])]
        if self.offload.parameters and self.ranks in split:
            raise ValueError(
                "parallelism.offload.parameters needs weights that ranks share among them (FSDP2), and there is one "
                "rank for each part: raise parallelism.ranks, or use offload.optimiser"
            )
        if self.mixed_precision is not None and self.ranks == self.tensor_parallel:
            raise ValueError(
                "parallelism.mixed_precision is a policy of weights that ranks share among them (FSDP2), and there is "
                "one rank for each part: raise parallelism.ranks, or set model.dtype to bfloat16, which keeps float32 "
                "masters as well"
            )
        beside = [name for name in chosen if name not in {"parameters", "activations"}]
        if self.offload.parameters and beside:
            raise ValueError(
                f"parallelism.offload.{beside[0]} has no effect beside offload.parameters, which takes all models and "
                "their optimiser state to the host's memory: leave it out"
            )
        return self


def _check_axes(ranks: int, axes: ParallelismConfig | CriticParallelismConfig, where: str) -> None:
    """Check that ranks can be divided as a section says.

    Raises:
        ValueError: they cannot; it names the field under ``where``.
    """
    if ranks % axes.tensor_parallel:
        raise ValueError(f"{where}.tensor_parallel {axes.tensor_parallel} must divide parallelism.ranks {ranks}")
    shared = ranks // axes.tensor_parallel
    if shared % axes.replicas or (shared > 1 and shared == axes.replicas):
        each = "" if axes.tensor_parallel == 1 else f" / {axes.tensor_parallel} (tensor_parallel)"
        raise ValueError(
            f"{where}.replicas {axes.replicas} does not divide {ranks} ranks{each} into parts of two or "
            "more: choose a smaller divisor"
        )
    if axes.sequence_parallel > 1 and (ranks % axes.sequence_parallel or axes.replicas > 1):
        raise ValueError(
            f"{where}.sequence_parallel {axes.sequence_parallel} must divide parallelism.ranks {ranks}, "
            f"and {where}.replicas must be 1 beside it"
        )
    if axes.sequence_parallel > 1 and max(axes.tensor_parallel, axes.expert_parallel) > 1:
        raise ValueError(
            f"{where}.sequence_parallel divides positions among ranks that tensor_parallel and expert_parallel "
            "take to have all of them: use either it or these"
        )
    divides = not ranks // axes.replicas % axes.expert_parallel
    if axes.expert_parallel > 1 and not (divides and axes.expert_parallel % axes.tensor_parallel == 0):
        raise ValueError(
            f"{where}.expert_parallel {axes.expert_parallel} must divide ranks / replicas "
            f"{ranks // axes.replicas} and be a multiple of tensor_parallel {axes.tensor_parallel}"
        )
