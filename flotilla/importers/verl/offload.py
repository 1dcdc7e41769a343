"""What of the trainer is in the host's memory: verl's offload, where its trainer's devices are GPUs here, too."""

from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.verl.actor import ACTOR, REF
from flotilla.importers.verl.learning import adapters, kl
from flotilla.importers.verl.rules import placement

Fields = dict[str, Any]


def offload(source: Source) -> Fields:
    """Make what is offloaded; where trainer and engine take turns, all of it leaves between two shifts anyhow."""
    placed = placement(source)
    devices = placed.get("resources.trainer.devices", 0)
    if placed.get("resources.sharing") == "time" or not (devices or placed.get("parallelism.device") == "cuda:0"):
        return {}
    ranks = devices * placed.get("parallelism.nodes", 1)
    # Weights that several ranks divide among them, beyond what each layer is divided by.
    shards = ranks > placed.get("parallelism.tensor_parallel", 1)
    if shards and source.value(f"{ACTOR}.fsdp_config.param_offload"):
        return {"parallelism.offload.parameters": True}
    fields: Fields = {}
    if source.value(f"{ACTOR}.fsdp_config.optimizer_offload"):
        fields["parallelism.offload.optimiser"] = True
    if kl(source) and not adapters(source) and source.value(f"{REF}.fsdp_config.param_offload"):
        fields["parallelism.offload.reference"] = True
    return fields
