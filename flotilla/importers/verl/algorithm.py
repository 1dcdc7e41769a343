"""Rows of verl's ``algorithm`` and reward sections."""

from flotilla.importers.parameter import (
    NOTHING,
    Inherit,
    Parameter,
    Verdict,
    applied,
    ignored,
    refused,
    translated,
    unsupported,
)
from flotilla.importers.values import count, flag, integer, number, text, unchanged
from flotilla.importers.verl.actor import ACTOR, KERNELS, PROFILING, REMOTE_CODE, SHARDING

ALGORITHM = "algorithm"
CORRECTION = f"{ALGORITHM}.rollout_correction"
IN_REWARD = {f"{ALGORITHM}.use_kl_in_reward": True}
ADAPTIVE = {**IN_REWARD, f"{ALGORITHM}.kl_ctrl.type": "adaptive"}
FILTERED = {f"{ALGORITHM}.adv_estimator": "gae", f"{ALGORITHM}.use_pf_ppo": True}
LEGACY = {f"{ALGORITHM}.rollout_is": True, f"{ALGORITHM}.rollout_is_threshold": 2.0}
DAPO = {
    "reward_model.reward_manager": "dapo",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": 64,
}

ALGORITHM_ROWS: tuple[Parameter, ...] = (
    translated(f"{ALGORITHM}.adv_estimator", "algorithm.advantage.kind", text,
               "the estimator of the same name; *_vectorized are the same, tir_* compares sampled tokens",
               example="rloo", default="gae"),
    applied(f"{ALGORITHM}.gamma", "algorithm.advantage.gamma", number, "discount per token", example=0.99,
            default=1.0, context={f"{ALGORITHM}.adv_estimator": "gae"}),
    applied(f"{ALGORITHM}.lam", "algorithm.advantage.lam", number, "lambda of gae", example=0.95, default=1.0,
            context={f"{ALGORITHM}.adv_estimator": "gae"}),
    applied(f"{ALGORITHM}.norm_adv_by_std_in_grpo", "algorithm.advantage.normalise_by_std", flag,
            "divide by the group's deviation", example=False, default=True,
            context={f"{ALGORITHM}.adv_estimator": "grpo"}),
    translated(f"{ALGORITHM}.use_kl_in_reward", "algorithm.kl.placement", flag, "true takes the KL off the reward",
               example=True, default=False),
    translated(f"{ALGORITHM}.kl_penalty", "algorithm.kl.estimator", text,
               "kl and k1, abs, mse and k2, low_var_kl and k3; full is refused", example="mse", default="kl",
               context=IN_REWARD),
    translated(f"{ALGORITHM}.kl_ctrl.type", "algorithm.kl.target", text, "adaptive steers the KL to target_kl",
               example="adaptive", default="fixed", context=IN_REWARD),
    applied(f"{ALGORITHM}.kl_ctrl.kl_coef", "algorithm.kl.coefficient", number,
            "its weight; by itself 0.001 (older guides print 0.005)", example=0.01, default=0.001, context=IN_REWARD),
    applied(f"{ALGORITHM}.kl_ctrl.horizon", "algorithm.kl.horizon", count, "slowness of the adaptive weight",
            example=5000, default=10_000, context=ADAPTIVE),
    applied(f"{ALGORITHM}.kl_ctrl.target_kl", "algorithm.kl.target", number, "what the adaptive weight steers to",
            example=0.05, default=0.1, context=ADAPTIVE),
    translated(f"{ALGORITHM}.filter_groups.enable", "reward.filter_zero_spread", flag,
               "groups of equal rewards are replaced, without end", example=True, default=False),
    translated(f"{ALGORITHM}.filter_groups.metric", ("reward.group_filter", "reward.filter_zero_spread"), text,
               "reward and score are the reward as graded; another is a number that the reward function returns",
               example="acc", default="reward", context={f"{ALGORITHM}.filter_groups.enable": True}),
    translated(f"{ALGORITHM}.filter_groups.max_num_gen_batches", "health.max_groups_without_signal", integer,
               "times the prompts of a batch: so many groups in a row without signal end the experiment; 0 for no end",
               example=10, default=0, context={f"{ALGORITHM}.filter_groups.enable": True}),
    translated(f"{ALGORITHM}.use_pf_ppo", "algorithm.resampling", flag,
               "sequences are drawn again by their rewards; verl only does so with gae", example=True, default=False,
               context={f"{ALGORITHM}.adv_estimator": "gae"}),
    translated(f"{ALGORITHM}.pf_ppo.reweight_method", "algorithm.resampling.kind", text, "pow, max_min or max_random",
               example="max_min", default="pow", context=FILTERED),
    applied(f"{ALGORITHM}.pf_ppo.weight_pow", "algorithm.resampling.power", number, "exponent of pow", example=3.0,
            default=2.0, context=FILTERED),
    *unsupported("the feeder's admission budget bounds what is in flight",
                 f"{ALGORITHM}.filter_groups.max_inflight_gen_batches", default=1),
)  # fmt: skip

LEGACY_ROWS: tuple[Parameter, ...] = (
    translated(f"{ALGORITHM}.rollout_is", "algorithm.correction.weight.upper", flag,
               "true weights the loss; false only measures, which is always done here", example=True, default=False,
               context={f"{ALGORITHM}.rollout_is_threshold": 2.0}, aliases=(f"{ACTOR}.rollout_is",)),
    translated(f"{ALGORITHM}.rollout_is_threshold", "algorithm.correction.weight.upper", number,
               "largest weight; null turns it all off", example=3.0, default=None, context=LEGACY,
               aliases=(f"{ACTOR}.rollout_is_threshold",)),
    translated(f"{ALGORITHM}.rollout_is_threshold_lower", "algorithm.correction.rejections", number,
               "least ratio that mask mode keeps; by itself 1 / rollout_is_threshold", example=0.25, default=None,
               context={**LEGACY, f"{ALGORITHM}.rollout_is_mode": "mask"},
               aliases=(f"{ACTOR}.rollout_is_threshold_lower",)),
    translated(f"{ALGORITHM}.rollout_is_level", "algorithm.correction.weight.level", text,
               "token, sequence or geometric", example="sequence", default="token", context=LEGACY,
               aliases=(f"{ACTOR}.rollout_is_level",)),
    translated(f"{ALGORITHM}.rollout_is_mode", ("algorithm.correction.weight.upper", "algorithm.correction.rejections"),
               text, "truncate bounds the weights; mask leaves them, and rejects what lies outside the band",
               example="mask", default="truncate", context=LEGACY, aliases=(f"{ACTOR}.rollout_is_mode",)),
    translated(f"{ALGORITHM}.rollout_is_veto_threshold", "algorithm.correction.veto.lower", number,
               "one token below it removes its sequence", example=1e-4, default=None, context=LEGACY,
               aliases=(f"{ACTOR}.rollout_is_veto_threshold",)),
)  # fmt: skip

CORRECTION_ROWS: tuple[Parameter, ...] = (
    translated(f"{CORRECTION}.rollout_is", "algorithm.correction.weight.level", text, "token or sequence",
               example="token", default=None),
    translated(f"{CORRECTION}.rollout_is_threshold", "algorithm.correction.weight.upper", unchanged,
               "largest weight; lo_hi: weights outside are 0", example=3.0, default=2.0,
               context={f"{CORRECTION}.rollout_is": "token"}),
    applied(f"{CORRECTION}.rollout_is_batch_normalize", "algorithm.correction.weight.batch_normalise", flag,
            "divide by the mean weight", example=True, default=False, context={f"{CORRECTION}.rollout_is": "token"}),
    translated(f"{CORRECTION}.bypass_mode", "algorithm.old_log_probs", flag,
               "true takes the sampler's own log-probabilities as old", example=True, default=False),
    translated(f"{CORRECTION}.rollout_rs", "algorithm.correction.rejections", text,
               "tests by their names, combined by AND: token_k1 to seq_max_k3; k1 bounds the sampler's ratio to ours",
               example="token_k3", default=None, context={f"{CORRECTION}.rollout_rs_threshold": 0.02}),
    translated(f"{CORRECTION}.rollout_rs_threshold", "algorithm.correction.rejections", unchanged,
               "one bound for all tests, or one for each with commas; k1 also takes lo_hi, and alone means 1/u to u",
               example=0.5, default=None, context={f"{CORRECTION}.rollout_rs": "token_k2"}),
    translated(f"{CORRECTION}.rollout_rs_threshold_lower", "algorithm.correction.rejections", number,
               "least ratio of the tests token, sequence and geometric (verl 0.6.1); by itself 1/rollout_rs_threshold",
               example=0.25, default=None,
               context={f"{CORRECTION}.rollout_rs": "geometric", f"{CORRECTION}.rollout_rs_threshold": 2.0}),
    translated(f"{CORRECTION}.rollout_token_veto_threshold", "algorithm.correction.veto.lower", number,
               "one token below it removes its sequence", example=1e-4, default=None, context={}),
    translated(f"{CORRECTION}.use_policy_gradient", "algorithm.policy_loss.kind", flag,
               "0.6.1's name of loss_type reinforce, read in bypass mode", example=True, default=False,
               context={f"{CORRECTION}.bypass_mode": True}),
    translated(f"{CORRECTION}.loss_type", "algorithm.policy_loss.kind", text,
               "reinforce, read in bypass mode, is policy_gradient, weighed by rollout_is", example="reinforce",
               default="ppo_clip", context={f"{CORRECTION}.bypass_mode": True}),
)  # fmt: skip

RM = "reward_model"
ARGUMENTS = "custom_reward_function.reward_kwargs"
UNSCORED = {"reward_model.model.path": "r", "custom_reward_function.path": None}
MODEL = {"reward_model.enable": True, **UNSCORED}
SCORED = "the reward service loads the model itself, on the device of the component: what scores is the same"
RESERVED = "batches are cut by batch_samples and batch_tokens of the component"
OVERLONG = f"{RM}.reward_kwargs.overlong_buffer_cfg"


def _buffer(option: str) -> tuple[str, str]:
    """Spell an option of the overlong penalty as newer releases and the recipe dapo do."""
    return f"reward.reward_kwargs.overlong_buffer_cfg.{option}", f"{RM}.overlong_buffer.{option}"


REWARD_ROWS: tuple[Parameter, ...] = (
    translated("custom_reward_function.path", "reward.components", text,
               "the file's function, called as verl does by an adapter that is written beside the spec; without one, "
               "verl's own scorers by data source: kind verl_default",
               example="other.py", default=None, aliases=("reward.custom_reward_function.path",)),
    translated("custom_reward_function.name", "reward.components", text, "name of the function", example="other",
               default="compute_score", context={"custom_reward_function.path": "grade.py"},
               aliases=("reward.custom_reward_function.name",)),
    Parameter(name=ARGUMENTS, verdict=Verdict.TRANSLATED, targets=("reward.components",), is_tree=True,
              reason="further arguments of the function, which the adapter passes",
              aliases=("reward.custom_reward_function.reward_kwargs",)),
    translated(f"{RM}.reward_manager", "reward.shaping.overlong", text,
               "naive, dapo, batch, whose function gets lists of one answer, and gdpo, with its estimator; dapo "
               "alone reads the overlong buffer",
               example="dapo", default="naive",
               context={key: value for key, value in DAPO.items() if key != f"{RM}.reward_manager"},
               aliases=("reward.reward_manager.name",)),
    translated(f"{OVERLONG}.enable", "reward.shaping.overlong", flag, "penalty near the length limit", example=True,
               default=False, context={f"{RM}.reward_manager": "dapo", f"{OVERLONG}.len": 64},
               aliases=_buffer("enable")),
    applied(f"{OVERLONG}.len", "reward.shaping.overlong.buffer", count, "tokens over which it grows", example=128,
            default=None, context=DAPO, aliases=_buffer("len")),
    applied(f"{OVERLONG}.penalty_factor", "reward.shaping.overlong.factor", number, "penalty at the limit",
            example=0.5, default=1.0, context=DAPO,
            aliases=_buffer("penalty_factor")),
    applied(f"{RM}.reward_kwargs.max_resp_len", "reward.shaping.overlong.max_length", count,
            "the limit; by itself data.max_response_length", example=400, default=None, context=DAPO,
            aliases=("reward.reward_kwargs.max_resp_len",)),
    translated(f"{RM}.enable", "reward.components", flag,
               "a component of kind reward_model alone, as in verl, which asks no scorer beside it", example=True,
               default=False, context=UNSCORED, aliases=("reward.reward_model.enable",)),
    translated(f"{RM}.model.path", "reward.components", text, "a directory, or a name on the hub", example="other",
               default=None, context=MODEL, aliases=("reward.reward_model.model_path",)),
    translated(f"{RM}.model.input_tokenizer", "reward.components", text,
               "null: the policy's text; else the reward model's own chat template", example=None,
               default=Inherit("actor_rollout_ref.model.path"), context=MODEL),
    translated(f"{RM}.max_length", "reward.components", count, "longer conversations lose their first tokens",
               example=512, default=None, context=MODEL),
    refused(f"{RM}.model.external_lib", "code beside a model is not imported", default=None),
    *unsupported(REMOTE_CODE, f"{RM}.model.trust_remote_code"),
    refused(f"{RM}.sandbox_fusion.url", "the fleet has a sandbox of its own: use a component of kind code, with the "
            "test cases in a column", default=None),
    *ignored("only read with sandbox_fusion.url, which is refused", f"{RM}.sandbox_fusion.max_concurrent",
             f"{RM}.sandbox_fusion.memory_limit_mb"),
    *ignored("logs the penalty, which is always done", f"{OVERLONG}.log", *_buffer("log")),
    *ignored("rewards are always computed while others are sampled", f"{RM}.launch_reward_fn_async"),
    *unsupported("how many grade is the reward services' own matter", "reward.num_workers", f"{RM}.num_workers"),
    *unsupported(SHARDING, f"{RM}.ulysses_sequence_parallel_size", default=1),
    *unsupported(SHARDING, f"{RM}.param_offload"),
    Parameter(name=f"{RM}.rollout", verdict=Verdict.UNSUPPORTED, reason=SCORED, is_tree=True, harmless=(*NOTHING, 1),
              aliases=("reward.reward_model.rollout",)),
    *(Parameter(name=f"{RM}.{name}", verdict=Verdict.UNSUPPORTED, reason=SCORED, harmless=(*NOTHING, 0),
                aliases=(f"reward.reward_model.{name}",))
      for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes")),
    *ignored(RESERVED, f"{RM}.model.use_shm", f"{RM}.micro_batch_size",
             f"{RM}.micro_batch_size_per_gpu", f"{RM}.use_dynamic_bsz", f"{RM}.forward_max_token_len_per_gpu"),
    *unsupported(SHARDING, f"{RM}.strategy", f"{RM}.model.fsdp_config.wrap_policy.min_num_params",
             f"{RM}.model.fsdp_config.min_num_params", f"{RM}.model.fsdp_config.param_offload",
             f"{RM}.model.fsdp_config.reshard_after_forward", f"{RM}.model.fsdp_config.fsdp_size",
             f"{RM}.model.fsdp_config.forward_prefetch"),
    *unsupported(KERNELS, f"{RM}.model.use_remove_padding", f"{RM}.model.use_fused_kernels"),
    *unsupported(PROFILING, f"{RM}.profiler.discrete"),
)  # fmt: skip
