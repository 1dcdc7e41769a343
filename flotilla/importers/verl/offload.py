"""What the trainer's memory and kernels are: verl's offload, attention and precision, where its trainer's devices are
GPUs here, too."""

from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.spelling import attention_of
from flotilla.importers.verl.actor import ACTOR, MODEL, REF
from flotilla.importers.verl.images import adapters
from flotilla.importers.verl.learning import kl
from flotilla.importers.verl.rules import lengths, placement

Fields = dict[str, Any]


def offload(source: Source) -> Fields:
    """Make what is offloaded; where trainer and engine take turns, all of it leaves between two shifts anyhow."""
    placed = placement(source)
    if placed.get("resources.sharing") == "time" or not _is_on_gpus(placed):
        return {}
    if _shares_weights(placed) and source.value(f"{ACTOR}.fsdp_config.param_offload"):
        return {"parallelism.offload.parameters": True}
    fields: Fields = {}
    if source.value(f"{ACTOR}.fsdp_config.optimizer_offload"):
        fields["parallelism.offload.optimiser"] = True
    if kl(source) and not adapters(source) and source.value(f"{REF}.fsdp_config.param_offload"):
        fields["parallelism.offload.reference"] = True
    return fields


def kernels(source: Source) -> Fields:
    """Make attention by name, Liger's kernels, activations on the host, and what gradients are added up in."""
    placed = placement(source)
    on_gpus, dtype = _is_on_gpus(placed), str(lengths(source)["model.dtype"])
    fields: Fields = {}
    name = f"{MODEL}.override_config.attn_implementation"
    if name in source.given:
        found = attention_of(
            source.given[name].value,
            on_gpus=on_gpus,
            dtype=dtype,
            divides_sequences=placed.get("parallelism.sequence_parallel", 1) > 1,
        )
        if found is not None:
            source.value(name)
            fields["model.attention"] = found
    if not on_gpus:
        return fields
    if source.value(f"{MODEL}.use_liger"):
        fields["model.kernels"] = "liger"
    if source.value(f"{MODEL}.enable_activation_offload"):
        fields["parallelism.offload.activations"] = True
    reduce = f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype"
    if reduce in source.given and dtype == "bfloat16" and _shares_weights(placed):
        found = source.choose(reduce, {"fp32": "float32", "float32": "float32", "bf16": None, "bfloat16": None})
        if found is not None:
            fields["parallelism.mixed_precision.reduce"] = found
    return fields


def _is_on_gpus(placed: Fields) -> bool:
    return bool(placed.get("resources.trainer.devices", 0)) or placed.get("parallelism.device") == "cuda:0"


def _shares_weights(placed: Fields) -> bool:
    """Whether several ranks divide weights among them, beyond what each layer is divided by."""
    ranks = int(placed.get("resources.trainer.devices", 0)) * int(placed.get("parallelism.nodes", 1))
    return ranks > int(placed.get("parallelism.tensor_parallel", 1))
