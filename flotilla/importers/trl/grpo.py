"""TRL's ``GRPOTrainer`` as a system to import from.

Meanings and defaults: trl/trainer/grpo_config.py and trl/trainer/grpo_trainer.py of v1.9.0 (``_compute_loss``,
``_generate_and_score_completions``), and of earlier releases where ``releases`` says so.
"""

import ast
from typing import Any, Final

from flotilla.importers.engines import EMBEDDED
from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.trl import arguments
from flotilla.importers.trl.common import (
    STEPS,
    batch,
    held_out,
    model,
    naming,
    optimiser,
    over,
    place,
    router,
    tracking,
)
from flotilla.importers.trl.graders import rewards
from flotilla.importers.trl.releases import default
from flotilla.importers.trl.written import Rows
from flotilla.importers.values import count, flag, integer, number, numbers, text, unchanged

Fields = dict[str, Any]
VLLM: Final = {"use_vllm": True}
CONTEXT: Final = 2048
OUTSIDE: Final = {
    "token_truncate": ("token", "clamp"), "token_mask": ("token", "zero"),
    "sequence_truncate": ("sequence", "clamp"), "sequence_mask": ("sequence", "zero"),
}  # fmt: skip

KNOWN: Final = {
    "trl-lib/DeepMath-103K": "messages", "trl-lib/ultrafeedback-prompt": "messages", "trl-lib/tldr": "text",
}  # fmt: skip
"""What prompts are in datasets that TRL's own examples use (docs/source/dataset_formats.md)."""

ROWS: tuple[Parameter, ...] = (
    translated("reward_funcs", "reward.components", unchanged, "a function of the script becomes a custom grader, by "
               "an adapter that is written beside the spec and calls it with one answer at a time; accuracy_reward, "
               "think_format_reward and get_soft_overlong_punishment of trl.rewards are components; a name is a reward "
               "model", example=["think_format_reward"], default=None),
    translated("reward_model_name_or_path", "reward.components", text, "a reward model beside the functions",
               example="owner/reward-model", default=None, context={"reward_weights": None}),
    translated("reward_weights", "reward.components", numbers, "one weight for each function", example=[2.0],
               default=None, context={}),
    translated("num_generations", "rollout.group_size", count, "answers to each prompt", example=4, default=8),
    translated("generation_batch_size", "asynchrony.require_batches", count, "answers of one generation: over those of "
               "one update", example=64, default=None, context={}),
    translated("steps_per_generation", "asynchrony.require_batches", count, "batches of a device that one generation "
               "makes, over gradient_accumulation_steps", example=4, default=None, context={}),
    applied("num_iterations", "optimisation.epochs_per_step", count, "passes over a generation", example=2, default=1),
    translated("max_completion_length", ("rollout.sampling.max_new_tokens",), count, "longest answer", example=512,
               default=256),
    translated("max_prompt_length", "data.max_prompt_tokens", count, "longest prompt, cut from the left; releases from "
               "0.28 on have none, 0.26 and 0.27 cut none by themselves", example=100, default=None, context={}),
    translated("vllm_max_model_length", "rollout.engine.context_tokens", count, "prompt and answer together",
               example=4096, default=None, context={}, aliases=("vllm_max_model_len",)),
    applied("temperature", "rollout.sampling.temperature", number, "softmax temperature", example=0.7, default=1.0,
            context={}),
    applied("top_p", "rollout.sampling.top_p", number, "nucleus", example=0.9, default=1.0),
    translated("top_k", "rollout.sampling.top_k", integer, "0, -1 and null keep all", example=20, default=0),
    translated("min_p", "rollout.sampling.min_p", number, "least share of the most likely token", example=0.1,
               default=None),
    applied("repetition_penalty", "rollout.sampling.repetition_penalty", number, "divides logits of earlier tokens",
            example=1.1, default=1.0),
    applied("shuffle_dataset", "data.shuffle", flag, "each epoch in another order", example=False, default=True),
    translated("beta", "algorithm.kl.coefficient", number, "weight of k3 to the reference, in the loss; 0 is none",
               example=0.01, default=0.0, context={}),
    translated("epsilon", "algorithm.policy_loss.clip_low", number, "width below 1, and above it where epsilon_high is "
               "silent", example=0.1, default=0.2),
    translated("epsilon_high", "algorithm.policy_loss.clip_high", number, "width above 1; of cispo the largest weight",
               example=0.28, default=None),
    translated("delta", "algorithm.policy_loss.dual_clip", number, "largest ratio where the advantage is negative",
               example=2.0, default=None),
    translated("loss_type", ("algorithm.aggregation.mode",), text, "dapo, grpo, dr_grpo, cispo, sapo; bnpo where one "
               "batch of a device makes an update, or has one answer", example="grpo", default="dapo"),
    translated("importance_sampling_level", "algorithm.policy_loss.kind", text, "token; sequence is gspo",
               example="sequence", default="token"),
    translated("sapo_temperature_pos", "algorithm.policy_loss.tau_positive", number, "gate of positive advantages",
               example=2.0, default=1.0, context={"loss_type": "sapo"}),
    translated("sapo_temperature_neg", "algorithm.policy_loss.tau_negative", number, "gate of the others",
               example=2.0, default=1.05, context={"loss_type": "sapo"}),
    translated("scale_rewards", "algorithm.advantage.kind", arguments.flag_or_text, "group is grpo; none is dr_grpo",
               example="none", default="group"),
    translated("mask_truncated_completions", "reward.sample_mask", flag, "answers that reached the limit leave the "
               "loss", example=True, default=False),
    translated("entropy_coef", "algorithm.entropy_coefficient", number, "weight of the entropy bonus", example=0.01,
               default=0.0),
    translated("chat_template_kwargs", "data.chat_template_options", unchanged, "variables of the chat template",
               example=True, default=None, is_tree=True),
    translated("use_vllm", "algorithm.correction", flag, "the file names vLLM, whose log-probabilities are corrected "
               "for", example=True, default=False),
    translated("vllm_importance_sampling_correction", "algorithm.correction", flag, "weights of answers by the ratio "
               "to vLLM", example=False, default=True, context=VLLM),
    translated("vllm_importance_sampling_mode", ("algorithm.correction.weight.level",), text,
               "token or sequence, truncate or mask", example="token_truncate", default="sequence_mask", context=VLLM),
    translated("vllm_importance_sampling_clip_max", "algorithm.correction.weight.upper", number, "largest weight",
               example=2.0, default=3.0, context=VLLM, aliases=("vllm_importance_sampling_cap",)),
    translated("vllm_importance_sampling_clip_min", "algorithm.correction.weight.lower", number, "least weight",
               example=0.5, default=None, context=VLLM),
    translated("num_generations_eval", "evaluation.group_size", count, "answers to each held-out prompt", example=2,
               default=None, context={"eval_dataset": "owner/held-out", "eval_strategy": "steps", "eval_steps": 8}),
    *(refused(name, why, default=value, harmless=(None,)) for name, why, value in (
        ("top_entropy_quantile", "all sampled tokens are trained", 1.0),
        ("use_adaptive_entropy", "the weight of the entropy is fixed: set entropy_coef", False),
        ("use_bias_correction_kl", "the KL has no weights of its own", False),
        ("off_policy_mask_threshold", "set algorithm.correction.rejections", None),
        ("sync_ref_model", "the reference stays as it began", False),
        ("multi_objective_aggregation", "rewards are added up, then compared", "sum_then_normalize"),
        ("vllm_structured_outputs_regex", "answers have no grammar", None),
        ("vllm_guided_decoding_regex", "answers have no grammar", None),
        ("generation_kwargs", "name each of them as a parameter, or in rollout.sampling", None),
        ("environment_factory", "environments are rollout.episodes: see docs/episodes.md", None),
        ("rollout_func", "episodes of your own are agents: see docs/agents.md", None),
        ("tools", "tools are rollout.episodes.tools: see docs/episodes.md", None),
        ("reward_processing_classes", "a reward model has its own tokenizer", None),
    )),
    *ignored("without effect beside the parameters that are translated", "max_tool_calling_iterations",
             "ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef_min", "entropy_coef_max",
             "entropy_coef_delta", "entropy_target"),
    *ignored("vespo is refused", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *unsupported(EMBEDDED, "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
                 "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout",
                 "vllm_group_port", "vllm_enable_sleep_mode", "vllm_model_impl", "vllm_device", "vllm_dtype",
                 "vllm_enable_prefix_caching", "use_transformers_paged", "use_transformers_continuous_batching",
                 "transformers_continuous_batching_config", "cache_implementation"),
)  # fmt: skip


def sizes(source: Source) -> tuple[int, int, int]:
    """Return answers of a group, of an update, and updates that one pass over a generation makes."""
    size, update = int(source.required("num_generations")), batch(source)
    whole, per = source.value("generation_batch_size"), source.value("steps_per_generation")
    if whole is not None and per is not None:
        source.refuse("generation_batch_size", "give it or steps_per_generation, not both")
    if whole is None:
        accumulated = int(source.required("gradient_accumulation_steps"))
        whole = update // accumulated * (per if per is not None else accumulated)
    if whole % size:
        name = next(
            (n for n in ("generation_batch_size", "steps_per_generation") if n in source.given), "num_generations"
        )
        source.refuse(name, f"a generation of {whole} answers holds no whole number of groups of {size}")
    name = next(
        (n for n in ("gradient_accumulation_steps", "num_processes") if n in source.given),
        "per_device_train_batch_size",
    )
    if update % size:
        source.refuse(name, f"an update of {update} answers holds no whole number of groups of {size}: make it one; "
                      "num_processes=N says how many processes accelerate starts")  # fmt: skip
    if whole > update and whole % update:
        source.refuse(name, f"a generation of {whole} answers makes no whole number of updates of {update}")
    return size, update, max(whole // update, 1)


def groups(source: Source) -> Fields:
    """Make groups, mini-batches, steps and schedule; generation and training take turns."""
    size, update, batches = sizes(source)
    fields: Fields = {
        "rollout.group_size": size,
        "optimisation.groups_per_mini_batch": max(update // size, 1),
        "asynchrony.require_batches": batches,
        "asynchrony.staleness_threshold": 0.0,
        "optimisation.shuffle": batches > 1,
        "optimisation.learning_rate": default(source, "learning_rate"),
    }
    per_step = batches * int(source.required("num_iterations"))
    updates = source.required("max_steps")
    if updates <= 0:
        groups_of_step = max(update // size, 1) * batches
        rounds = 0 if source.rows is None else int(source.rows // groups_of_step * source.required("num_train_epochs"))
        if not rounds:
            source.lack(STEPS)
            return fields
        updates = rounds * per_step
    return fields | over(source, int(updates), per_step)


def sampling(source: Source) -> Fields:
    """Make how answers are sampled, and how long prompt and answer are."""
    answer, prompt = source.required("max_completion_length"), default(source, "max_prompt_length")
    top_k = default(source, "top_k")
    fields: Fields = {
        "rollout.sampling.max_new_tokens": answer,
        "rollout.sampling.temperature": default(source, "temperature"),
        "rollout.sampling.top_k": max(top_k or 0, 0),
        "rollout.sampling.min_p": source.value("min_p") or 0.0,
    }
    context = source.value("vllm_max_model_length")
    if prompt is not None:
        fields |= {"data.max_prompt_tokens": prompt, "data.overlong": {"kind": "truncate", "side": "left"}}
        context = context or prompt + answer
    if context is None and answer >= CONTEXT:
        context = answer + CONTEXT
    return fields | ({} if context is None else {"rollout.engine.context_tokens": context})


def data(source: Source) -> Fields:
    """Make the rows, and whether prompts are text or messages."""
    found = place(source, "train_dataset", "dataset_train_split")
    options = {name.rpartition(".")[2]: value for name, value in source.trees.get("chat_template_kwargs", {}).items()}
    fields: Fields = {"data.prompt_column": "prompt"} | ({"data.chat_template_options": options} if options else {})
    if found is None:
        if source.value("train_dataset") is None:
            source.lack("data.path: give train_dataset, or dataset_name")
        return fields
    fields |= {"data.path": found["path"]} if set(found) == {"path"} else {"data.sources": [found]}
    written = source.value("train_dataset")
    shape = prompts_of(written.code) if isinstance(written, Rows) else KNOWN.get(found.get("hub", ""))
    if shape == "messages":
        return fields
    if shape is None:
        source.note("prompts are taken for text, which TRL gives to the model as it is; where the rows hold messages, "
                    "which the model's chat template renders: --set data.input_template=null")  # fmt: skip
    return fields | {"data.input_template": "{}"}


def prompts_of(code: str) -> str | None:
    """Return whether code makes prompts as text or as messages, by what it writes beside the key ``prompt``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        for key, value in pairs:
            if isinstance(key, ast.Constant) and key.value == "prompt":
                is_list = isinstance(value, ast.List | ast.ListComp)
                is_text = isinstance(value, ast.JoinedStr | ast.Constant | ast.BinOp | ast.Subscript | ast.Call)
                found.add("messages" if is_list else "text" if is_text else "unknown")
    return found.pop() if len(found) == 1 and found <= {"messages", "text"} else None


def loss(source: Source) -> Fields:
    """Make the loss per token, and how token losses become one number."""
    kind = default(source, "loss_type")
    _, _, batches = sizes(source)
    modes: dict[str, Fields] = {
        "grpo": {"mode": "seq-mean-token-mean"}, "sapo": {"mode": "seq-mean-token-mean"},
        "dr_grpo": {"mode": "seq-mean-token-sum-norm", "fixed_length": source.required("max_completion_length")},
        "dapo": {"mode": "token-mean"}, "cispo": {"mode": "token-mean"}, "bnpo": {"mode": _of_batches(source)},
    }  # fmt: skip
    if kind not in modes:
        source.refuse("loss_type", f"{kind!r} is not offered here: use {', '.join(sorted(modes))}")
        return {}
    fields: Fields = {"algorithm.aggregation": modes[kind], "algorithm.old_log_probs": "recompute"}
    fields["algorithm.policy_loss"] = _per_token(source, kind)
    if kind in {"dapo", "cispo"} and batches > 1:
        # The sum is over the tokens of the whole generation there: AdamW divides the factor out, its bounds do not.
        norm = source.value("max_grad_norm")
        fields["optimisation.max_grad_norm"] = norm * batches if norm else None
        fields["optimisation.epsilon"] = source.required("adam_epsilon") * batches
    if bonus := source.value("entropy_coef"):
        fields["algorithm.entropy_coefficient"] = bonus
        if modes[kind]["mode"] != "token-mean" or batches > 1:
            source.refuse("entropy_coef", "it is a mean over tokens there, and is averaged as the loss here: use "
                          "loss_type dapo, and one update of a generation")  # fmt: skip
    return fields


def _of_batches(source: Source) -> str:
    per_device, update = int(source.required("per_device_train_batch_size")), batch(source)
    if update != per_device and per_device != 1 and default(source, "loss_type") == "bnpo":
        source.refuse("loss_type" if "loss_type" in source.given else "gradient_accumulation_steps",
                      "bnpo is a mean over tokens of each batch of a device; here all means are those of an update: "
                      "use loss_type dapo, the mean over all its tokens")  # fmt: skip
    return "seq-mean-token-mean" if per_device == 1 else "token-mean"


def _per_token(source: Source, kind: str) -> Fields:
    low, high = source.required("epsilon"), source.value("epsilon_high")
    level = source.choose("importance_sampling_level", {"token": "token", "sequence": "sequence"})
    delta, no_clamp = source.value("delta"), {"log_ratio_clamp": None}
    if kind == "sapo" or kind == "cispo":
        if level == "sequence":
            source.refuse("importance_sampling_level", f"loss_type {kind} has a ratio per token here")
        if kind == "sapo":
            taus = {"tau_positive": source.required("sapo_temperature_pos"),
                    "tau_negative": source.required("sapo_temperature_neg")}  # fmt: skip
            return {"kind": "sapo", **taus, **no_clamp}
        if high is None or high < 1:
            source.refuse("epsilon_high" if high is not None else "loss_type", "cispo takes epsilon_high, the largest "
                          "weight, of at least 1: give it, such as 5.0")  # fmt: skip
            return {}
        return {"kind": "cispo", "clip_low": 1.0, "clip_high": high - 1.0, **no_clamp}
    made: Fields = {"clip_low": low, "clip_high": low if high is None else high, **no_clamp}
    if delta is not None:
        if delta <= 1 + made["clip_high"]:
            source.refuse("delta", f"it must be above 1 + the clip, {1 + made['clip_high']:g}")
        else:
            made["dual_clip"] = delta
    return {"kind": "gspo", "gradient": "sequence", **made} if level == "sequence" else {"kind": "ppo", **made}


def advantage(source: Source) -> Fields:
    """Make the estimator, the KL and the mask of answers that were cut."""
    written = source.value("scale_rewards")
    scale = {True: "group", False: "none"}.get(written, written) if isinstance(written, bool) else written
    if scale not in {"group", "none"}:
        source.refuse("scale_rewards", f"{scale!r} is not offered here: use group or none")
    fields: Fields = {
        "algorithm.advantage": {"kind": "dr_grpo"} if scale == "none" else {"kind": "grpo", "epsilon": 1e-4}
    }
    if beta := default(source, "beta", "grpo"):
        fields["algorithm.kl"] = {
            "placement": "loss", "coefficient": beta, "estimator": "k3", "value_clamp": None,
            "log_ratio_bounds": [None, None],
        }  # fmt: skip
    if source.value("mask_truncated_completions"):
        longest = source.required("max_completion_length")
        fields["reward.sample_mask"] = {"truncated": True, "max_length": longest}
    return fields


def correction(source: Source) -> Fields:
    """Make the weights of what vLLM sampled; transformers' own sampling is not corrected."""
    if not source.value("use_vllm") or not default(source, "vllm_importance_sampling_correction"):
        return {"algorithm.correction": None}
    mode = default(source, "vllm_importance_sampling_mode")
    if mode not in OUTSIDE:
        source.refuse(
            "vllm_importance_sampling_mode", f"{mode!r} is not offered here: use {', '.join(sorted(OUTSIDE))}"
        )
        return {}
    level, outside = OUTSIDE[mode]
    bounds = {"upper": default(source, "vllm_importance_sampling_clip_max"),
              "lower": source.value("vllm_importance_sampling_clip_min")}  # fmt: skip
    weight = {"level": level, "outside": outside, **bounds}
    return {"algorithm.correction": {"weight": weight, "log_ratio_clamp": None}}


def evaluation(source: Source) -> Fields:
    """Make the evaluation, where there are rows for it and a strategy asks for it."""
    if (held := held_out(source)) is None:
        return {}
    found, every = held
    _, _, batches = sizes(source)
    sets = {"evaluation.path": found["path"]} if set(found) == {"path"} else {
        "evaluation.sets": [{"name": "held-out", **found}]
    }  # fmt: skip
    return sets | {
        "evaluation.every_versions": None if every is None else max(every // batches, 1),
        "evaluation.greedy": False,
        "evaluation.group_size": source.value("num_generations_eval") or source.required("num_generations"),
    }


TRL_GRPO: Final[System] = make_system(
    "trl", (arguments.ROWS, ROWS),
    rules=(naming, model, optimiser, router, groups, sampling, data, rewards, loss, advantage, correction, evaluation,
           tracking),
)  # fmt: skip
