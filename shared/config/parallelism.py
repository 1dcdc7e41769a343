"""What the training process computes on."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from shared.config.base import Config, Device

RANKS = frozenset(
    {
        "ranks", "world_size", "nodes", "num_nodes", "nnodes", "devices", "num_devices", "gpus", "num_gpus",
        "data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "sequence_parallel",
        "expert_parallel", "fsdp", "zero_stage",
    }
)  # fmt: skip
"""What asks for more than one training process, with or without ``_size``."""


class ParallelismConfig(Config):
    """The trainer is one process on one device. Sampling runs beside it, on ``resources.rollouts`` services."""

    device: Device = "cpu"
    """Torch device of the trainer, such as cpu or cuda:0."""
    threads: int = Field(1, ge=1)
    """Compute threads of the training process. More of them than free cores make it slower, not faster."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_more_ranks(cls, values: Any) -> Any:
        asked = (
            [key for key in values if {str(key), str(key).removesuffix("_size")} & RANKS]
            if isinstance(values, Mapping)
            else []
        )
        if asked:
            raise ValueError(
                f"parallelism.{asked[0]} asks for several training processes, and the trainer is one: remove it; for "
                "speed raise parallelism.threads or choose another parallelism.device, for memory lower "
                "optimisation.micro_batch_tokens, and for more samples at a time raise resources.rollouts.min"
            )
        return values
