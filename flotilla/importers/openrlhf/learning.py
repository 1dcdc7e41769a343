"""Rows of OpenRLHF's algorithm flags, and what they mean together."""

from collections.abc import Callable, Mapping
from typing import Any

from flotilla.importers.parameter import Parameter, applied, refused, translated
from flotilla.importers.source import Source
from flotilla.importers.values import count, flag, integer, number, numbers, text
from flotilla.shared.config.sections import advantage as estimators

Fields = dict[str, Any]
Section = dict[str, Any]

GAE = {"--advantage_estimator": "gae"}
CORRECTED = {"--enable_vllm_is_correction": True}
ASYNC = {"--async_train": True}
FILTERED = {"--dynamic_filtering": True}
SINCE_0_8_2 = frozenset(
    {"--dynamic_filtering", "--dynamic_filtering_reward_range", "--eps_clip_low_high", "--lr_scheduler",
     "--vllm_generate_batch_size"}
)  # fmt: skip
"""Flags that the releases do not have whose values may move by 0.2."""

ROWS: tuple[Parameter, ...] = (
    translated("--advantage_estimator", "algorithm.advantage.kind", text,
               "reinforce is reinforce_plus_plus, reinforce_baseline adds the group's mean, group_norm is grpo",
               example="rloo", default="gae", aliases=("--algo.advantage.estimator",)),
    translated("--gamma", "algorithm.advantage.gamma", number, "discount per token; group estimators take 1",
               example=0.99, default=1.0, context=GAE, aliases=("--algo.advantage.gamma",)),
    applied("--lambd", "algorithm.advantage.lam", number, "lambda of gae", example=0.95, default=1.0, context=GAE,
            aliases=("--algo.advantage.lambd",)),
    applied("--no_advantage_std_norm", "algorithm.advantage.whiten.centre_only", flag, "whitening keeps the scale",
            example=True, default=False, context=GAE, aliases=("--algo.advantage.no_std_norm",)),
    applied("--critic_learning_rate", "algorithm.value_loss.learning_rate", number, "peak learning rate of the critic",
            example=1e-5, default=9e-6, context=GAE, aliases=("--critic.adam.lr",)),
    applied("--value_clip", "algorithm.value_loss.clip", number, "how far a value may move; 0.2 by itself "
            "where --flash_attn and no flag of 0.8.2 or later shows an older release", example=0.2, default=0.5,
            context=GAE, aliases=("--critic.value_clip",)),
    translated("--freezing_actor_steps", "algorithm.value_loss.warmup_steps", integer, "steps of the critic alone",
               example=5, default=-1, context=GAE, aliases=("--critic.freezing_steps",)),
    translated("--policy_loss_type", "algorithm.policy_loss.kind", text, "ppo or gspo", example="gspo",
               default="ppo", aliases=("--actor.policy_loss_type",)),
    translated("--eps_clip", ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"), number,
               "both widths", example=0.3, default=0.2, aliases=("--actor.eps_clip",)),
    translated("--eps_clip_low_high", ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"), numbers,
               "width below and above 1; wins over eps_clip", example=[0.1, 0.28], default=None,
               aliases=("--actor.eps_clip_low_high",)),
    applied("--dual_clip", "algorithm.policy_loss.dual_clip", number, "dual clip", example=3.0, default=None,
            context={}, aliases=("--actor.dual_clip",)),
    translated("--loss_agg_mode", "algorithm.aggregation.mode", text, "token-mean or seq-mean-token-mean",
               example="seq-mean-token-mean", default="token-mean", aliases=("--actor.loss_agg_mode",)),
    translated("--entropy_loss_coef", "algorithm.entropy_coefficient", number, "weight of the entropy bonus",
               example=0.01, default=None, translate=lambda value: value or 0.0, aliases=("--actor.entropy_coef",)),
    applied("--init_kl_coef", "algorithm.kl.coefficient", number, "weight of the KL; 0 is none", example=0.05,
            default=0.01, context={}, aliases=("--algo.kl.init_coef",)),
    applied("--kl_target", "algorithm.kl.target", number, "steers the weight so that the KL approaches it",
            example=0.05, default=None, context={}, aliases=("--algo.kl.target",)),
    applied("--kl_horizon", "algorithm.kl.horizon", count, "slowness of that", example=5000, default=10_000,
            context={"--kl_target": 0.05}, aliases=("--algo.kl.horizon",)),
    translated("--use_kl_loss", "algorithm.kl.placement", flag, "the KL is a term of the loss, not of the reward",
               example=True, default=False, context={"--kl_estimator": "k2"}, aliases=("--algo.kl.use_loss",)),
    applied("--kl_estimator", "algorithm.kl.estimator", text, "k1, k2 or k3", example="k3", default="k1", context={},
            aliases=("--algo.kl.estimator",)),
    translated("--enable_vllm_is_correction", "algorithm.correction.weight.upper", flag,
               "token weights, clamped to the band", example=True, default=False,
               aliases=("--algo.advantage.is_correction_enable",)),
    translated("--vllm_is_truncated_threshold",
               ("algorithm.correction.weight.lower", "algorithm.correction.weight.upper"), numbers,
               "the band, low and high", example=[0.2, 2.0], default=[0.5, 5.0], context=CORRECTED,
               aliases=("--algo.advantage.is_correction_threshold",)),
    translated("--use_icepop", "algorithm.correction.weight.outside", flag, "weights outside the band are 0",
               example=True, default=False, context=CORRECTED),
    translated("--vllm_is_correction_type", "algorithm.correction", text,
               "tis clamps weights to the band, icepop makes those outside of it 0, seq-mask-tis keeps the sequences "
               "whose geometric mean is within it", example="seq-mask-tis", default="tis", context=CORRECTED,
               aliases=("--algo.advantage.is_correction_type",)),
    translated("--async_train", ("asynchrony.staleness_threshold", "asynchrony.max_lag"), flag,
               "async_queue_size batches may run ahead", example=True, default=False,
               aliases=("--train.async_enable",)),
    translated("--async_queue_size", ("asynchrony.staleness_threshold", "asynchrony.max_lag"), count,
               "batches that may run ahead, and so versions", example=2, default=1, context=ASYNC,
               aliases=("--train.async_queue_size",)),
    translated("--partial_rollout", "asynchrony.on_weight_update", flag,
               "samples in flight go on with their KV cache; by itself they finish under the old weights",
               example=True, default=False, context=ASYNC, aliases=("--train.partial_rollout_enable",)),
    translated("--dynamic_filtering", "reward.group_filter.kind", flag,
               "groups by the mean of their scores, which are the rewards where there are none", example=True,
               default=False, aliases=("--algo.dynamic_filtering_enable",)),
    translated("--dynamic_filtering_reward_range", ("reward.group_filter.low", "reward.group_filter.high"), numbers,
               "kept strictly between", example=[0.1, 0.9], default=[0, 1], context=FILTERED,
               aliases=("--algo.dynamic_filtering_range",)),
    translated("--remote_rm_url", "reward.components", text,
               "a remote component, of several URLs with urls; a .py file by an adapter, written beside the spec",
               example="http://other:5000/get_reward", default=None, aliases=("--reward.remote_url",)),
    applied("--reward_clip_range", "algorithm.advantage.score_clip", numbers, "bounds a reward after its baseline",
               example=[-5.0, 5.0], default=[-10.0, 10.0], context=GAE, aliases=("--reward.clip_range",)),
    applied("--overlong_buffer_len", "reward.shaping.overlong.buffer", count, "tokens over which the penalty grows",
            example=64, default=None, context={}, aliases=("--reward.overlong_buffer_len",)),
    applied("--overlong_penalty_factor", "reward.shaping.overlong.factor", number, "penalty at the limit",
            example=0.5, default=1.0, context={"--overlong_buffer_len": 64},
            aliases=("--reward.overlong_penalty_factor",)),
    translated("--stop_properly_penalty_coef", "reward.shaping.truncated.scale", number,
               "0 to 1 scales a truncated answer's reward, below 0 replaces it", example=0.5, default=None,
               aliases=("--reward.stop_properly_penalty_coef",)),
    translated("--normalize_reward", "reward.components", flag,
               "by mean and std of the reward model's config.json; rewards of a URL or a file stay as they are",
               example=True, default=False, context={"--remote_rm_url": None, "--reward_pretrain": "r"},
               aliases=("--reward.normalize_enable",)),
    refused("--ptx_coef", "there is no loss on other texts", default=0),
    refused("--full_determinism", "a service's arithmetic depends on its threads", default=False),
)  # fmt: skip


def _whiten(source: Source) -> Section:
    if source.value("--no_advantage_std_norm"):
        return {"whiten": {"centre_only": True}}
    return {"whiten": {"variance": "population", "floor": "clamp", "epsilon": 1e-8}}


def _discounted(source: Source) -> Section:
    return {"gamma": source.required("--gamma"), "masked_tokens": "step"}


ESTIMATORS: Mapping[str, tuple[str, Callable[[Source], Section]]] = {
    "gae": ("gae", lambda s: {**_discounted(s), "lam": s.required("--lambd"), **_whiten(s)}),
    "reinforce": ("reinforce_plus_plus", lambda s: {**_discounted(s), **_whiten(s)}),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", _whiten),
    "group_norm": ("grpo", lambda s: {"epsilon": 1e-9}),
    "rloo": ("rloo", lambda s: {}),
    "dr_grpo": ("dr_grpo", lambda s: {}),
    "flash_reinforce": ("reinforce", lambda s: {"baseline": "batch_mean"}),
}


def compares_members(kind: str) -> bool:
    """Whether an estimator of ours compares the members of a group."""
    return kind in estimators.ESTIMATORS and estimators.ESTIMATORS[kind].MIN_SCORED > 1


def advantage(source: Source) -> Fields:
    """Make the estimator, and the critic's loss where it has a critic."""
    name = "--advantage_estimator"
    found = source.choose(name, ESTIMATORS)
    if found is None:
        return {}
    kind, make = found
    clip = source.value("--reward_clip_range")
    fields: Fields = {"algorithm.advantage": {"kind": kind, **make(source), "score_clip": clip}}
    if compares_members(kind) and source.value("--n_samples_per_prompt") == 1:
        source.refuse(name, "compares the answers of a group: raise --n_samples_per_prompt above 1")
    if kind == "gae":
        fields["algorithm.value_loss"] = {
            **_critic(source),
            "learning_rate": source.required("--critic_learning_rate"),
            "clip": _value_clip(source),
            "warmup_steps": max(source.required("--freezing_actor_steps"), 0),
            "aggregation": {"mode": "token-mean"},
        }
    return fields


def _value_clip(source: Source) -> float | None:
    """Return how far a value may move: half as far in releases that are known by their flags (0.8.0 and 0.8.1)."""
    clip: float | None = source.value("--value_clip")
    if "--value_clip" in source.given or source.given.keys() & SINCE_0_8_2:
        return clip
    return 0.2 if source.value("--flash_attn") else clip


def _critic(source: Source) -> Fields:
    """Find what the critic begins as; nothing where that is the policy."""
    path: str | None = source.value("--critic_pretrain")
    if path is None and not source.value("--remote_rm_url"):
        path = (source.value("--reward_pretrain") or "").partition(",")[0].strip() or None
    return {} if path in {None, source.value("--pretrain")} else {"path": path}


def policy_loss(source: Source) -> Fields:
    """Make the loss, how it is averaged, the ratio's denominator and the correction."""
    kind = source.choose("--policy_loss_type", {"ppo": "ppo", "gspo": "gspo"}) or "ppo"
    widths = source.value("--eps_clip_low_high") or [source.required("--eps_clip")] * 2
    if len(widths) != 2:
        source.refuse("--eps_clip_low_high", "two numbers: the width below 1 and the one above")
    loss: Section = {"kind": kind, "clip_low": widths[0], "clip_high": widths[-1]}
    loss["dual_clip"] = source.value("--dual_clip")
    modes = {name: name for name in ("token-mean", "seq-mean-token-mean")}
    if kind == "gspo":
        loss |= {"gradient": "sequence", "log_ratio_clamp": None}
        mode: str | None = "seq-mean-token-mean"
    else:
        mode = source.choose("--loss_agg_mode", modes)
    is_corrected = source.value("--enable_vllm_is_correction")
    fields = {
        "algorithm.policy_loss": loss,
        "algorithm.aggregation": {"mode": mode or "token-mean"},
        "algorithm.old_log_probs": "rollout" if kind == "gspo" and is_corrected else "recompute",
        "algorithm.correction": None,
    }
    if is_corrected and kind != "gspo":
        fields["algorithm.correction"] = _correction(source)
    return fields


def _correction(source: Source) -> Section:
    """Make the band of the ratio to the sampler, and what becomes of what is outside of it."""
    band = source.value("--vllm_is_truncated_threshold") or []
    if len(band) not in {1, 2}:
        source.refuse("--vllm_is_truncated_threshold", "one number, the upper bound, or two: low and high")
        return {}
    bounds = {"upper": band[-1], "lower": band[0] if len(band) == 2 else None}
    kind = source.choose("--vllm_is_correction_type", {name: name for name in ("tis", "icepop", "seq-mask-tis")})
    if kind == "seq-mask-tis":
        test = {"statistic": "ratio", "scope": "sequence", "reduce": "mean", **bounds}
        return {"weight": {"upper": None}, "rejections": [test], "denominators": "original"}
    is_cut = kind == "icepop" or source.value("--use_icepop")
    return {"weight": {**bounds, "outside": "zero" if is_cut else "clamp"}}


def kl(source: Source) -> Fields:
    """Make the KL."""
    coefficient = source.required("--init_kl_coef")
    if coefficient <= 0:
        return {}
    in_loss = bool(source.value("--use_kl_loss"))
    estimator = source.choose("--kl_estimator", {name: name for name in ("k1", "k2", "k3")})
    if estimator is None:
        return {}
    section: Section = {
        "placement": "loss" if in_loss else "reward",
        "coefficient": coefficient,
        "estimator": estimator,
        "value_clamp": 10.0,
    }
    if estimator == "k3":
        section["log_ratio_bounds"] = [-10.0, None]
    if in_loss and estimator == "k1":
        source.refuse("--kl_estimator", "k1 in the loss has an expected gradient of 0: use k2 or k3")
        return {}
    kind, _ = ESTIMATORS.get(source.value("--advantage_estimator"), ("", None))
    # Estimators that compare rewards, with the group's or with the batch's.
    if not in_loss and (compares_members(kind) or kind == "reinforce"):
        section["order"] = "after_baseline"
    if source.value("--kl_target") is not None:
        section |= {"target": source.value("--kl_target"), "horizon": source.required("--kl_horizon")}
    return {"algorithm.kl": section}
