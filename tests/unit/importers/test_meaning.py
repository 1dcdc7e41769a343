"""What several parameters mean together, and which values are refused where their parameter is not."""

import math
from typing import Any

import pytest

from flotilla.importers.build import Imported, look_up
from flotilla.importers.openrlhf.launch import read_openrlhf
from flotilla.importers.parameter import Verdict
from flotilla.importers.roll.learning import PG_WORKER
from flotilla.importers.systems import read
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import BASES, import_flat

ASYNC = {"data.train_batch_size": 0, "rollout.total_rollout_steps": 10_000}
VAL = "actor_rollout_ref.rollout.val_kwargs"
ACTOR = "actor_rollout_ref.actor"
RC = "algorithm.rollout_correction"
GIGPO = {"adv_estimator": "gigpo", "reward_normalization.grouping": "traj_group_id",
         "reward_normalization.method": "mean", "num_return_sequences_in_group": 4}  # fmt: skip
HELD_OUT = {"validation.data_args.file_name": "heldout.jsonl"}
TRAIN = "actor_train.training_args"
MIX = "actor_train.data_args.domain_interleave_probs"


def imported(system: str, **values: Any) -> Imported:
    return import_flat(system, {**BASES[system], **values})


def field(found: Imported, path: str) -> Any:
    assert found.spec is not None, found.report.problems
    return look_up(found.spec.model_dump(mode="json"), path)


@pytest.mark.parametrize(
    ("system", "values", "path", "expected"),
    [
        ("verl", {"data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 128}, "asynchrony.require_batches", 4),
        ("verl", {}, "algorithm.old_log_probs", "recompute"),
        ("verl", {}, "algorithm.policy_loss.dual_clip", 3.0),
        ("verl", {}, "optimisation.weight_decay", 0.01),
        ("verl", {}, "algorithm.advantage.epsilon", 1e-6),
        ("verl", {}, "evaluation.greedy", True),
        ("verl", {f"{VAL}.temperature": 0.6}, "evaluation.greedy", True),
        ("verl", {f"{VAL}.temperature": 0.6, f"{VAL}.top_k": 5}, "evaluation.top_k", None),
        ("verl", {f"{VAL}.do_sample": True, f"{VAL}.temperature": 0.6}, "evaluation.top_k", 0),
        ("verl", {f"{VAL}.do_sample": True, f"{VAL}.temperature": 0.6}, "evaluation.top_p", 1.0),
        ("openrlhf", {}, "evaluation.temperature", 0.6),
        ("openrlhf", {"--eval_temperature": 0}, "evaluation.temperature", None),
        ("roll", {**HELD_OUT, "validation.generating_args.temperature": 0.6}, "evaluation.top_k", 50),
        ("roll", {**HELD_OUT, "validation.generating_args.top_k": -1}, "evaluation.top_k", 0),
        ("roll", {**HELD_OUT, "validation.generating_args.temperature": 0}, "evaluation.top_p", None),
        ("verl", {}, "checkpoint.every_steps", 10),
        ("verl", {f"{ACTOR}.clip_ratio": 0.3}, "algorithm.policy_loss.clip_high", 0.3),
        ("verl", {f"{ACTOR}.clip_ratio": 0.3, f"{ACTOR}.clip_ratio_high": 0.28},
         "algorithm.policy_loss.clip_high", 0.28),
        ("verl", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k3+"}, "algorithm.kl.gradient", "k2"),
        ("verl", {f"{ACTOR}.use_kl_loss": True}, "algorithm.kl.value_clamp", 10.0),
        ("verl", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0}, "algorithm.kl", None),
        ("verl", {f"{ACTOR}.policy_loss.loss_mode": "geo_mean"}, "algorithm.aggregation.mode", "seq-mean-token-mean"),
        ("verl", {f"{ACTOR}.policy_loss.loss_mode": "gpg"}, "algorithm.old_log_probs", "rollout"),
        ("verl", {"algorithm.rollout_is": True}, "algorithm.correction", None),
        ("verl", {f"{RC}.bypass_mode": True, f"{RC}.loss_type": "reinforce", f"{RC}.rollout_is": "token"},
         "algorithm.correction.weight.upper", 2.0),
        ("verl", {f"{RC}.bypass_mode": True, f"{RC}.loss_type": "reinforce"}, "algorithm.correction", None),
        ("verl", {f"{RC}.bypass_mode": True, f"{RC}.rollout_is": "token"}, "algorithm.correction", None),
        ("verl", {f"{RC}.bypass_mode": True, f"{RC}.rollout_rs": "token_k2", f"{RC}.rollout_rs_threshold": 0.5},
         "algorithm.correction.denominators", "original"),
        ("verl", {f"{ACTOR}.shuffle": True, "data.train_batch_size": 256}, "optimisation.shuffle", False),
        ("verl", {"algorithm.use_pf_ppo": True}, "algorithm.resampling", None),
        ("verl", {"algorithm.adv_estimator": "gae"}, "algorithm.advantage.lam", 1.0),
        ("verl", {"algorithm.adv_estimator": "remax"}, "algorithm.advantage.kind", "remax"),
        ("verl", {"algorithm.rollout_correction.rollout_is": "token",
                  "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"},
         "algorithm.correction.weight.outside", "zero"),
        ("verl", ASYNC, "asynchrony.on_weight_update", "interrupt"),
        ("verl", ASYNC, "asynchrony.staleness_threshold", 0.1),
        ("verl", ASYNC, "asynchrony.trigger_parameter_sync_step", 4),
        ("verl", ASYNC, "optimisation.steps", 10_000 // 256),
        ("verl", ASYNC, "rollout.group_size", 1),
        ("verl", ASYNC, "algorithm.old_log_probs", "rollout"),
        ("verl", {**ASYNC, "async_training.staleness_threshold": 0}, "asynchrony.on_weight_update", "drain"),
        ("verl", {**ASYNC, "async_training.staleness_threshold": 0, "async_training.compute_prox_log_prob": True},
         "algorithm.old_log_probs", "recompute_at_version"),
        ("verl", {**ASYNC, "trainer.save_freq": 2}, "checkpoint.every_steps", 8),
        ("verl", {"megatron.optim.lr": 1e-5, f"{ACTOR}.optim.lr": 1e-6}, "optimisation.learning_rate", 1e-5),
        ("verl", {}, "data.format", "verl"),
        ("verl", {}, "data.label_column", "reward_model.ground_truth"),
        ("verl", {"data.prompt_key": "chat"}, "data.label_column", "reward_model.ground_truth"),
        ("verl", {"data.prompt_key": "chat"}, "data.data_source_column", "data_source"),
        ("verl", {}, "data.overlong.kind", "error"),
        ("verl", {"data.truncation": "middle"}, "data.overlong.side", "middle"),
        ("verl", {"data.truncation": "left", "data.filter_overlong_prompts": True}, "data.overlong.kind", "filter"),
        ("verl", {"data.max_prompt_length": 512, "data.max_response_length": 500,
                  "actor_rollout_ref.rollout.max_model_len": 700}, "data.max_prompt_tokens", 200),
        ("openrlhf", {"--apply_chat_template": False}, "data.input_template", "{}"),
        ("openrlhf", {"--apply_chat_template": False, "--input_template": "no place"}, "data.input_template", "{}"),
        ("openrlhf", {"--input_template": "Q: {}"}, "data.input_template", None),
        ("openrlhf", {"--max_samples": 10}, "data.max_rows", 10),
        ("openrlhf", {}, "data.overlong.side", "left"),
        ("openrlhf", {"--generate_max_len": 512, "--data.max_len": 4096}, "data.max_prompt_tokens", None),
        ("openrlhf", {"--prompt_split": "other"}, "data.path", "train.jsonl"),
        ("openrlhf", {"--prompt_data": "./folder"}, "data.path", "./folder"),
        ("roll", {}, "data.overlong.kind", "filter"),
        ("roll", {}, "data.input_template", None),
        ("openrlhf", {}, "algorithm.kl.order", "before_baseline"),
        ("openrlhf", {"--advantage_estimator": "rloo"}, "algorithm.kl.order", "after_baseline"),
        ("openrlhf", {}, "algorithm.advantage.whiten.variance", "population"),
        ("openrlhf", {}, "algorithm.advantage.masked_tokens", "step"),
        ("openrlhf", {}, "algorithm.value_loss.learning_rate", 9e-6),
        ("openrlhf", {"--init_kl_coef": 0}, "algorithm.kl", None),
        ("openrlhf", {"--advantage_estimator": "rloo", "--lora_rank": 8, "--load_in_4bit": True},
         "model.lora.quantisation", {"dtype": "nf4", "double": True}),
        ("openrlhf", {"--advantage_estimator": "rloo", "--lora_rank": 8}, "model.lora.quantisation", None),
        ("openrlhf", {"--policy_loss_type": "gspo", "--enable_vllm_is_correction": True},
         "algorithm.old_log_probs", "rollout"),
        ("openrlhf", {"--vllm_is_truncated_threshold": 3, "--enable_vllm_is_correction": True},
         "algorithm.correction.weight.lower", None),
        ("openrlhf", {"--async_train": True, "--async_queue_size": 3}, "asynchrony.max_lag", 3),
        ("openrlhf", {"--stop_properly_penalty_coef": -1}, "reward.shaping.truncated.value", -1.0),
        ("openrlhf", {"--remote_rm_url": "https://grader.example.org/x"}, "reward.components", None),
        ("roll", {}, "algorithm.advantage.whiten", None),
        ("roll", {}, "rollout.sampling.top_k", 50),
        ("roll", {}, "rollout.sampling.top_p", 0.7),
        ("roll", {}, "algorithm.aggregation.mode", "seq-mean-token-mean"),
        ("roll", {"adv_estimator": "grpo"}, "reward.shaping.normalisation.std", "group"),
        ("roll", GIGPO, "algorithm.advantage.kind", "gigpo"),
        ("roll", GIGPO, "algorithm.advantage.gamma", 0.95),
        ("roll", GIGPO, "algorithm.advantage.divide_by_std", False),
        ("roll", GIGPO, "reward.shaping.normalisation", None),
        ("roll", {**GIGPO, "reward_normalization.method": "mean_std"}, "algorithm.advantage.divide_by_std", True),
        ("roll", {**GIGPO, "episode_reward_weight": 0.5}, "algorithm.advantage.episode_weight", 0.5),
        ("roll", {**GIGPO, "adv_estimator": "step_reinforce", "step_reward_gamma": 0.9}, "algorithm.advantage.gamma",
         0.9),
        ("roll", {"dual_clip_loss": True}, "algorithm.policy_loss.dual_clip", 1.4),
        ("roll", {"pg_variant": "tis", "actor_train.worker_cls": PG_WORKER}, "algorithm.policy_loss.clip_high", 0.0),
        ("roll", {"pg_variant": "tis"}, "algorithm.policy_loss.kind", "ppo"),
        ("roll", {"actor_train.worker_cls": PG_WORKER}, "algorithm.policy_loss.kind", "policy_gradient"),
        ("roll", {}, "optimisation.schedule", "linear"),
        ("roll", {}, "optimisation.warmup_updates", 0),
        ("roll", {f"{TRAIN}.warmup_ratio": 0.25}, "optimisation.warmup_updates", 20),
        ("roll", {f"{TRAIN}.warmup_ratio": 0.25, f"{TRAIN}.warmup_steps": 3}, "optimisation.warmup_updates", 3),
        ("roll", {f"{TRAIN}.warmup_steps": 3, f"{TRAIN}.lr_scheduler_type": "constant"},
         "optimisation.warmup_updates", 3),
        ("roll", {f"{TRAIN}.warmup_steps": 3, f"{TRAIN}.lr_scheduler_type": "constant",
                  "actor_train.strategy_args.strategy_name": "fsdp2_train"}, "optimisation.warmup_updates", 0),
        ("roll", {"actor_train.data_args.template": "qwen2_5"}, "data.chat_template_options", {}),
        ("roll", {"global_template": "qwen3", "actor_train.data_args.template": "native"},
         "data.chat_template_options", {"enable_thinking": True}),
        ("roll", {"actor_train.use_dynamic_batching_in_train": True}, "optimisation.micro_batch_tokens", "auto"),
        ("openrlhf", {"--flash_attn": True, "--advantage_estimator": "gae"}, "algorithm.value_loss.clip", 0.2),
        ("openrlhf", {"--flash_attn": True, "--value_clip": 0.4}, "algorithm.value_loss.clip", 0.4),
        ("openrlhf", {"--flash_attn": True, "--dynamic_filtering": True}, "algorithm.value_loss.clip", 0.5),
        ("openrlhf", {"--enable_vllm_is_correction": True, "--vllm_is_correction_type": "icepop"},
         "algorithm.correction.weight.outside", "zero"),
        ("openrlhf", {"--enable_vllm_is_correction": True, "--vllm_is_correction_type": "seq-mask-tis"},
         "algorithm.correction.weight.upper", None),
        ("roll", {"async_generation_ratio": 1.5}, "asynchrony.max_lag", 2),
        ("roll", {"async_generation_ratio": 1.5}, "asynchrony.on_max_lag", "drop"),
        ("roll", {"is_use_additional_prompts": True}, "asynchrony.redundant_groups", 16),
        ("roll", {"is_use_additional_prompts": True}, "asynchrony.on_max_lag", "drop"),
        ("roll", {"is_use_additional_prompts": True, "max_additional_running_prompts": 5},
         "asynchrony.redundant_groups", 5),
        ("roll", {"max_additional_running_prompts": 5}, "asynchrony.redundant_groups", 0),
        ("roll", {"actor_train.device_mapping": "list(range(0,2)) + list(range(4,6))"},
         "optimisation.groups_per_mini_batch", 64),
        ("roll", {"response_length": None, "sequence_length": 3000}, "rollout.sampling.max_new_tokens", 3000 - 1024),
        ("verl", {f"{ACTOR}.optim.num_cycles": 1.5}, "optimisation.cosine_cycles", 0.5),
        ("roll", {"rl_loss_coef": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.1}, "algorithm.kl.coefficient", 0.05),
        ("roll", {"actor_infer.generating_args.max_new_tokens": 100}, "rollout.sampling.max_new_tokens", 2048),
    ],
)  # fmt: skip
def test_the_spec_means_what_the_source_meant(system: str, values: dict[str, Any], path: str, expected: Any) -> None:
    found = imported(system, **values)

    assert found.report.refused == []
    if path == "reward.components":
        assert field(found, path)[0]["allow_private"] is False
    else:
        assert field(found, path) == pytest.approx(expected)


QUERY = "rewards.math.query_filter_config"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({f"{QUERY}.type": "no_filter"}, None),
        ({f"{QUERY}.type": "std_filter"}, None),
        ({f"{QUERY}.type": "mean_filter", f"{QUERY}.filter_args.threshold_up": 0.9},
         {"kind": "mean_in_range", "low": -1.0, "high": 0.9, "keep_single": True, "metric": None}),
        ({f"{QUERY}.type": "std_filter", f"{QUERY}.filter_args.std_threshold": 0},
         {"kind": "spread_above", "statistic": "std", "threshold": 0.0, "keep_single": True, "metric": None}),
    ],
)  # fmt: skip
def test_rolls_filter_of_prompts_becomes_ours(values: dict[str, Any], expected: object) -> None:
    found = imported("roll", **values)

    assert found.report.refused == []
    assert field(found, "reward.group_filter") == expected


def test_rolls_filters_of_tokens_become_tests() -> None:
    filters = [
        {"agg_type": "geometric", "ratio_enabled": True},
        {"diff_enabled": True, "diff_high": 0.1},
        {"agg_type": "token"},
    ]

    correction = field(imported("roll", **{"train_infer_correction.filters": filters}), "algorithm.correction")

    assert correction["weight"] is None
    assert [(test["statistic"], test["scope"], test["reduce"], test["lower"], test["upper"])
            for test in correction["rejections"]] == [
        ("ratio", "sequence", "mean", 0.8, 1.2),
        ("probability_difference", "token", "mean", -0.2, 0.1),
    ]  # fmt: skip


UNREADABLE = [3, ["x"], [{"agg_type": "word"}], [{"agg_type": ["token"]}], [{"ratio_enable": True}],
              [{"ratio_enabled": True, "ratio_low": "x"}]]  # fmt: skip


@pytest.mark.parametrize("filters", UNREADABLE)
def test_a_filter_of_tokens_that_cannot_be_read_is_named(filters: object) -> None:
    with pytest.raises(InvalidSpec, match=r"train_infer_correction\.filters"):
        imported("roll", **{"train_infer_correction.filters": filters})


@pytest.mark.parametrize(
    ("system", "values", "path", "expected"),
    [
        ("verl", {"data.train_files": ["s3://b/a.parquet", "b.parquet"], "data.train_max_samples": 9},
         "data.sources", [{"path": "s3://b/a.parquet"}, {"path": "b.parquet"}]),
        ("verl", {"data.val_files": ["x/test.parquet", "y/test.parquet"]}, "evaluation.sets",
         [{"name": "x-test", "path": "x/test.parquet"}, {"name": "y-test", "path": "y/test.parquet"}]),
        ("openrlhf", {"--prompt_data": "a.jsonl, owner/name@math", "--prompt_data_probs": "0.2,0.8",
                      "--max_samples": 50, "--prompt_split": "other"}, "data.sources",
         [{"path": "a.jsonl", "weight": 0.2, "max_rows": 50},
          {"hub": "owner/name", "subset": "math", "split": "other", "weight": 0.8, "max_rows": 50}]),
        ("openrlhf", {"--prompt_data": ["/data/x", "s3://b/y"], "--prompt_split": "other"}, "data.sources",
         [{"path": "/data/x", "split": "other"}, {"path": "s3://b/y", "split": "other"}]),
        ("openrlhf", {"--prompt_data": "owner/name", "--prompt_data_probs": "1.0"}, "data.sources",
         [{"hub": "owner/name"}]),
        ("openrlhf", {"--eval_dataset": "owner/name", "--eval_split": "test"}, "evaluation.sets",
         [{"name": "name", "hub": "owner/name", "split": "test"}]),
        ("roll", {f"{MIX}.math": 0.75, f"{MIX}.code": 0.25, f"{MIX}.off": 0,
                  "rewards.math.tag_included": ["m1", "m2"], "rewards.code.tag_included": ["c"],
                  "rewards.off.tag_included": ["o"],
                  "rewards.code.worker_cls": "x.CodeSandboxRewardWorker",
                  "rewards.off.worker_cls": "x.MathRuleRewardWorker"}, "data.sources",
         [{"path": "train.jsonl", "only_data_sources": ["c"], "weight": 0.25},
          {"path": "train.jsonl", "only_data_sources": ["m1", "m2"], "weight": 0.75}]),
        ("roll", {"actor_train.data_args.file_name": ["a.jsonl", "b.jsonl"]}, "data.sources",
         [{"path": "a.jsonl"}, {"path": "b.jsonl"}]),
        ("verl", {"data.apply_chat_template_kwargs.enable_thinking": False}, "data.chat_template_options",
         {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_datasets_become_sources_and_sets(system: str, values: dict[str, Any], path: str, expected: Any) -> None:
    found = imported(system, **values)

    assert found.report.refused == []
    assert found.spec is not None, found.report.problems
    assert look_up(found.document, path) == expected


@pytest.mark.parametrize(
    ("system", "values", "name"),
    [
        ("verl", {"data.train_batch_size": 1000}, "data.train_batch_size"),
        ("verl", {"data.val_files": ["a.parquet", "b.parquet"], "data.val_max_samples": 5}, "data.val_max_samples"),
        ("verl", {"data.truncation": "top"}, "data.truncation"),
        ("verl", {"data.val_files": "folder"}, "data.val_files"),
        ("verl", {"data.train_files": "org/dataset"}, "data.train_files"),
        ("verl", {"algorithm.adv_estimator": "gdpo"}, "algorithm.gdpo_reward_keys"),
        ("verl", {"algorithm.adv_estimator": "none"}, "algorithm.adv_estimator"),
        ("verl", {"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True,
                  "algorithm.pf_ppo.reweight_method": "best"}, "algorithm.pf_ppo.reweight_method"),
        ("verl", {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True}, f"{ACTOR}.use_kl_loss"),
        ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "full"}, "algorithm.kl_penalty"),
        ("verl", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "kl"}, f"{ACTOR}.kl_loss_type"),
        ("verl", {f"{ACTOR}.policy_loss.clip_kov_ratio": 0.1}, f"{ACTOR}.policy_loss.clip_kov_ratio"),
        ("verl", {f"{RC}.bypass_mode": True, f"{RC}.loss_type": "grpo"}, f"{RC}.loss_type"),
        ("verl", {f"{VAL}.min_p": 0.1}, f"{VAL}.min_p"),
        ("verl", {**ASYNC, "async_training.compute_prox_log_prob": True}, "async_training.compute_prox_log_prob"),
        ("verl", {"reward_model.reward_manager": "prime"}, "reward_model.reward_manager"),
        ("verl", {"actor_rollout_ref.rollout.dtype": "float8"}, "actor_rollout_ref.rollout.dtype"),
        ("verl", {f"{ACTOR}.fsdp_config.model_dtype": "fp16"}, f"{ACTOR}.fsdp_config.model_dtype"),
        ("verl", {"trainer.device": "tpu"}, "trainer.device"),
        ("verl", {"data.tuncation": "left"}, "data.tuncation"),
        ("openrlhf", {"--prompt_data": "a.jsonl,b.jsonl", "--prompt_data_probs": "1"}, "--prompt_data_probs"),
        ("openrlhf", {"--advantage_estimator": "rloo", "--n_samples_per_prompt": 1}, "--advantage_estimator"),
        ("openrlhf", {"--use_kl_loss": True}, "--kl_estimator"),
        ("openrlhf", {"--remote_rm_url": "http://a/x,,http://b/x"}, "--remote_rm_url"),
        ("openrlhf", {"--remote_rm_url": "grade.py,http://b/x"}, "--remote_rm_url"),
        ("openrlhf", {"--param_dtype": "int8"}, "--param_dtype"),
        ("openrlhf", {"--load_in_4bit": True}, "--load_in_4bit"),
        ("openrlhf", {"--train_batch_size": 130}, "--train_batch_size"),
        ("roll", {"actor_train.data_args.template": "longcot_V3"}, "actor_train.data_args.template"),
        ("roll", {"actor_train.worker_cls": "my.Worker"}, "actor_train.worker_cls"),
        ("roll", {"actor_train.data_args.file_name": "folder"}, "actor_train.data_args.file_name"),
        ("roll", {f"{MIX}.math": 1.0}, f"{MIX}.math"),
        ("roll", {"adv_estimator": "gigpo"}, "reward_normalization.method"),
        ("roll", {**GIGPO, "reward_normalization.grouping": "tags"}, "reward_normalization.grouping"),
        ("roll", {**GIGPO, "reward_normalization.method": "asym_clip"}, "reward_normalization.method"),
        ("roll", {**GIGPO, "gamma": 0.9}, "gamma"),
        ("roll", {**GIGPO, "reward_clip": 5.0, "whiten_advantages": True}, "reward_clip"),
        ("roll", {"adv_estimator": "reinforce", "reward_norm": "moving"}, "reward_norm"),
        ("roll", {"adv_estimator": "reinforce", "reward_normalization.method": "mean"},
         "reward_normalization.grouping"),
        ("roll", {f"{TRAIN}.gradient_accumulation_steps": 3}, "rollout_batch_size"),
        ("roll", {"max_steps": -1}, "max_steps"),
        ("roll", {"rewards.math.query_filter_config.type": "best"}, "rewards.math.query_filter_config.type"),
        ("roll", {"rewards.math.query_filter_config.filter_args.std_threshold": 0},
         "rewards.math.query_filter_config.filter_args.std_threshold"),
        ("roll", {"rewards.math.query_filter_config.type": "mean_filter",
                  "rewards.code.worker_cls": "x.CodeSandboxRewardWorker"}, "rewards.math.query_filter_config.type"),
        ("roll", {"rewards.judge.worker_cls": "x.LLMJudgeRewardWorker"}, "rewards.judge.judge_model_type"),
        ("roll", {"eval_steps": 3, "model_update_frequency": 2, "validation.data_args.file_name": "h.jsonl"},
         "eval_steps"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_offered_is_refused_by_name(system: str, values: dict[str, Any], name: str) -> None:
    found = imported(system, **values)

    assert name in {entry.name for entry in found.report.refused}
    assert not found.may_run()


@pytest.mark.parametrize(
    ("system", "values", "lack"),
    [
        ("verl", {"data.custom_cls.path": "rows.py"}, "data.sources"),
        ("openrlhf", {"--prompt_data": None}, "data.path"),
        ("roll", {"actor_train.data_args.file_name": None}, "data.path"),
        ("verl", {**ASYNC, "rollout.total_rollout_steps": 3}, "optimisation.steps"),
        ("openrlhf", {"--remote_rm_url": None}, "reward.components"),
        ("openrlhf", {"--data.max_len": 4096}, "rollout.sampling.max_new_tokens"),
        ("roll", {"response_length": None}, "rollout.sampling.max_new_tokens"),
        ("roll", {"pretrain": None}, "model.path"),
    ],
)
def test_what_must_be_known_and_is_not_is_asked_for(system: str, values: dict[str, Any], lack: str) -> None:
    found = imported(system, **values)

    assert any(problem.startswith(f"{lack}: ") for problem in found.report.problems), found.report.problems
    assert not found.may_run(allow_refused=True)


def test_a_parameter_that_nothing_reads_is_reported_as_without_effect() -> None:
    found = imported("verl", **{"algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.5})

    entry = next(entry for entry in found.report.entries if entry.name == "algorithm.kl_ctrl.kl_coef")
    assert entry.verdict is Verdict.IGNORED
    assert entry.detail.startswith("has no effect beside the other parameters here")


def test_a_dataset_class_of_verl_makes_both_sets_of_rows() -> None:
    found = imported("verl", **{"data.custom_cls.path": "rows.py", "data.custom_cls.name": "Chats",
                                "data.train_files": ["a.x", "b.jsonl"], "data.val_files": "c.jsonl",
                                "data.val_max_samples": 5, "data.max_prompt_length": 77})  # fmt: skip

    source, held_out = field(found, "data.sources")[0], field(found, "evaluation.sets")[0]
    assert [source["custom"], held_out["custom"]] == ["rows_Chats_adapter.py:Rows"] * 2
    assert source["options"]["data_files"] == ["a.x", "b.jsonl"]
    assert source["options"]["config"]["max_prompt_length"] == 77
    assert (held_out["options"]["data_files"], held_out["max_rows"]) == (["c.jsonl"], 5)
    assert "rows_Chats_adapter.py" in found.files
    assert found.report.refused == []


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    found = imported("verl", **{"algorithm.adv_estimater": "rloo"})

    assert "did you mean algorithm.adv_estimator?" in found.report.refused[0].detail


def test_two_spellings_with_two_values_are_a_message() -> None:
    with pytest.raises(InvalidSpec, match="also given as --temperature"):
        imported("openrlhf", **{"--temperature": 0.5, "--rollout.temperature": 0.7})


def test_a_variable_beside_the_parameter_that_it_sets_is_a_message_not_dropped() -> None:
    with pytest.raises(InvalidSpec, match="also given as"):
        imported("verl", MODEL_PATH="another-model")


def test_a_value_of_the_wrong_type_names_the_parameter() -> None:
    with pytest.raises(InvalidSpec) as caught:
        imported("verl", **{"actor_rollout_ref.rollout.n": "many"})

    assert caught.value.errors[0]["path"] == "actor_rollout_ref.rollout.n"


def test_a_word_before_the_first_flag_is_a_message() -> None:
    with pytest.raises(InvalidSpec, match="flags and their values"):
        read_openrlhf(["stray", "--pretrain", "m"])


def test_variables_of_a_script_reach_the_parameters_that_they_are_written_into() -> None:
    text = "MODEL_PATH=models/a\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL_PATH\n"

    given = read("verl", text, ["MODEL_PATH=models/b"], {}, source="run.sh")

    assert [(each.spelling, each.value, each.where) for each in given] == [
        ("actor_rollout_ref.model.path", "models/b", "script")
    ]


def test_a_variable_that_the_script_does_not_use_is_a_message() -> None:
    with pytest.raises(InvalidSpec, match="uses no variable of this name"):
        read("verl", "python3 -m verl.trainer.main_ppo data.seed=1\n", ["MODEL_PATH=x"], {}, source="run.sh")


@pytest.mark.parametrize("name", ["MODEL_PATH", "exp_name", "overlong_buffer_len", "TRAIN_FILE"])
def test_variables_alone_are_read_as_the_parameters_that_they_set(name: str) -> None:
    given = read("verl", f"{name}=7.parquet\n", (), {}, source="variables.sh")

    assert [each.spelling for each in given] == [name]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        ("0.5_2.0,0.01", [("k1", "sequence", math.log(0.5), math.log(2)), ("k3", "token", None, 0.01)]),
        (4, [("k1", "sequence", math.log(1 / 4), math.log(4)), ("k3", "token", None, 4.0)]),
    ],
)
def test_verls_rejection_becomes_tests_of_ours(threshold: Any, expected: list[Any]) -> None:
    correction = "algorithm.rollout_correction.rollout_rs"

    found = imported("verl", **{correction: "seq_mean_k1,token_k3", f"{correction}_threshold": threshold})

    assert field(found, "algorithm.correction.weight") is None
    made = field(found, "algorithm.correction.rejections")
    assert [(each["statistic"], each["scope"], each["lower"], each["upper"]) for each in made] == expected


@pytest.mark.parametrize(
    ("tests", "threshold"), [("seq_max_k1", 2), ("token_k2,token_k3", "1,2,3"), ("token_k2", None)]
)
def test_a_rejection_that_cannot_be_read_is_refused(tests: str, threshold: Any) -> None:
    correction = "algorithm.rollout_correction.rollout_rs"

    found = imported("verl", **{correction: tests, f"{correction}_threshold": threshold})

    assert correction in {entry.name for entry in found.report.refused}


def test_rolls_masks_become_one_of_ours() -> None:
    found = imported("roll", max_len_mask=True, difficulty_mask=True, difficulty_low_threshold=0.1)

    mask = field(found, "reward.sample_mask")
    assert (mask["truncated"], mask["max_length"], mask["difficulty"]) == (True, 2048, [0.1, 1.0])


def test_verls_reward_model_grades_alone() -> None:
    given = {"custom_reward_function.path": None, "reward_model.enable": True, "reward_model.model.path": "/rm"}

    (component,) = field(imported("verl", **given), "reward.components")
    (as_text,) = field(imported("verl", **given, **{"reward_model.model.input_tokenizer": None}), "reward.components")
    with_function = imported("verl", **{**given, "custom_reward_function.path": "grade.py"})

    assert (component["kind"], component["path"], component["reads"]) == ("reward_model", "/rm", "messages")
    assert as_text["reads"] == "text"
    assert [entry.name for entry in with_function.report.refused] == ["reward_model.enable"]


@pytest.mark.parametrize(
    ("field_name", "value"),
    [("data.path", "mine.jsonl"), ("data.sources", [{"path": "mine.jsonl"}]), ("evaluation.path", "held.jsonl")],
)
def test_rows_that_are_set_last_replace_all_those_of_the_file(field_name: str, value: Any) -> None:
    given = {**BASES["openrlhf"], "--prompt_data": "a.jsonl,owner/b", "--eval_dataset": "c.jsonl,owner/d"}

    found = import_flat("openrlhf", given, settings=[f"{field_name}={value}"])

    assert found.may_run(), found.report.render()
    written = field(found, field_name)
    assert written == value or [each["path"] for each in written] == ["mine.jsonl"]


@pytest.mark.parametrize(
    ("system", "name", "value"),
    [
        ("verl", "actor_rollout_ref.rollout.dtype", "float16"),
        ("openrlhf", "--param_dtype", "fp16"),
        ("roll", "actor_train.model_args.dtype", "fp16"),
        ("trl", "fp16", True),
        ("trl", "model_init_kwargs.dtype", "torch.float16"),
    ],
)
def test_float16_is_computed_in_float32_which_the_report_says_first(system: str, name: str, value: Any) -> None:
    found = import_flat(system, {**BASES[system], name: value})

    assert found.spec is not None and found.spec.model.dtype == "float32"
    assert found.report.refused == []
    assert any("float16 becomes float32" in line for line in found.report.suggestion)
