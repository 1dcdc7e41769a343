"""Rows of verl's model, actor, reference and critic sections."""

from flotilla.importers.parameter import (
    Inherit,
    Parameter,
    Verdict,
    applied,
    ignored,
    refused,
    translated,
    unsupported,
)  # fmt: skip
from flotilla.importers.spelling import LowRank, layers
from flotilla.importers.values import count, flag, integer, number, share, text, texts

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
OPTIM = f"{ACTOR}.optim"

SHARDING = (
    "how the model is sharded is said by parallelism (ranks, replicas, tensor_parallel, expert_parallel, "
    "sequence_parallel), and what a GPU's host keeps by parallelism.offload: this changes speed and memory, not what "
    "is computed"
)
KERNELS = "activations are kept and kernels are torch's own: this changes speed and memory, not what is computed"
COMPILED = (
    "verl compiles the entropy of the logits alone, which is computed in chunks here; optimisation.compile_layers "
    "compiles whole layers: this changes speed, not what is computed"
)
MICRO = "optimisation.micro_batch_tokens alone bounds a pass: the loss does not depend on how it is cut"
CUTTING = "optimisation.micro_batch_tokens alone bounds a pass: log-probabilities do not depend on how they are cut"
PACKING = "sequences are packed without padding where that is cheaper: optimisation.packing"
REMOTE_CODE = (
    "code from a model's directory is never run: its weights are read by transformers' own class of that kind, and "
    "where transformers has none it is refused when it is loaded"
)
HEADS = (
    "the loss of heads that predict several tokens reaches the model's output layer, and there is none here: set it "
    "to false"
)
PROFILING = "the trainer alone is profiled as a whole, by torch: tracking.profiler"
FOLDER = "the fleet keeps an experiment's files under its own data directory"
WITH_GAE = {"algorithm.adv_estimator": "gae"}
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True}
CLIP_COV = {f"{ACTOR}.policy_loss.loss_mode": "clip_cov"}
KL_COV = {f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}
SAPO = {f"{ACTOR}.policy_loss.loss_mode": "sapo"}
WITH_LORA = {f"{MODEL}.lora_rank": 8}
LOW_RANK = LowRank(f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules")
WITH_KL = {f"{ACTOR}.use_kl_loss": True}

ON_FOUR_GPUS = {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4}

MODEL_ROWS: tuple[Parameter, ...] = (
    applied(f"{MODEL}.path", "model.path", text, "a directory, or a name on the hub", example="other-model",
            default="~/models/deepseek-llm-7b-chat"),
    refused(f"{MODEL}.external_lib", "no module is imported for the model: use one that transformers has",
            default=None),
    translated(f"{MODEL}.override_config.moe_config.freeze_moe_router", "optimisation.freeze", flag,
               "the routers' weights are not trained: *.mlp.gate.*", example=True, default=False,
               translate=lambda value: ["*.mlp.gate.*"] if value else []),
    *(refused(f"{MODEL}.override_config.{below}{name}", "a policy is trained without dropout, as the engine samples: "
              "set it to 0", default=0)
      for below in ("", "model_config.")
      for name in ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout")),
    Parameter(name=f"{MODEL}.override_config", verdict=Verdict.TRANSLATED, targets=("model.overrides",), is_tree=True,
              reason="values in the place of those of the model's config.json, for trainer and engine; in model_config "
              "below it, too"),
    *unsupported(REMOTE_CODE, f"{MODEL}.trust_remote_code", "critic.model.trust_remote_code", "data.trust_remote_code"),
    translated(f"{MODEL}.lora_rank", "model.lora.rank", integer, "adapters are trained in place of the weights; 0 "
               "trains the weights", example=8, default=0),
    translated(f"{MODEL}.lora_alpha", "model.lora.alpha", number, "scale of the adapters, times their rank",
               example=32, default=16, context=WITH_LORA),
    translated(f"{MODEL}.target_modules", "model.lora.targets", layers, "all-linear, or names of layers; a pattern is "
               "refused", example=["q_proj"], default="all-linear", context=WITH_LORA),
    translated(f"{MODEL}.exclude_modules", "model.lora.exclude", layers, "names of layers; a pattern is refused",
               example=["down_proj"], default=None, context=WITH_LORA),
    refused(f"{MODEL}.lora_adapter_path", "adapters begin at 0: merge this one (flotilla export), and name the merged "
            "model as path", default=None),
    refused(f"{MODEL}.custom_chat_template", "the chat template is the tokenizer's: put it into the model's directory",
            default=None),
    refused(f"{MODEL}.mtp.enable_train", HEADS, default=False),
    *unsupported("heads that predict several tokens speed sampling up, and are neither read nor kept: what is sampled "
                 "is the same", f"{MODEL}.mtp", is_tree=True),
    applied(f"{MODEL}.enable_gradient_checkpointing", "optimisation.activation_checkpointing", flag,
            "activations are computed again in the backward pass; where it is silent, ours, false", example=True),
    translated(f"{MODEL}.override_config.attn_implementation", "model.attention", text,
               "the same names; flash attention where the trainer is on GPUs (trainer.device is cuda) and computes in "
               "bfloat16; beside ulysses_sequence_parallel_size sdpa alone", example="flash_attention_2",
               default="flash_attention_2", context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED),
    translated(f"{MODEL}.enable_activation_offload", "parallelism.offload.activations", flag,
               "what layers keep for the backward pass, where trainer.device is cuda", example=True, default=False,
               harmless=(False,), context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED),
    translated(f"{MODEL}.use_liger", "model.kernels", flag, "liger, where trainer.device is cuda", example=True,
               default=False, harmless=(False,), context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED),
    *unsupported(KERNELS, f"{MODEL}.use_fused_kernels", f"{MODEL}.fused_kernel_options.impl_backend"),
    *ignored(PACKING, f"{MODEL}.use_remove_padding"),
    *ignored("how the model's files are read does not change them", f"{MODEL}.use_shm"),
    translated("actor_rollout_ref.hybrid_engine", "resources.sharing", flag,
               "where it is written for a trainer without engines of its own: trainer and rollouts take turns on the "
               "same devices; where it is silent they run side by side", example=True, harmless=(False,), context={},
               unread=Verdict.UNSUPPORTED),
)  # fmt: skip

COMPUTED_IN = (
    f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{ACTOR}.megatron.dtype",
)  # fmt: skip

ACTOR_ROWS: tuple[Parameter, ...] = (
    translated(f"{ACTOR}.ppo_mini_batch_size",
               ("optimisation.groups_per_mini_batch", "asynchrony.require_batches"), count,
               "prompts of one optimiser update; train_batch_size holds require_batches of them",
               example=128, default=256),
    translated(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "optimisation.micro_batch_tokens", count,
               "this many rows of full length make the token budget of a forward pass", example=4, default=None),
    translated(f"{ACTOR}.ppo_max_token_len_per_gpu", "optimisation.micro_batch_tokens", count,
               "token budget of a forward pass", example=4096, default=16384, context=DYNAMIC),
    translated(f"{ACTOR}.use_dynamic_bsz", "optimisation.micro_batch_tokens", flag,
               "chooses whether tokens or rows bound a forward pass", example=True, default=False,
               context={f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2}),
    translated(f"{ACTOR}.ulysses_sequence_parallel_size",
               ("optimisation.micro_batch_tokens", "parallelism.sequence_parallel"), count,
               "ranks that share a sequence, where the GPUs of the trainer are ranks; it multiplies verl's "
               "token budget", example=2, default=1, harmless=(1,), unread=Verdict.UNSUPPORTED,
               context={**DYNAMIC, "trainer.device": "cuda", "trainer.n_gpus_per_node": 4}),
    applied(f"{ACTOR}.grad_clip", "optimisation.max_grad_norm", number, "bound of the gradient's norm",
            example=0.5, default=1.0, context={}),
    translated(f"{ACTOR}.clip_ratio", ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"), number,
               "both widths, where clip_ratio_low and clip_ratio_high are not written (new releases of verl then let "
               "their own 0.2 win over what you wrote)", example=0.3, default=0.2),
    applied(f"{ACTOR}.clip_ratio_low", "algorithm.policy_loss.clip_low", number, "width below 1", example=0.1,
            default=Inherit(f"{ACTOR}.clip_ratio"), context={}),
    applied(f"{ACTOR}.clip_ratio_high", "algorithm.policy_loss.clip_high", number, "width above 1", example=0.28,
            default=Inherit(f"{ACTOR}.clip_ratio"), context={}),
    applied(f"{ACTOR}.clip_ratio_c", "algorithm.policy_loss.dual_clip", number, "dual clip, always on in verl",
            example=5.0, default=3.0, context={}),
    translated(f"{ACTOR}.loss_agg_mode", "algorithm.aggregation.mode", text,
               "the same names; seq-mean-token-sum-norm divides by the response length, which verl pads to",
               example="seq-mean-token-mean", default="token-mean"),
    translated(f"{ACTOR}.loss_scale_factor", "algorithm.aggregation.fixed_length", count,
               "divisor of seq-mean-token-sum-norm", example=1000, default=None,
               context={f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}),
    applied(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", number, "weight of the entropy bonus",
            example=0.01, default=0.0),
    translated(f"{ACTOR}.use_kl_loss", "algorithm.kl.placement", flag, "true puts the KL into the loss",
               example=True, default=False),
    applied(f"{ACTOR}.kl_loss_coef", "algorithm.kl.coefficient", number, "its weight", example=0.01, default=0.001,
            context=WITH_KL),
    translated(f"{ACTOR}.kl_loss_type", "algorithm.kl.estimator", text,
               "kl and k1, abs, mse and k2, low_var_kl and k3; a + takes the gradient of k2", example="mse",
               default="low_var_kl", context=WITH_KL),
    applied(f"{ACTOR}.ppo_epochs", "optimisation.epochs_per_step", count, "passes over a step's groups", example=2,
            default=1),
    translated(f"{ACTOR}.policy_loss.loss_mode", "algorithm.policy_loss.kind", text,
               "vanilla is ppo, geo_mean is gmpo, dppo_tv and dppo_kl are dppo, gpg is policy_gradient",
               example="gspo", default="vanilla"),
    applied(f"{ACTOR}.shuffle", "optimisation.shuffle", flag,
            "each pass draws which samples a mini-batch holds; without effect where a step has one", example=True,
            default=False, context={}),
    applied(f"{ACTOR}.policy_loss.clip_cov_ratio", "algorithm.policy_loss.fraction", number, "share of tokens dropped",
            example=0.001, default=0.0002, context=CLIP_COV),
    applied(f"{ACTOR}.policy_loss.clip_cov_lb", "algorithm.policy_loss.lower", number, "least covariance of those",
            example=0.5, default=1.0, context=CLIP_COV),
    applied(f"{ACTOR}.policy_loss.clip_cov_ub", "algorithm.policy_loss.upper", number, "largest covariance of those",
            example=10.0, default=5.0, context=CLIP_COV),
    applied(f"{ACTOR}.policy_loss.kl_cov_ratio", "algorithm.policy_loss.fraction", number, "share of tokens penalised",
            example=0.001, default=0.0002, context=KL_COV),
    applied(f"{ACTOR}.policy_loss.ppo_kl_coef", "algorithm.policy_loss.coefficient", number, "strength of the penalty",
            example=0.5, default=0.1, context=KL_COV),
    applied(f"{ACTOR}.policy_loss.dro_beta", "algorithm.policy_loss.beta", number, "pull of dro to the old policy",
            example=0.5, default=None, context={f"{ACTOR}.policy_loss.loss_mode": "dro",
                                                f"{ACTOR}.policy_loss.dro_beta": 0.2}),
    applied(f"{ACTOR}.tau_pos", "algorithm.policy_loss.tau_positive", number, "temperature of sapo's gate, A > 0",
            example=2.0, default=1.0, context=SAPO, aliases=(f"{ACTOR}.policy_loss.tau_pos",)),
    applied(f"{ACTOR}.tau_neg", "algorithm.policy_loss.tau_negative", number, "temperature of sapo's gate elsewhere",
            example=2.0, default=1.05, context=SAPO, aliases=(f"{ACTOR}.policy_loss.tau_neg",)),
    refused(f"{ACTOR}.policy_loss", "of the policy loss loss_mode and the options of clip_cov, kl_cov and dro are "
            "offered", is_tree=True),
    *ignored("what shuffle draws depends on the experiment's seed and the step", f"{ACTOR}.data_loader_seed"),
    *unsupported(MICRO, f"{ACTOR}.ppo_micro_batch_size"),
    *unsupported("answers to one prompt are packed behind it, and it is computed once, wherever that is cheaper: "
                 "optimisation.packing", f"{ACTOR}.use_prefix_grouper"),
    translated(f"{ACTOR}.checkpoint.async_save", "checkpoint.asynchronous", flag,
               "training goes on while a checkpoint is written; where it is silent, ours, true", example=False,
               translate=lambda value: True if value is None else value),
    *unsupported(COMPILED, f"{ACTOR}.use_torch_compile"),
    *unsupported(KERNELS, f"{ACTOR}.entropy_from_logits_with_chunking",
             f"{ACTOR}.entropy_checkpointing"),
    *ignored("optimal_token_baseline takes what it needs of the logits by itself", f"{ACTOR}.calculate_sum_pi_squared",
             f"{ACTOR}.sum_pi_squared_checkpointing"),
    *ignored("a checkpoint is read as a whole, or refused", f"{ACTOR}.checkpoint.strict"),
    *unsupported(SHARDING, f"{ACTOR}.strategy", f"{ACTOR}.fsdp_config.wrap_policy.min_num_params",
             f"{ACTOR}.fsdp_config.offload_policy", f"{ACTOR}.fsdp_config.reshard_after_forward",
             f"{ACTOR}.fsdp_config.forward_prefetch"),
    translated(f"{ACTOR}.fsdp_config.param_offload", "parallelism.offload.parameters", flag,
               "weights, gradients and optimiser state, where the trainer's several GPUs are ranks (trainer.device is "
               "cuda) and trainer and engine do not take turns", example=True, default=False, harmless=(False,),
               context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED),
    translated(f"{ACTOR}.fsdp_config.optimizer_offload", "parallelism.offload.optimiser", flag,
               "AdamW's moments, where trainer.device is cuda; param_offload takes them along", example=True,
               default=False, harmless=(False,), context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED),
    translated(f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype", "parallelism.mixed_precision.reduce", text,
               "fp32: gradients of bfloat16 passes are added up among ranks in float32, where several GPUs of the "
               "trainer are ranks (trainer.device is cuda); bf16 is ours without it", example="fp32", default="bf16",
               context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED),
    translated(f"{ACTOR}.fsdp_config.fsdp_size", "parallelism.replicas", integer,
               "GPUs that a copy of the weights is divided among, where those of the trainer are ranks: "
               "with fewer than these there are several copies (HSDP)",
               example=2, default=-1, harmless=(1, -1),
               context={"trainer.device": "cuda", "trainer.n_gpus_per_node": 4}, unread=Verdict.UNSUPPORTED),
    translated(f"{ACTOR}.megatron.tensor_model_parallel_size", "parallelism.tensor_parallel", count,
               "ranks that compute a layer together, where the trainer's GPUs are ranks that it divides",
               example=2, default=1, harmless=(1,), unread=Verdict.UNSUPPORTED, context=ON_FOUR_GPUS),
    translated(f"{ACTOR}.megatron.expert_model_parallel_size", "parallelism.expert_parallel", count,
               "ranks that divide the experts, where the trainer's GPUs are ranks that it "
               "divides, as a multiple of tensor_model_parallel_size", example=2, default=1, harmless=(1,),
               unread=Verdict.UNSUPPORTED, context=ON_FOUR_GPUS),
    translated(f"{ACTOR}.fsdp_config.model_dtype", "optimisation.masters", text, "fp32: float32 masters; bf16: the "
               "bfloat16 weights themselves are trained", example="bf16", default="fp32"),
    *(refused(name, "trainer and engine compute in one element type: give actor_rollout_ref.rollout.dtype alone",
              default=Inherit("actor_rollout_ref.rollout.dtype"), is_judged=True) for name in COMPUTED_IN),
    *unsupported(SHARDING, f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron", f"{REF}.megatron", is_tree=True,
                 harmless=(1, -1)),
    translated(f"{ACTOR}.checkpoint.save_contents", "checkpoint.contents", texts,
               "hf_model is model, which is always in Hugging Face format; without optimizer a crash loses moments",
               example=["hf_model"], default=None, aliases=(f"{ACTOR}.checkpoint.contents",)),
    translated(f"{ACTOR}.checkpoint.load_contents", "checkpoint.load_contents", texts,
               "read with resume_mode resume_path; what a run of its own goes on from is loaded whole",
               example=["model", "extra"], default=None,
               context={"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/runs/mine@40"}),
    *unsupported(PROFILING, f"{ACTOR}.profiler.discrete"),
)  # fmt: skip

REFERENCE_ROWS: tuple[Parameter, ...] = (
    translated(f"{REF}.fsdp_config.param_offload", "parallelism.offload.reference", flag,
               "the reference, where trainer.device is cuda, a KL needs it, and the actor's param_offload does not "
               "take it along", example=True, default=False, harmless=(False,),
               context=ON_FOUR_GPUS | {f"{ACTOR}.use_kl_loss": True},
               unread=Verdict.UNSUPPORTED),
    *unsupported(SHARDING, f"{REF}.strategy", f"{REF}.param_offload",
             f"{REF}.fsdp_config.reshard_after_forward", f"{REF}.fsdp_config.forward_prefetch",
             f"{REF}.fsdp_config.wrap_policy.min_num_params"),
    *unsupported(SHARDING, f"{REF}.ulysses_sequence_parallel_size", default=1),
    *unsupported(SHARDING, f"{REF}.fsdp_config", is_tree=True, harmless=(1, -1)),
    *unsupported(CUTTING, f"{REF}.log_prob_micro_batch_size",
             f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_use_dynamic_bsz",
             f"{REF}.log_prob_max_token_len_per_gpu"),
    *unsupported(KERNELS, *(f"{REF}.{name}" for name in ("use_torch_compile", "entropy_from_logits_with_chunking",
                                                         "entropy_checkpointing"))),
    *unsupported(SHARDING, f"{REF}.veomni", f"{ACTOR}.veomni", is_tree=True, harmless=(1, -1)),
    *unsupported(SHARDING, "model_engine", "actor_rollout_ref.nccl_timeout"),
    *unsupported(PROFILING, *(f"{holder}.profiler" for holder in (ACTOR, REF, "critic", "actor_rollout_ref.rollout")),
                 is_tree=True),
    *unsupported(PROFILING, f"{REF}.profiler.discrete", f"{REF}.profiler.all_ranks", f"{REF}.profiler.ranks"),
)  # fmt: skip

CRITIC_ROWS: tuple[Parameter, ...] = (
    applied("critic.optim.lr", "algorithm.value_loss.learning_rate", number, "peak learning rate of the critic",
            example=2e-5, default=1e-5, context=WITH_GAE),
    translated("critic.optim.lr_warmup_steps", "algorithm.value_loss.warmup_updates", integer,
               "in updates, as the policy's", example=5, default=-1, context=WITH_GAE),
    translated("critic.optim.lr_warmup_steps_ratio", "algorithm.value_loss.warmup_updates", share,
               "share of the steps, in updates; lr_warmup_steps above 0 wins", example=0.2, default=0.0,
               context=WITH_GAE),
    applied("critic.cliprange_value", "algorithm.value_loss.clip", number, "how far a value may move", example=0.2,
            default=0.5, context=WITH_GAE),
    translated("critic.loss_agg_mode", "algorithm.value_loss.aggregation.mode", text, "as for the actor",
               example="seq-mean-token-mean", default=Inherit(f"{ACTOR}.loss_agg_mode"), context=WITH_GAE),
    refused("critic.ppo_mini_batch_size", "critic and policy learn from the same mini-batches: leave it out",
            default=Inherit(f"{ACTOR}.ppo_mini_batch_size")),
    refused("critic.ppo_epochs", "the critic makes as many passes as the policy: leave it out",
            default=Inherit(f"{ACTOR}.ppo_epochs")),
    translated("critic.model.path", "algorithm.value_loss.path", text, "what the critic begins as, a reward model's "
               "head included; the policy's path is left out", example="a-reward-model",
               default=Inherit(f"{MODEL}.path"), context=WITH_GAE),
    *unsupported(MICRO, "critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size",
             "critic.ppo_max_token_len_per_gpu", "critic.use_dynamic_bsz", "critic.forward_max_token_len_per_gpu",
             "critic.forward_micro_batch_size_per_gpu", "critic.forward_micro_batch_size"),
    *unsupported(SHARDING, "critic.strategy"),
    translated("critic.ulysses_sequence_parallel_size", "parallelism.critic.sequence_parallel", count,
               "ranks that compute the critic's sequences together, where the trainer's GPUs are ranks that it divides",
               example=2, default=1, harmless=(1,), unread=Verdict.UNSUPPORTED, context=ON_FOUR_GPUS | WITH_GAE),
    translated("critic.model.fsdp_config.fsdp_size", "parallelism.critic.replicas", integer,
               "GPUs that a copy of the critic is divided among, as for the actor", example=2, default=-1,
               harmless=(1, -1), unread=Verdict.UNSUPPORTED, context=ON_FOUR_GPUS | WITH_GAE),
    translated("critic.megatron.tensor_model_parallel_size", "parallelism.critic.tensor_parallel", count,
               "ranks that compute a layer of the critic together, as for the actor", example=2, default=1,
               harmless=(1,), unread=Verdict.UNSUPPORTED, context=ON_FOUR_GPUS | WITH_GAE),
    translated("critic.megatron.expert_model_parallel_size", "parallelism.critic.expert_parallel", count,
               "ranks that divide the critic's experts, as for the actor", example=2, default=1, harmless=(1,),
               unread=Verdict.UNSUPPORTED, context=ON_FOUR_GPUS | WITH_GAE),
    *ignored(PACKING, "critic.model.use_remove_padding"),
    refused("critic.model.lora_rank", "the critic trains whole", default=0),
    *ignored("only read with lora_rank", "critic.model.lora_alpha", "critic.model.target_modules"),
    *unsupported(KERNELS, "critic.model.enable_gradient_checkpointing"),
    *unsupported(SHARDING, "critic.model.fsdp_config", "critic.fsdp", "critic.megatron", is_tree=True,
                 harmless=(1, -1)),
)  # fmt: skip

OPTIM_ROWS: tuple[Parameter, ...] = (
    applied(f"{OPTIM}.lr", "optimisation.learning_rate", number, "peak learning rate", example=3e-6, default=1e-6,
            context={}),
    translated(f"{OPTIM}.lr_warmup_steps", "optimisation.warmup_updates", integer,
               "verl's schedule moves once per step, ours once per update: multiplied by the updates of a step",
               example=5, default=-1),
    translated(f"{OPTIM}.lr_warmup_steps_ratio", "optimisation.warmup_updates", share,
               "share of the steps, in updates; lr_warmup_steps above 0 wins", example=0.2, default=0.0),
    applied(f"{OPTIM}.min_lr_ratio", "optimisation.min_learning_rate_ratio", number, "where cosine ends",
            example=0.1, default=0.0, context={f"{OPTIM}.lr_scheduler_type": "cosine"}),
    translated(f"{OPTIM}.lr_scheduler_type", "optimisation.schedule", text, "constant or cosine", example="cosine",
               default="constant", aliases=(f"{OPTIM}.warmup_style",)),
    applied(f"{OPTIM}.weight_decay", "optimisation.weight_decay", number, "decoupled weight decay", example=0.1,
            default=0.01, context={}),
    translated(f"{OPTIM}.betas", "optimisation.betas", lambda name, value: value, "decay of AdamW's two moments",
               example=[0.9, 0.95], default=[0.9, 0.999], translate=lambda value: value),
    translated(f"{OPTIM}.num_cycles", "optimisation.cosine_cycles", number, "waves of cosine: 0.5 falls once",
               example=1.5, default=0.5, context={f"{OPTIM}.lr_scheduler_type": "cosine"}),
    refused(f"{OPTIM}.optimizer", "the optimiser is AdamW", default="AdamW", harmless=("adam", "adamw")),
    *unsupported(SHARDING, *(f"{OPTIM}.override_optimizer_config.{name}" for name in (
        "optimizer_offload_fraction", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"))),
    *unsupported("weights, gradients and both moments of AdamW are float32 here, never less: more memory, and not the "
                 "rounding of fewer bits", f"{OPTIM}.override_optimizer_config.use_precision_aware_optimizer"),
    refused(f"{OPTIM}.override_optimizer_config", "the optimiser is AdamW with betas, weight_decay and lr",
            default=None, harmless=({},), is_tree=True),
    *ignored("the schedule always runs over all steps of the experiment", f"{OPTIM}.total_training_steps"),
    *ignored("names the module that AdamW comes from", f"{OPTIM}.optimizer_impl"),
)  # fmt: skip

MEGATRON = "megatron.optim"
LR = {f"{MEGATRON}.lr": 1e-5, f"{MEGATRON}.lr_decay_style": "cosine"}
WSD = {f"{MEGATRON}.lr_decay_style": "WSD", f"{MEGATRON}.lr_wsd_decay_steps": 3}

MEGATRON_ROWS: tuple[Parameter, ...] = (
    applied(f"{MEGATRON}.lr", "optimisation.learning_rate", number, "peak learning rate", example=3e-6,
            default=Inherit(f"{OPTIM}.lr"), context={}),
    applied(f"{MEGATRON}.clip_grad", "optimisation.max_grad_norm", number, "bound of the gradient's norm", example=0.5,
            default=Inherit(f"{ACTOR}.grad_clip"), context={}, aliases=(f"{OPTIM}.clip_grad",)),
    applied(f"{MEGATRON}.weight_decay", "optimisation.weight_decay", number, "decoupled weight decay", example=0.1,
            default=Inherit(f"{OPTIM}.weight_decay"), context={}),
    translated(f"{MEGATRON}.lr_warmup_steps", "optimisation.warmup_updates", integer,
               "in updates: multiplied by the updates of a step", example=5,
               default=Inherit(f"{OPTIM}.lr_warmup_steps")),
    translated(f"{MEGATRON}.lr_warmup_steps_ratio", "optimisation.warmup_updates", share,
               "share of the steps, in updates", example=0.2, default=Inherit(f"{OPTIM}.lr_warmup_steps_ratio")),
    translated(f"{MEGATRON}.lr_decay_style", "optimisation.schedule", text, "constant, linear, cosine, WSD or "
               "inverse-square-root",
               example="linear", default=Inherit(f"{OPTIM}.lr_scheduler_type"), aliases=(f"{OPTIM}.lr_decay_style",)),
    translated(f"{MEGATRON}.min_lr", "optimisation.min_learning_rate_ratio", number, "as a share of the peak",
               example=1e-6, default=None, context=LR, aliases=(f"{OPTIM}.min_lr",)),
    refused(f"{MEGATRON}.optimizer", "the optimiser is AdamW", default="adam"),
    translated(f"{MEGATRON}.lr_warmup_init", "optimisation.warmup_start_ratio", number,
               "where warm-up begins, as a share of the peak", example=1e-6, default=0.0,
               context=LR | {f"{MEGATRON}.lr_warmup_steps": 2}, aliases=(f"{OPTIM}.lr_warmup_init",)),
    translated(f"{MEGATRON}.lr_decay_steps", "optimisation.decay_updates", integer,
               "steps, warm-up included, until the learning rate is at its least, in updates; null: the last one",
               example=5, default=None, context=LR, aliases=(f"{OPTIM}.lr_decay_steps",)),
    translated(f"{MEGATRON}.lr_wsd_decay_steps", "optimisation.wsd_decay_updates", integer,
               "steps over which WSD falls at the end, in updates", example=4, default=None, context=WSD,
               aliases=(f"{OPTIM}.lr_wsd_decay_steps",)),
    translated(f"{MEGATRON}.lr_wsd_decay_style", "optimisation.wsd_decay", text,
               "exponential, linear, cosine or minus_sqrt", example="cosine", default="exponential", context=WSD,
               aliases=(f"{OPTIM}.lr_wsd_decay_style",)),
    refused(f"{MEGATRON}.weight_decay_incr_style", "weight decay is constant", default="constant",
            aliases=(f"{OPTIM}.weight_decay_incr_style",)),
    *ignored("a checkpoint always brings its schedule back", f"{MEGATRON}.use_checkpoint_opt_param_scheduler"),
    *ignored("the schedule always runs over all steps of the experiment", f"{MEGATRON}.total_training_steps"),
)  # fmt: skip
