"""The training processes: one for each GPU of verl's trainer, and what they divide among them."""

from dataclasses import dataclass
from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.values import same
from flotilla.importers.verl.actor import ACTOR
from flotilla.shared.config.sections.parallelism import MOST_RANKS

Fields = dict[str, Any]

NPU = (
    "there are no kernels for NPUs: trainer and rollouts compute on GPUs, on as many as NPUs are written, which "
    "changes speed, not what is computed"
)
GPUS_OF_A_NODE = 8
"""verl's default."""


def device_of(source: Source) -> str | None:
    """Return the trainer's device where it is written and known here; an NPU stands for whatever is there."""
    name = "trainer.device"
    if not source.has(name):
        return None
    if source.value(name) == "npu":
        source.put_aside(source.given[name].spelling, NPU)
        return None
    found = source.choose(name, {"cuda": "cuda:0", "cpu": "cpu"})
    return None if found is None else str(found)


def ranks_of(source: Source) -> Fields:
    """Make the trainer's devices, with a training process on each, where their number is written."""
    ranks, nodes = _counted(source)
    if ranks > MOST_RANKS:
        for name in source.given.keys() & {"trainer.n_gpus_per_node", "trainer.nnodes"}:
            source.put_aside(source.given[name].spelling, f"a job has {MOST_RANKS} training processes at most")
    if not 1 < ranks <= MOST_RANKS:
        return {}
    fields: Fields = {"resources.trainer.devices": ranks // nodes}
    if nodes > 1:
        fields["parallelism.nodes"] = nodes
    is_written = device_of(source) is not None
    if is_written:
        fields["parallelism.device"] = "cuda"
    axes = _axes(source, ranks, POLICY, is_written=is_written)
    fields |= {f"parallelism.{axis}": size for axis, size in axes.items()}
    if source.value("algorithm.adv_estimator") == "gae" and source.given.keys() & set(CRITIC.names):
        of_critic = _axes(source, ranks, CRITIC, is_written=is_written)
        if of_critic != axes:
            fields["parallelism.critic"] = {"replicas": 1} | of_critic
    return fields


@dataclass(frozen=True)
class Names:
    """Which parameters say how a model is divided among the ranks."""

    copy: str
    sequence: str
    tensor: str
    expert: str

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.copy, self.sequence, self.tensor, self.expert


def _names_of(holder: str, fsdp: str) -> Names:
    return Names(
        copy=f"{fsdp}.fsdp_size",
        sequence=f"{holder}.ulysses_sequence_parallel_size",
        tensor=f"{holder}.megatron.tensor_model_parallel_size",
        expert=f"{holder}.megatron.expert_model_parallel_size",
    )


POLICY = _names_of(ACTOR, f"{ACTOR}.fsdp_config")
CRITIC = _names_of("critic", "critic.model.fsdp_config")


def _axes(source: Source, ranks: int, names: Names, *, is_written: bool) -> dict[str, int]:
    """Find how ranks are divided for a model; nothing where its weights are sharded among all of them."""
    size, split = source.value(names.copy), int(source.required(names.sequence))
    if split > 1 and not ranks % split:
        return {"sequence_parallel": split}
    if split > 1 and is_written:
        source.refuse(names.sequence, f"it does not divide the {ranks} GPUs")
    if divided := _divided(source, ranks, names):
        return divided
    if not isinstance(size, int) or not 1 < size < ranks:
        return {}
    if not ranks % size:
        return {"replicas": ranks // size}
    why = f"it does not divide the {ranks} GPUs"
    if is_written:
        source.refuse(names.copy, why)
    else:
        source.put_aside(source.given[names.copy].spelling, why)
    return {}


def _counted(source: Source) -> tuple[int, int]:
    """Return the GPUs of all nodes, and the nodes; no GPU where their number is not written, or asks for nothing."""
    gpus, nodes = (source.given.get(f"trainer.{name}") for name in ("n_gpus_per_node", "nnodes"))
    is_one = nodes is None or nodes.value is None or same(nodes.value, 1)
    if is_one and (gpus is None or same(gpus.value, 1)):
        return 0, 1
    count = 1 if is_one else int(source.required("trainer.nnodes"))
    return (GPUS_OF_A_NODE if gpus is None else int(source.required("trainer.n_gpus_per_node"))) * count, count


def _divided(source: Source, ranks: int, names: Names) -> dict[str, int]:
    """Find what Megatron divides among the ranks: layers, and experts."""
    axes: dict[str, int] = {}
    tensor, expert = int(source.required(names.tensor)), int(source.required(names.expert))
    if tensor > 1 and ranks % tensor:
        source.put_aside(source.given[names.tensor].spelling, f"it does not divide the {ranks} GPUs of the trainer")
        tensor = 1
    elif tensor > 1:
        axes["tensor_parallel"] = tensor
    if expert > 1 and (ranks % expert or expert % tensor):
        why = f"it must divide the {ranks} GPUs of the trainer, and be a multiple of tensor_model_parallel_size"
        source.put_aside(source.given[names.expert].spelling, why)
    elif expert > 1:
        axes["expert_parallel"] = expert
    return axes
