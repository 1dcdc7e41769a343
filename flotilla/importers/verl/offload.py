"""What of the trainer is in the host's memory: verl's offload, where its trainer's devices are GPUs here, too."""

from typing import Any

from flotilla.importers.parameter import UNSET
from flotilla.importers.source import Source
from flotilla.importers.verl.actor import ACTOR, REF
from flotilla.importers.verl.learning import adapters, kl

Fields = dict[str, Any]


def offload(source: Source) -> Fields:
    """Make what is offloaded; under a shared device all of it leaves between two shifts anyhow."""
    shares = source.has("actor_rollout_ref.hybrid_engine") and source.value("actor_rollout_ref.hybrid_engine")
    if shares or not (source.has("trainer.device") and source.value("trainer.device") == "cuda"):
        return {}
    if _shares_weights(source) and source.value(f"{ACTOR}.fsdp_config.param_offload"):
        return {"parallelism.offload.parameters": True}
    fields: Fields = {}
    if source.value(f"{ACTOR}.fsdp_config.optimizer_offload"):
        fields["parallelism.offload.optimiser"] = True
    if kl(source) and not adapters(source) and source.value(f"{REF}.fsdp_config.param_offload"):
        fields["parallelism.offload.reference"] = True
    return fields


def _shares_weights(source: Source) -> bool:
    """Whether several ranks divide the weights among them, beyond what each layer is divided by."""
    if not source.has("trainer.n_gpus_per_node") or source.value("trainer.nnodes") not in {None, UNSET, 1}:
        return False
    ranks = int(source.required("trainer.n_gpus_per_node"))
    return ranks > 1 and ranks != source.value(f"{ACTOR}.megatron.tensor_model_parallel_size")
