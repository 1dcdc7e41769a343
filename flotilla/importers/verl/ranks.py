"""The training processes: one for each GPU of verl's trainer, and what they divide among them."""

from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.values import same
from flotilla.importers.verl.actor import ACTOR

Fields = dict[str, Any]

MOST_RANKS = 64
"""Of one job."""


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
    is_written = source.has("trainer.device")
    if is_written:
        fields["parallelism.device"] = "cuda"
    size = source.value(f"{ACTOR}.fsdp_config.fsdp_size")
    split = int(source.required(f"{ACTOR}.ulysses_sequence_parallel_size"))
    if split > 1 and ranks % split and is_written:
        source.refuse(f"{ACTOR}.ulysses_sequence_parallel_size", f"it does not divide the {ranks} GPUs")
    elif split > 1 and not ranks % split:
        return fields | {"parallelism.sequence_parallel": split}
    if divided := _divided(source, ranks):
        return fields | divided
    if isinstance(size, int) and 1 < size < ranks:
        if ranks % size:
            why = f"it does not divide the {ranks} GPUs"
            if is_written:
                source.refuse(f"{ACTOR}.fsdp_config.fsdp_size", why)
            else:
                source.put_aside(source.given[f"{ACTOR}.fsdp_config.fsdp_size"].spelling, why)
        else:
            fields["parallelism.replicas"] = ranks // size
    return fields


def _counted(source: Source) -> tuple[int, int]:
    """Return the GPUs of all nodes, and the nodes; no GPU where their number is not written, or asks for nothing."""
    gpus, nodes = (source.given.get(f"trainer.{name}") for name in ("n_gpus_per_node", "nnodes"))
    is_one = nodes is None or nodes.value is None or same(nodes.value, 1)
    if gpus is None or (is_one and same(gpus.value, 1)):
        return 0, 1
    count = 1 if is_one else int(source.required("trainer.nnodes"))
    return int(source.required("trainer.n_gpus_per_node")) * count, count


def _divided(source: Source, ranks: int) -> Fields:
    """Make what Megatron divides among the ranks: layers, and experts."""
    fields: Fields = {}
    names = {key: f"{ACTOR}.megatron.{key}_model_parallel_size" for key in ("tensor", "expert")}
    tensor, expert = (int(source.required(name)) for name in names.values())
    if tensor > 1 and ranks % tensor:
        source.put_aside(source.given[names["tensor"]].spelling, f"it does not divide the {ranks} GPUs of the trainer")
        tensor = 1
    elif tensor > 1:
        fields["parallelism.tensor_parallel"] = tensor
    if expert > 1 and (ranks % expert or expert % tensor):
        why = f"it must divide the {ranks} GPUs of the trainer, and be a multiple of tensor_model_parallel_size"
        source.put_aside(source.given[names["expert"]].spelling, why)
    elif expert > 1:
        fields["parallelism.expert_parallel"] = expert
    return fields
