"""Rows of what verl passes on to Megatron's own configuration of a model."""

from typing import Any

from flotilla.importers.parameter import NOTHING, Parameter, ignored, refused, translated, unsupported
from flotilla.importers.source import Source
from flotilla.importers.spelling import ROUTER_DTYPE
from flotilla.importers.values import number, text
from flotilla.importers.verl.actor import ACTOR, KERNELS, REF, SHARDING

HOLDERS = (f"{ACTOR}.megatron", f"{REF}.megatron", "critic.megatron")
SPLIT = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "context_parallel_size",
    "sequence_parallel", "use_distributed_optimizer", "deallocate_pipeline_outputs", "tp_comm_overlap",
)  # fmt: skip
COMPUTED = (
    "recompute_method", "recompute_granularity", "recompute_num_layers", "recompute_modules", "moe_layer_recompute",
    "attention_backend", "use_flash_attn", "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion",
    "bias_dropout_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion", "persist_layer_norm",
    "use_fused_rmsnorm", "use_fused_swiglu", "moe_permute_fusion", "moe_grouped_gemm", "moe_enable_deepep",
    "moe_token_dispatcher_type", "moe_shared_expert_overlap",
)  # fmt: skip
OVERRIDES = f"{ACTOR}.megatron.override_transformer_config"
BALANCE, SQUARE = f"{OVERRIDES}.moe_aux_loss_coeff", f"{OVERRIDES}.moe_z_loss_coeff"
BALANCING = f"{OVERRIDES}.moe_router_load_balancing_type"
OF_ROUTERS = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type")
REPLAYS = tuple(f"{ACTOR}.{engine}router_replay.mode" for engine in ("", "megatron.", "veomni."))
RECORDING = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
CHANGED = "the model is what its config.json says: change it there"
BY_ITSELF = {
    "recompute_granularity": None, "recompute_modules": ["core_attn"], "recompute_method": None,
    "recompute_num_layers": None, "attention_backend": "flash",
}  # fmt: skip
"""The section as verl's own files have it."""

TRANSFORMER_ROWS: tuple[Parameter, ...] = tuple(
    row
    for holder in HOLDERS
    for section in (f"{holder}.override_transformer_config",)
    for row in (
        *unsupported(SHARDING, *(f"{section}.{name}" for name in SPLIT), harmless=(1,)),
        *unsupported(KERNELS, *(f"{section}.{name}" for name in COMPUTED), harmless=("none",)),
        *unsupported(ROUTER_DTYPE, f"{section}.moe_router_dtype"),
        *(
            (
                refused(f"{section}.{name}", "routers' losses are the policy's alone: leave it out", default=default)
                for name, default in zip(OF_ROUTERS, (0, 0, "none"), strict=True)
            )
            if holder.startswith("critic")
            else ()
        ),
        *(
            ignored("nothing is learned there", *(f"{section}.{name}" for name in OF_ROUTERS))
            if holder.startswith(REF)
            else ()
        ),
        refused(f"{section}.normalization", CHANGED, default="RMSNorm"),
        refused(f"{section}.swiglu", CHANGED, default=True),
        refused(section, CHANGED, harmless=(*NOTHING, BY_ITSELF), is_tree=True),
        refused(f"{holder}.override_mcore_model_config", CHANGED, harmless=NOTHING, is_tree=True),
    )
)
ROUTER_ROWS: tuple[Parameter, ...] = (
    translated(SQUARE, "optimisation.router.z", number, "coefficient of the squared log-sum of a router's logits",
               example=0.001, default=0, context={}),
    translated(BALANCE, "optimisation.router.balance", number, "coefficient of the balance of experts, where "
               "moe_router_load_balancing_type is aux_loss: verl's models have none, and then nothing reads it",
               example=0.01, default=0, context={BALANCING: "aux_loss"}),
    translated(BALANCING, "optimisation.router.balance", text, "none, or aux_loss: each layer has a loss",
               example="aux_loss", default="none", context={BALANCE: 0.01}),
    *(
        translated(name, "algorithm.router_replay", text, "disabled, R2 (experts of the pass of old log-probs) or R3 "
                   "(those of the engine)", example="R3", default="disabled", context={})
        for name in REPLAYS
    ),
    *ignored("the engine records which experts it chose where router_replay.mode is R3, and only there", RECORDING),
)  # fmt: skip


def router(source: Source) -> dict[str, Any]:
    """Make the losses of a mixture's routers, and what they are told."""
    fields: dict[str, Any] = {}
    if square := source.value(SQUARE):
        fields["optimisation.router.z"] = square
    kind = source.choose(BALANCING, {"None": "none", "aux_loss": "aux_loss"})
    if kind == "aux_loss" and (balance := source.value(BALANCE)):
        fields["optimisation.router.balance"] = balance
    for name in REPLAYS:
        if mode := source.choose(name, {"disabled": None, "None": None, "R2": "R2", "R3": "R3"}):
            fields["algorithm.router_replay"] = mode
    return fields
