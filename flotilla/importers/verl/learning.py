"""What verl's algorithm parameters mean together: advantage, loss, KL, old policy, correction, critic."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.values import number, wrong
from flotilla.importers.verl import gdpo
from flotilla.importers.verl.actor import ACTOR
from flotilla.importers.verl.algorithm import ALGORITHM, CORRECTION
from flotilla.importers.verl.distillation import is_pure
from flotilla.importers.verl.rules import Fields, critics_warmup, is_fully_async
from flotilla.importers.verl.trainer import ASYNC

Section = dict[str, Any]

KL_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip
MODES = {
    name: name
    for name in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}
BANDS = {"token": ("token", "mean"), "sequence": ("sequence", "sum"), "geometric": ("sequence", "mean")}
"""Tests of older releases, which bound a ratio: what is tested, and how its tokens become one."""
TEST = re.compile(r"(?:token|seq_(?P<reduce>sum|mean|max(?!_k1)))_(?P<statistic>k[123])")
"""A test of verl's rollout_rs."""
ALWAYS_BY_SEQUENCE = frozenset({"sapo", "geo_mean"})
"""Losses that verl averages by sequence, whatever loss_agg_mode says."""


def _gamma(source: Source) -> Section:
    return {"gamma": source.required(f"{ALGORITHM}.gamma")}


def _grpo(source: Source) -> Section:
    if source.value(f"{ALGORITHM}.norm_adv_by_std_in_grpo"):
        return {"normalise_by_std": True, "epsilon": 1e-6}
    return {"normalise_by_std": False}


def _raw(source: Source) -> Section:
    return {"group_of_one": "raw"}


ESTIMATORS: Mapping[str, tuple[str, Callable[[Source], Section]]] = {
    "gae": ("gae", lambda s: {**_gamma(s), "lam": s.required(f"{ALGORITHM}.lam"), "masked_tokens": "skip"}),
    "grpo": ("grpo", lambda s: {**_grpo(s), **_raw(s)}),
    "grpo_vectorized": ("grpo", lambda s: {**_grpo(s), **_raw(s)}),
    "grpo_passk": ("grpo_passk", _grpo),
    "gdpo": ("gdpo", gdpo.estimator),
    "rloo": ("rloo", _raw),
    "rloo_vectorized": ("rloo", lambda s: {"group_of_one": "zero"}),
    "reinforce_plus_plus": ("reinforce_plus_plus", lambda s: {**_gamma(s), "masked_tokens": "skip"}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", _raw),
    "opo": ("opo", _raw),
    "gpg": ("gpg", lambda s: {**_raw(s), "scale_over": "nonzero_rewards"}),
    "remax": ("remax", lambda s: {}),
    "optimal_token_baseline": ("optimal_token_baseline", lambda s: {"positions": "all"}),
    "tir_optimal_token_baseline": ("optimal_token_baseline", lambda s: {"positions": "sampled"}),
}


def advantage(source: Source) -> Fields:
    """Make the estimator; a teacher alone needs none."""
    if is_pure(source):
        return {}
    found = source.choose(f"{ALGORITHM}.adv_estimator", ESTIMATORS)
    return {} if found is None else {"algorithm.advantage": {"kind": found[0], **found[1](source)}}


def _widths(source: Source) -> Section:
    return {
        "clip_low": source.required(f"{ACTOR}.clip_ratio_low"),
        "clip_high": source.required(f"{ACTOR}.clip_ratio_high"),
    }


def _dppo(divergence: str) -> Callable[[Source], Section]:
    def make(source: Source) -> Section:
        widths = _widths(source)
        cap = source.required(f"{ACTOR}.clip_ratio_c")
        return {"divergence": divergence, "low": widths["clip_low"], "high": widths["clip_high"], "ratio_cap": cap}

    return make


def _covariance(source: Source, **names: str) -> Section:
    own = {field: source.required(f"{ACTOR}.policy_loss.{name}") for field, name in names.items()}
    return {**own, "covariance_of": "current", "log_ratio_clamp": None}


LOSSES: Mapping[str, tuple[str, Callable[[Source], Section]]] = {
    "vanilla": ("ppo", lambda s: {**_widths(s), "dual_clip": s.value(f"{ACTOR}.clip_ratio_c")}),
    "gspo": ("gspo", lambda s: {**_widths(s), "gradient": "token"}),
    "sapo": ("sapo", lambda s: {"tau_positive": s.required(f"{ACTOR}.tau_pos"),
                               "tau_negative": s.required(f"{ACTOR}.tau_neg")}),
    "dro": ("dro", lambda s: {"beta": s.required(f"{ACTOR}.policy_loss.dro_beta")}),
    "gpg": ("policy_gradient", lambda s: {}),
    "clip_cov": ("clip_cov", lambda s: {**_widths(s), **_covariance(s, fraction="clip_cov_ratio", lower="clip_cov_lb",
                                                                    upper="clip_cov_ub")}),
    "kl_cov": ("kl_cov", lambda s: _covariance(s, fraction="kl_cov_ratio", coefficient="ppo_kl_coef")),
    "geo_mean": ("gmpo", lambda s: {**_widths(s), "log_ratio_clamp": None}),
    "cispo": ("cispo", _widths),
    "dppo_tv": ("dppo", _dppo("tv")),
    "dppo_kl": ("dppo", _dppo("binary_kl")),
}  # fmt: skip


def policy_loss(source: Source) -> Fields:
    """Make the loss and how it is averaged."""
    if _is_reinforce(source):
        fields: Fields = {"algorithm.policy_loss": {"kind": "policy_gradient"}}
        return fields | {"algorithm.aggregation": _aggregation(source, f"{ACTOR}.loss_agg_mode")}
    found = source.choose(f"{ACTOR}.policy_loss.loss_mode", LOSSES)
    fields = {} if found is None else {"algorithm.policy_loss": {"kind": found[0], **found[1](source)}}
    if source.value(f"{ACTOR}.policy_loss.loss_mode") in ALWAYS_BY_SEQUENCE:
        return fields | {"algorithm.aggregation": {"mode": "seq-mean-token-mean"}}
    return fields | {"algorithm.aggregation": _aggregation(source, f"{ACTOR}.loss_agg_mode")}


def _is_reinforce(source: Source) -> bool:
    """Whether the loss is the weighted log-likelihood of bypass mode."""
    if not source.value(f"{CORRECTION}.bypass_mode"):
        return False
    kinds = {"ppo_clip": False, "reinforce": True}
    older = bool(source.value(f"{CORRECTION}.use_policy_gradient"))
    return bool(source.choose(f"{CORRECTION}.loss_type", kinds)) or older


def _aggregation(source: Source, name: str) -> Section:
    mode = source.choose(name, MODES) or "token-mean"
    if mode != "seq-mean-token-sum-norm":
        return {"mode": mode}
    length = source.value(f"{ACTOR}.loss_scale_factor")
    return {"mode": mode, "fixed_length": source.required("data.max_response_length") if length is None else length}


def kl(source: Source) -> Fields:
    """Make the KL's place, estimator and weight."""
    in_reward, in_loss = source.value(f"{ALGORITHM}.use_kl_in_reward"), source.value(f"{ACTOR}.use_kl_loss")
    if in_reward and in_loss:
        source.refuse(f"{ACTOR}.use_kl_loss", "the KL goes into the loss or off the reward, not both: choose one")
    if in_reward:
        return _kl_in_reward(source)
    return _kl_in_loss(source) if in_loss else {}


def _estimator(source: Source, name: str) -> tuple[str, Section] | None:
    estimator = source.choose(name, KL_ESTIMATORS | {f"{key}+": value for key, value in KL_ESTIMATORS.items()})
    if estimator is None:
        return None
    return estimator, {"estimator": estimator, "value_clamp": 10.0 if estimator == "k3" else None}


def _kl_in_reward(source: Source) -> Fields:
    found = _estimator(source, f"{ALGORITHM}.kl_penalty")
    coefficient = source.required(f"{ALGORITHM}.kl_ctrl.kl_coef")
    if found is None or not coefficient:
        return {}
    section = {"placement": "reward", "coefficient": coefficient, "order": "before_baseline", **found[1]}
    kind = source.choose(f"{ALGORITHM}.kl_ctrl.type", {"fixed": "fixed", "adaptive": "adaptive"})
    if kind == "adaptive":
        section["target"] = source.required(f"{ALGORITHM}.kl_ctrl.target_kl")
        section["horizon"] = source.required(f"{ALGORITHM}.kl_ctrl.horizon")
    return {"algorithm.kl": section}


def _kl_in_loss(source: Source) -> Fields:
    name = f"{ACTOR}.kl_loss_type"
    found = _estimator(source, name)
    coefficient = source.required(f"{ACTOR}.kl_loss_coef")
    if found is None or not coefficient:
        return {}
    is_straight = str(source.value(name)).endswith("+") and found[0] != "k2"
    if found[0] == "k1" and not is_straight:
        source.refuse(name, "k1 in the loss has an expected gradient of 0: use k1+, k2 or low_var_kl")
        return {}
    gradient = "k2" if is_straight else "estimator"
    return {"algorithm.kl": {"placement": "loss", "coefficient": coefficient, "gradient": gradient, **found[1]}}


def old_policy(source: Source) -> Fields:
    """Make the ratio's denominator, and the correction for the sampler."""
    old = _old_log_probs(source)
    correction = _bypass_correction(source) if old == "rollout" else _correction(source)
    loss = source.value(f"{ACTOR}.policy_loss.loss_mode")
    uses_old = correction is not None or source.value(f"{ALGORITHM}.use_kl_in_reward")
    uses_old = uses_old or "optimal_token" in str(source.value(f"{ALGORITHM}.adv_estimator"))
    if loss == "gpg" and not uses_old:
        old = "rollout"  # nothing reads it: a pass to compute it again would be in vain
    return {"algorithm.old_log_probs": old, "algorithm.correction": correction}


def _old_log_probs(source: Source) -> str:
    if not is_fully_async(source) or source.has(f"{CORRECTION}.bypass_mode"):
        return "rollout" if source.value(f"{CORRECTION}.bypass_mode") else "recompute"
    if not source.value(f"{ASYNC}.compute_prox_log_prob"):
        return "rollout" if source.value(f"{ASYNC}.use_rollout_log_probs") else "recompute"
    if source.value(f"{ASYNC}.trigger_parameter_sync_step") == 1:
        return "recompute"
    if source.value(f"{ASYNC}.staleness_threshold"):
        source.refuse(
            f"{ASYNC}.compute_prox_log_prob",
            "the policy at the version's start is kept for versions of one step, or without staleness: set "
            "trigger_parameter_sync_step to 1, or staleness_threshold to 0",
        )
    return "recompute_at_version"


def _bypass_correction(source: Source) -> Section | None:
    """Make what verl does within the loss, of the weights being trained: reject, and in reinforce weigh."""
    rejections, veto = _rejections(source), _veto(source)
    weight = _weight(source) if _is_reinforce(source) else None
    is_old = source.value(f"{CORRECTION}.rollout_rs") in BANDS or veto
    if is_old and not _is_reinforce(source):
        name = f"{CORRECTION}.{'rollout_token_veto_threshold' if veto else 'rollout_rs'}"
        source.refuse(name, "the release of verl that has it reads it beside bypass_mode with use_policy_gradient only")
    if weight is None and not rejections and not veto:
        return None
    more = {"rejections": rejections, "denominators": "original"} if rejections else {}
    return {"numerator": "current", "weight": weight, **more, **veto}


def _correction(source: Source) -> Section | None:
    rejections, weight, veto = _rejections(source), _weight(source), _veto(source)
    if weight is None and not rejections and not veto:
        return _legacy_correction(source)
    return {"weight": weight, **({"rejections": rejections} if rejections else {}), **veto}


def _veto(source: Source) -> Section:
    least = source.value(f"{CORRECTION}.rollout_token_veto_threshold")
    return {} if least is None else {"veto": {"lower": least}}


def _band(source: Source, test: str) -> Section:
    """Make the test of verl 0.6.1: a ratio within a band, whose lower end is by itself one over the upper one."""
    name = f"{CORRECTION}.rollout_rs_threshold"
    scope, reduce = BANDS[test]
    upper = float(number(name, source.required(name)) or 0)
    lower = source.value(f"{name}_lower")
    if upper <= 0:
        raise wrong(name, upper, "a number above 0")
    reduced = {} if scope == "token" else {"reduce": reduce}
    return {"scope": scope, **reduced, "lower": 1 / upper if lower is None else lower, "upper": upper}


def _weight(source: Source) -> Section | None:
    if source.value(f"{CORRECTION}.rollout_is") is None:
        return None
    level = source.choose(f"{CORRECTION}.rollout_is", {"token": "token", "sequence": "sequence"}) or "token"
    name = f"{CORRECTION}.rollout_is_threshold"
    written = source.required(name)
    try:
        bounds = [float(part) for part in str(written).split("_")]
    except ValueError:
        raise wrong(name, written, "a number, or two as lo_hi") from None
    weight: Section = {"level": level, "upper": bounds[-1]}
    if len(bounds) == 2:
        weight |= {"lower": bounds[0], "outside": "zero"}
    if source.value(f"{CORRECTION}.rollout_is_batch_normalize"):
        weight["batch_normalise"] = True
    return weight


def _rejections(source: Source) -> list[Section]:
    name = f"{CORRECTION}.rollout_rs"
    written = source.value(name)
    if written is None:
        return []
    if written in BANDS:
        return [_band(source, written)]
    if source.value(f"{name}_threshold_lower") is not None:
        source.refuse(
            f"{name}_threshold_lower", f"belongs to the tests {', '.join(BANDS)}: write lo_hi as the threshold"
        )
    tests = [test.strip() for test in str(written).split(",")]
    bounds = source.value(f"{name}_threshold")
    texts = [bound.strip() for bound in str(bounds).split(",")] if bounds is not None else []
    if len(texts) not in {1, len(tests)}:
        source.refuse(name, f"{len(tests)} tests need one bound, or one each, in rollout_rs_threshold")
        return []
    made = [
        _rejection(source, test, text) for test, text in zip(tests, texts * (len(tests) // len(texts)), strict=True)
    ]
    return [rejection for rejection in made if rejection is not None]


def _rejection(source: Source, test: str, written: str) -> Section | None:
    match = TEST.fullmatch(test)
    if match is None:
        offered = "token_k1 to _k3, seq_sum_ and seq_mean_ likewise, seq_max_k2 and seq_max_k3"
        source.refuse(f"{CORRECTION}.rollout_rs", f"{test} is not offered here: use {offered}")
        return None
    name = f"{CORRECTION}.rollout_rs_threshold"
    try:
        bounds = [float(part) for part in written.split("_")]
    except ValueError:
        raise wrong(name, written, "a number above 0, or two as lo_hi") from None
    is_k1 = match["statistic"] == "k1"
    if min(bounds) <= 0 or len(bounds) > (2 if is_k1 else 1):
        raise wrong(name, written, "a number above 0, or for k1 two as lo_hi")
    scope: Section = (
        {"scope": "token"} if test.startswith("token") else {"scope": "sequence", "reduce": match["reduce"]}
    )
    if not is_k1:
        return {"statistic": match["statistic"], **scope, "upper": bounds[0]}
    low = bounds[0] if len(bounds) == 2 else 1 / bounds[0]
    return {"statistic": "k1", **scope, "lower": math.log(low), "upper": math.log(bounds[-1])}


def _legacy_correction(source: Source) -> Section | None:
    upper = source.value(f"{ALGORITHM}.rollout_is_threshold")
    if upper is None or not source.value(f"{ALGORITHM}.rollout_is"):
        return None
    scope, reduce = source.choose(f"{ALGORITHM}.rollout_is_level", BANDS) or BANDS["token"]
    mode = source.choose(f"{ALGORITHM}.rollout_is_mode", {"truncate": "truncate", "mask": "mask"})
    level = source.value(f"{ALGORITHM}.rollout_is_level")
    section: Section = {"weight": {"level": level if level in BANDS else "token", "upper": upper}}
    if mode == "mask":
        lower = source.value(f"{ALGORITHM}.rollout_is_threshold_lower")
        lower = 1 / upper if lower is None and upper else lower
        section["weight"]["upper"] = None
        section["rejections"] = [{"scope": scope, "reduce": reduce, "lower": lower, "upper": upper}]
    veto = source.value(f"{ALGORITHM}.rollout_is_veto_threshold")
    return section if veto is None else {**section, "veto": {"lower": veto}}


def resampling(source: Source) -> Fields:
    """Make the draw of PF-PPO, which verl makes with a critic only."""
    if source.value(f"{ALGORITHM}.adv_estimator") != "gae" or not source.value(f"{ALGORITHM}.use_pf_ppo"):
        return {}
    name = f"{ALGORITHM}.pf_ppo.reweight_method"
    kind = source.choose(name, {each: each for each in ("pow", "max_min", "max_random")})
    if kind is None:
        return {}
    power = {"power": source.required(f"{ALGORITHM}.pf_ppo.weight_pow")} if kind == "pow" else {}
    return {"algorithm.resampling": {"kind": kind, **power}}


def critic(source: Source) -> Fields:
    """Make the critic's loss, where the estimator has a critic."""
    if source.value(f"{ALGORITHM}.adv_estimator") != "gae":
        return {}
    path, policy = source.value("critic.model.path"), source.value("actor_rollout_ref.model.path")
    return {
        "algorithm.value_loss": {
            **({} if path == policy else {"path": path}),
            "clip": source.value("critic.cliprange_value"),
            "learning_rate": source.required("critic.optim.lr"),
            **({} if (warmup := critics_warmup(source)) is None else {"warmup_updates": warmup}),
            "warmup_steps": source.required("trainer.critic_warmup"),
            "aggregation": _aggregation(source, "critic.loss_agg_mode"),
        }
    }
