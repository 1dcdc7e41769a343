"""Rows of what verl passes on to Megatron's own configuration of a model."""

from flotilla.importers.attention import ROUTER_DTYPE
from flotilla.importers.parameter import NOTHING, Parameter, refused, unsupported
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
BALANCE = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
CHANGED = "the model is what its config.json says: change it there"

TRANSFORMER_ROWS: tuple[Parameter, ...] = tuple(
    row
    for holder in HOLDERS
    for section in (f"{holder}.override_transformer_config",)
    for row in (
        *unsupported(SHARDING, *(f"{section}.{name}" for name in SPLIT), harmless=(1,)),
        *unsupported(KERNELS, *(f"{section}.{name}" for name in COMPUTED), harmless=("none",)),
        *unsupported(ROUTER_DTYPE, f"{section}.moe_router_dtype"),
        *(refused(f"{section}.{name}", "there is no loss for a router's balance", default=0) for name in BALANCE),
        refused(f"{section}.normalization", CHANGED, default="RMSNorm"),
        refused(f"{section}.swiglu", CHANGED, default=True),
        refused(section, CHANGED, harmless=NOTHING, is_tree=True),
        refused(f"{holder}.override_mcore_model_config", CHANGED, harmless=NOTHING, is_tree=True),
    )
)
