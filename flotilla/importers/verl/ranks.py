"""The training processes: one for each GPU of verl's trainer, and what they divide among them."""

from typing import Any

from flotilla.importers.parameter import UNSET
from flotilla.importers.source import Source
from flotilla.importers.verl.actor import ACTOR

Fields = dict[str, Any]


def ranks_of(source: Source) -> Fields:
    """Make the training processes, one for each GPU of the trainer's machine, where their number is written."""
    if not source.has("trainer.n_gpus_per_node") or source.value("trainer.nnodes") not in {None, UNSET, 1}:
        return {}
    ranks = int(source.required("trainer.n_gpus_per_node"))
    if ranks == 1:
        return {}
    fields: Fields = {"parallelism.device": "cuda", "parallelism.ranks": ranks}
    size = source.value(f"{ACTOR}.fsdp_config.fsdp_size")
    split = int(source.required(f"{ACTOR}.ulysses_sequence_parallel_size"))
    if split > 1 and ranks % split:
        source.refuse(f"{ACTOR}.ulysses_sequence_parallel_size", f"it does not divide the {ranks} GPUs")
    elif split > 1:
        return fields | {"parallelism.sequence_parallel": split}
    if divided := _divided(source, ranks):
        return fields | divided
    if isinstance(size, int) and 1 < size < ranks:
        if ranks % size:
            source.refuse(f"{ACTOR}.fsdp_config.fsdp_size", f"it does not divide the {ranks} GPUs")
        else:
            fields["parallelism.replicas"] = ranks // size
    return fields


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
