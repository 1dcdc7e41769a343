"""Rows of OpenRLHF's flags: models, data, sampling, batches, optimiser, checkpoints."""

from typing import Any

from flotilla.importers.engines import EMBEDDED
from flotilla.importers.parameter import Parameter, Verdict, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Source
from flotilla.importers.spelling import KEY, LowRank, experiment_name, layers
from flotilla.importers.values import count, flag, integer, number, numbers, pieces, share, text, unchanged

LOW_RANK = LowRank(
    "--lora_rank", "--lora_alpha", "--target_modules", dropout="--lora_dropout", quantised="--load_in_4bit"
)
WITHOUT_CRITIC = {"--advantage_estimator": "reinforce"}
WITH_LORA = WITHOUT_CRITIC | {"--lora_rank": 8}
PLACEMENT = "each service has devices of its own: this changes speed, not what is computed"
SHARDING = (
    "how the model is sharded is said by parallelism (ranks, replicas, tensor_parallel, expert_parallel, "
    "sequence_parallel), and what a GPU's host keeps by parallelism.offload: this changes speed and memory, not what "
    "is computed"
)
ENGINE = EMBEDDED
KERNELS = "activations are kept and kernels are torch's own: this changes speed and memory, not what is computed"
ROLES = ("critic", "ref", "reward")
MOST_IMAGES = "--data.max_images_per_prompt"
PICTURES = {**WITHOUT_CRITIC, MOST_IMAGES: 1}
ON_FOUR_GPUS = {"--actor_num_gpus_per_node": 4}
WANDB = {"--use_wandb": "key"}
EVALUATED = {"--eval_dataset": "heldout.jsonl"}

BALANCE = "--aux_loss_coef"


def images(source: Source) -> dict[str, Any]:
    """Make the images of prompts, and what of the model computes them."""
    most = source.value(MOST_IMAGES)
    if not most:
        return {}
    return {
        "data.images": {"column": source.required("--data.image_key"), "max_per_prompt": most},
        "model.vision_tower": "frozen" if source.value("--actor.freeze_visual_encoder") else "trained",
    }


def router_row(alias: str) -> Parameter:
    """Make the row of the balance of a mixture's experts."""
    return translated(
        BALANCE, "optimisation.router.balance", number, "coefficient of the balance of experts, over all layers",
        example=0.01, default=0, context={}, aliases=(alias,),
    )  # fmt: skip


def router(source: Source) -> dict[str, Any]:
    """Make the loss of a mixture's routers, which is transformers' own."""
    balance = source.value(BALANCE)
    return {"optimisation.router.balance": balance, "optimisation.router.scope": "model"} if balance else {}


MODELS: tuple[Parameter, ...] = (
    applied("--pretrain", "model.path", text, "a directory, or a name on the hub", example="other-model",
            default=None, context={}, aliases=("--actor.model_name_or_path",)),
    translated("--reward_pretrain", "reward.components", text,
               "a component of kind reward_model, which reads the policy's text; several with commas are added up; "
               "without effect beside remote_rm_url",
               example="a-reward-model", default=None, context={"--remote_rm_url": None, "--reward_pretrain": "r"},
               aliases=("--reward.model_name_or_path",)),
    translated("--critic_pretrain", "algorithm.value_loss.path", text,
               "what the critic begins as, a reward model's head included: by default the first reward model, or the "
               "policy where graders are behind URLs; the policy's path is left out",
               example="a-reward-model", default=None, context={"--advantage_estimator": "gae"},
               aliases=("--critic.model_name_or_path",)),
    translated("--param_dtype", "model.dtype", text, "bf16 is bfloat16; fp16 is float32", example="fp32",
               default="bf16", aliases=("--ds.param_dtype",)),
    translated("--load_in_4bit", "model.lora.quantisation", flag, "nf4 with packed scales, of the weights beside "
               "adapters; without lora_rank it is refused", example=True, default=False, context=WITH_LORA,
               aliases=("--ds.load_in_4bit",)),
    translated("--lora_rank", "model.lora.rank", integer, "adapters are trained in place of the weights; 0 trains the "
               "weights", example=8, default=0, context=WITHOUT_CRITIC, aliases=("--ds.lora.rank",)),
    translated("--lora_alpha", "model.lora.alpha", number, "scale of the adapters, times their rank", example=32,
               default=16, context=WITH_LORA, aliases=("--ds.lora.alpha",)),
    translated("--lora_dropout", "model.lora.dropout", number, "share of an adapter's inputs that it does not see",
               example=0.1, default=0, context=WITH_LORA, aliases=("--ds.lora.dropout",)),
    translated("--target_modules", "model.lora.targets", layers, "all-linear, or names of layers; a pattern is "
               "refused", example=["q_proj"], default="all-linear", context=WITH_LORA,
               aliases=("--ds.lora.target_modules",)),
    router_row("--actor.aux_loss_coef"),
    translated("--data.image_key", "data.images.column", text, "column with images, where max_images_per_prompt is "
               "above 0", example="pictures", default="images", context=PICTURES),
    translated("--data.max_images_per_prompt", ("data.images", "data.images.max_per_prompt"), integer, "most images of "
               "a prompt; 0: text alone", example=2, default=0, context=WITHOUT_CRITIC),
    translated("--actor.freeze_visual_encoder", "model.vision_tower", flag, "what computes images: frozen, or trained "
               "with the rest", example=True, default=False, context=PICTURES),
    translated("--enable_ema", "optimisation.average_decay", flag, "a moving average of the weights",
               example=True, default=False, context={}, aliases=("--train.enable_ema",)),
    translated("--ema_beta", "optimisation.average_decay", number, "decay of the moving average", example=0.9,
               default=0.992, context={"--enable_ema": True}, aliases=("--train.ema_beta",)),
    translated("--attn_implementation", "model.attention", text,
               "the same names; flash attention where several GPUs of the trainer are written and it computes in "
               "bfloat16; beside ring_attn_size sdpa alone", example="eager", default="flash_attention_2",
               context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED, aliases=("--ds.attn_implementation",)),
    translated("--use_liger_kernel", "model.kernels", flag, "liger, where several GPUs of the trainer are written",
               example=True, default=False, harmless=(False,), context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED,
               aliases=("--ds.use_liger_kernel",)),
    translated("--flash_attn", "algorithm.value_loss.clip", flag, "of releases to 0.8.10: without a flag of 0.8.2 or "
               "later values may move by 0.2; kernels are torch's own", example=True, default=False, harmless=(False,),
               context={"--advantage_estimator": "gae"}, unread=Verdict.UNSUPPORTED),
    *unsupported(KERNELS, "--gradient_checkpointing_use_reentrant",
                 "--actor.gradient_checkpointing_reentrant"),
    applied("--gradient_checkpointing", "optimisation.activation_checkpointing", flag,
            "activations are computed again in the backward pass", example=True, default=False,
            aliases=("--actor.gradient_checkpointing_enable",)),
)  # fmt: skip

DATA: tuple[Parameter, ...] = (
    translated("--prompt_data", ("data.path", "data.sources"), pieces,
               "one file or folder is the path; several, a hub name and name@folder are sources; write a folder as "
               "./folder, since owner/name is a hub name", example="other.jsonl,owner/name", default=None,
               aliases=("--data.prompt_dataset",)),
    applied("--input_key", "data.prompt_column", text, "column with text or messages", example="question",
            default="input", aliases=("--data.input_key",)),
    applied("--label_key", "data.label_column", text, "column that graders compare with", example="answer",
            default=None, aliases=("--data.label_key",)),
    translated("--max_samples", "data.max_rows", integer, "the first rows; of each source where there are weights",
               example=500, default=1e8, aliases=("--data.max_samples",)),
    refused("--output_key", "train_ppo_ray samples its answers: leave it out; a script of train_sft is imported with "
            "it", default=None, aliases=("--data.output_key",)),
    translated("--input_template", "data.input_template", text,
               "the prompt goes where {} stands; without {} it has no effect", example="Q: {}", default=None,
               context={"--apply_chat_template": False}, aliases=("--data.input_template",)),
    translated("--apply_chat_template", "data.input_template", flag,
               "without it the prompt goes through input_template, or as it is, which is {} here", example=True,
               default=False, context={"--apply_chat_template": False}, aliases=("--data.apply_chat_template",)),
    translated("--prompt_split", "data.sources", text, "split of hub datasets and folders; a file has none",
               example="other", default="train", context={"--prompt_data": "owner/name"},
               aliases=("--data.prompt_split",)),
    translated("--prompt_data_probs", "data.sources", numbers,
               "weights: sources take turns by them, and a small one comes round again sooner", example="0.3,0.7",
               default=None, context={"--prompt_data": "a.jsonl,b.jsonl"}, aliases=("--data.prompt_probs",)),
    translated("--eval_dataset", ("evaluation.path", "evaluation.sets"), pieces,
               "one file or folder is the path; several, and hub names, are sets", example="other.jsonl,owner/name",
               default=None, aliases=("--eval.dataset",)),
    translated("--eval_split", "evaluation.sets", text, "split of hub datasets and folders; a file has none",
               example="test", default="train", context={"--eval_dataset": "owner/name"}, aliases=("--eval.split",)),
    translated("--eval_steps", "evaluation.every_versions", integer, "steps; -1 is at the start and the end only",
               example=5, default=-1, context=EVALUATED, aliases=("--eval.steps",)),
    translated("--eval_temperature", ("evaluation.temperature", "evaluation.greedy"), number,
               "softmax temperature; 0 is greedy", example=0, default=0.6, context=EVALUATED,
               aliases=("--eval.temperature",)),
    applied("--eval_n_samples_per_prompt", "evaluation.group_size", count, "answers per held-out prompt", example=2,
            default=4, context=EVALUATED, aliases=("--eval.n_samples_per_prompt",)),
)  # fmt: skip

SAMPLING: tuple[Parameter, ...] = (
    applied("--n_samples_per_prompt", "rollout.group_size", count, "answers per prompt", example=2, default=1,
            aliases=("--rollout.n_samples_per_prompt",)),
    translated("--prompt_max_len", ("data.max_prompt_tokens", "rollout.engine.context_tokens"), count,
               "longest prompt, which is cut from the left; with generate_max_len the engine's context",
               example=512, default=1024),
    translated("--generate_max_len", ("rollout.sampling.max_new_tokens", "rollout.engine.context_tokens"), count,
               "most tokens of an answer", example=512, default=1024,
               aliases=("--rollout.max_new_tokens", "--max_new_tokens")),
    translated("--data.max_len", "rollout.engine.context_tokens", count, "the engine's context; needs max_new_tokens",
               example=4096, default=None,
               context={"--generate_max_len": 1024}, aliases=("--max_len",)),
    applied("--temperature", "rollout.sampling.temperature", number,
            "softmax temperature, by which the trainer divides its logits, too", example=0.7, default=1.0,
            aliases=("--rollout.temperature",)),
    applied("--top_p", "rollout.sampling.top_p", number, "smallest set of tokens of this probability", example=0.9,
            default=1.0, aliases=("--rollout.top_p",)),
    translated("--top_k", "rollout.sampling.top_k", integer, "-1, all tokens, is 0 here", example=50, default=-1,
               translate=lambda value: max(value or 0, 0)),
    translated("--vllm_num_engines", "resources.rollouts.min", integer, "rollout services that must be there",
               example=4, translate=lambda value: max(value or 1, 1), aliases=("--vllm.num_engines",)),
    translated("--agent_func_path", ("rollout.agents", "reward.components"), text,
               "agents from outside, graded by themselves: run `python -m flotilla.agents openrlhf FILE EXPERIMENT` "
               "beside; without held-out rows",
               example="agent.py", default=None, context={"--eval_dataset": None},
               aliases=("--train.agent_func_path",)),
    *unsupported(ENGINE, "--vllm_tensor_parallel_size", "--vllm.tensor_parallel_size", harmless=(1,)),
    *unsupported(ENGINE, "--vllm_gpu_memory_utilization",
             "--vllm.gpu_memory_utilization", "--enforce_eager", "--vllm.enforce_eager", "--enable_prefix_caching",
             "--vllm.enable_prefix_caching",
             "--vllm_generate_batch_size", "--rollout.vllm_generate_batch_size"),
    translated("--vllm_enable_sleep", "resources.sharing", flag,
               "with --colocate_all_models trainer and engines take turns on the same devices", example=True,
               default=False, context={"--colocate_all_models": True}, unread=Verdict.UNSUPPORTED,
               aliases=("--vllm.enable_sleep",)),
    translated("--vllm_sync_backend", "asynchrony.publication.transport", text,
               "nccl is auto (nccl between GPUs), gloo is gloo; others are refused", example="gloo", context={},
               aliases=("--vllm.sync_backend",)),
    *unsupported("weights never travel through Ray here", "--vllm_sync_with_ray", "--vllm.sync_with_ray"),
)  # fmt: skip

BATCHES: tuple[Parameter, ...] = (
    translated("--train_batch_size", ("optimisation.groups_per_mini_batch", "asynchrony.require_batches"), count,
               "samples of one optimiser update, in groups; rollout_batch_size holds require_batches of them",
               example=256, default=128, aliases=("--train.batch_size",)),
    translated("--rollout_batch_size", "asynchrony.require_batches", count, "prompts of one step", example=512,
               default=1024, aliases=("--rollout.batch_size",)),
    translated("--micro_train_batch_size", "optimisation.micro_batch_tokens", count,
               "this many rows of full length make the token budget of a forward pass", example=2, default=4,
               aliases=("--train.micro_batch_size",)),
    translated("--use_dynamic_batch", "optimisation.micro_batch_tokens", flag,
               "train_max_tokens_per_gpu is the token budget", example=True, default=False,
               aliases=("--train.dynamic_batch_enable",)),
    applied("--train_max_tokens_per_gpu", "optimisation.micro_batch_tokens", count, "token budget of a forward pass",
            example=4096, default=16192, context={"--use_dynamic_batch": True},
            aliases=("--train.max_tokens_per_gpu",)),
    translated("--packing_samples", "optimisation.packing", flag, "packed; where it is silent, whichever is cheaper",
               example=True, default=False, translate=lambda value: "packed" if value else "auto",
               aliases=("--ds.packing_samples",)),
    applied("--max_epochs", "optimisation.epochs_per_step", count, "passes over a step's groups", example=2,
            default=1, aliases=("--train.max_epochs",)),
    translated("--num_episodes", "optimisation.steps", count,
               "passes over the prompts: with their number (--rows) and rollout_batch_size, the steps", example=3,
               default=1, context={"--max_steps": None}, aliases=("--train.num_episodes",)),
    translated("--max_steps", "optimisation.steps", integer, "steps; wins over num_episodes", example=20,
               default=None),
    *unsupported("one budget of tokens bounds every pass: log-probabilities do not depend on how they are cut",
                 "--micro_rollout_batch_size",
             "--rollout.micro_batch_size", "--rollout_max_tokens_per_gpu", "--rollout.max_tokens_per_gpu"),
)  # fmt: skip

OPTIMISER: tuple[Parameter, ...] = (
    applied("--actor_learning_rate", "optimisation.learning_rate", number, "peak learning rate", example=5e-7,
            default=1e-6, aliases=("--actor.adam.lr",)),
    translated("--lr_scheduler", ("optimisation.schedule", "optimisation.min_learning_rate_ratio"), text,
               "cosine_with_min_lr ends at a tenth, linear and cosine at 0", example="linear",
               default="cosine_with_min_lr", aliases=("--actor.lr_scheduler",)),
    translated("--lr_warmup_ratio", "optimisation.warmup_updates", share, "share of all updates, rounded up",
               example=0.5, default=0.03, aliases=("--actor.lr_warmup_ratio",)),
    applied("--max_norm", "optimisation.max_grad_norm", number, "bound of the gradient's norm", example=0.5,
            default=1.0, aliases=("--actor.max_norm",)),
    applied("--l2", "optimisation.weight_decay", number, "decoupled weight decay", example=0.1, default=0.0,
            aliases=("--actor.adam.weight_decay",)),
    applied("--adam_betas", "optimisation.betas", numbers, "decay of AdamW's two moments", example=[0.9, 0.99],
            default=[0.9, 0.95], aliases=("--actor.adam.betas",)),
    applied("--seed", "seed", integer, "seeds the order of rows and every sample", example=7, default=42,
            aliases=("--train.seed",)),
)  # fmt: skip

RUNNING: tuple[Parameter, ...] = (
    translated("--wandb_run_name", "name", text, "letters, digits, dot, dash and underscore are kept",
               example="another one", default="openrlhf", translate=experiment_name,
               aliases=("--logger.wandb.run_name",)),
    translated("--save_steps", "checkpoint.every_steps", integer, "-1 is after the last step only", example=4,
               default=-1, aliases=("--ckpt.save_steps",)),
    applied("--max_ckpt_num", "checkpoint.keep", count, "newest checkpoints", example=5, default=3,
            aliases=("--ckpt.max_num",)),
    *unsupported("a first run begins at --pretrain, as it does there without a checkpoint in --ckpt_path; to go on "
                 "where a run of ours ended: flotilla run --continue", "--load_checkpoint", "--ckpt.load_enable"),
    *unsupported("the fleet keeps an experiment's files under its own data directory", "--save_path",
             "--ckpt.output_dir", "--ckpt_path", "--ckpt.path"),
    *ignored("a checkpoint is always a Hugging Face directory", "--save_hf_ckpt", "--ckpt.save_hf"),
    translated("--disable_ds_ckpt", "checkpoint.contents", flag,
               "true keeps the weights alone: what goes on from them, after a crash as well, begins with moments of 0",
               example=True, default=False, aliases=("--ckpt.disable_ds",)),
    *ignored("every step is recorded", "--logging_steps", "--logger.logging_steps"),
    translated("--use_wandb", "tracking.trackers", unchanged, f"wandb is fed; {KEY}", example="key", default=None,
               aliases=("--logger.wandb.key",), is_secret=True),
    translated("--wandb_project", "tracking.trackers", text, "project of wandb", example="another",
               default="openrlhf_train_ppo", context=WANDB, aliases=("--logger.wandb.project",)),
    translated("--wandb_org", "tracking.trackers", text, "entity of wandb", example="a-team", default=None,
               context=WANDB, aliases=("--logger.wandb.org",)),
    translated("--wandb_group", "tracking.trackers", text, "group of wandb", example="a-group", default=None,
               context=WANDB, aliases=("--logger.wandb.group",)),
    translated("--use_tensorboard", "tracking.trackers", text, "directory of tensorboard, one folder per experiment",
               example="runs", default=None, aliases=("--logger.tensorboard_dir",)),
    translated("--actor_num_gpus_per_node", ("resources.trainer.devices", "parallelism.ranks"), integer,
               "GPUs of the trainer on each node, with a training process on each, that share the weights",
               example=4, default=8, harmless=(1,),
               context={}, unread=Verdict.UNSUPPORTED, aliases=("--actor.num_gpus_per_node",)),
    translated("--actor_num_nodes", "parallelism.nodes", integer,
               "machines that the trainer's processes are on; where the GPUs are silent, this changes speed, not what "
               "is computed", example=2, default=1, harmless=(1,), context=ON_FOUR_GPUS,
               unread=Verdict.UNSUPPORTED, aliases=("--actor.num_nodes",)),
    *unsupported("critic and reference compute on the trainer's devices, a reward model on those of the reward "
                 "service: this changes speed, not what is computed",
                 *(f"--{role}{dot}{what}" for role in ROLES for what in ("num_nodes", "num_gpus_per_node")
                   for dot in "_."), harmless=(1,)),
    translated("--colocate_all_models", "resources.sharing", flag,
               "with --vllm_enable_sleep trainer and engines take turns on the same devices", example=True,
               default=False, context={"--vllm_enable_sleep": True}, unread=Verdict.UNSUPPORTED,
               aliases=("--train.colocate_all",)),
    *unsupported(PLACEMENT, "--colocate_actor_ref",
                 "--train.colocate_actor_ref", "--colocate_critic_reward", "--train.colocate_critic_reward"),
    *unsupported(SHARDING, "--deepspeed_enable_sleep", "--ds.enable_sleep", "--zero_stage", "--ds.zero_stage",
                 "--adam_offload", "--ds.adam_offload", "--overlap_comm", "--ds.overlap_comm", "--ref_reward_offload",
                 "--ref.offload", "--reward.offload", "--grad_accum_dtype", "--ds.grad_accum_dtype",
                 "--use_ds_universal_ckpt", "--ds.use_universal_ckpt", "--deepcompile", "--ds.deepcompile",
                 "--actor_init_on_gpu", "--ds.experts_implementation"),
    *unsupported("how rows are loaded and tokenised changes speed, not what is computed", "--disable_fast_tokenizer",
                 "--data.disable_fast_tokenizer", "--data.dataloader_num_workers", harmless=(0,)),
    *unsupported("there is no profiler of OpenRLHF's", "--perf"),
    *unsupported("models come from the Hugging Face hub, or are directories: download one from elsewhere, and name its "
                 "directory", "--use_ms"),
    *unsupported("the newest checkpoints are kept, whatever room they take or metric they have: --max_ckpt_num",
                 "--max_ckpt_mem", "--ckpt.max_mem", "--best_metric_key", "--ckpt.best_metric_key",
                 harmless=("", 1e8, float("inf"))),
    *unsupported("a checkpoint holds the critic beside the policy, in its folder", "--save_value_network",
                 "--critic.save_value_network"),
    *ignored("the head has the name that transformers gives it, score", "--value_head_prefix",
             "--ds.value_head_prefix"),
    translated("--ds_tensor_parallel_size", "parallelism.tensor_parallel", count,
               "ranks that compute a layer together, where it divides the trainer's GPUs, which are ranks",
               example=2, default=1, harmless=(1,), context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED,
               aliases=("--ds.tensor_parallel_size",)),
    translated("--ring_attn_size", "parallelism.sequence_parallel", count,
               "ranks that share a sequence (by heads, Ulysses, where OpenRLHF passes parts round a ring), where it "
               "divides the trainer's GPUs which are ranks", example=2, default=1, harmless=(1,),
               context=ON_FOUR_GPUS, unread=Verdict.UNSUPPORTED, aliases=("--ds.ring_attn_size",)),
    *unsupported(SHARDING, "--ring_head_stride", "--ds.ring_attn_head_stride", "--zpg", harmless=(1,)),
    *ignored("bfloat16 is what --param_dtype is by itself", "--bf16"),
    *ignored("a launcher's own, of the processes that it starts", "--local_rank"),
)  # fmt: skip
