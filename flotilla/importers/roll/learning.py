"""Rows of ROLL's algorithm parameters, and what they mean together."""

from collections.abc import Callable, Mapping
from typing import Any

from flotilla.importers.parameter import Inherit, Parameter, applied, ignored, refused, translated
from flotilla.importers.roll.distillation import is_pure
from flotilla.importers.roll.filtering import FILTERS, rejections
from flotilla.importers.roll.managers import STEPWISE
from flotilla.importers.source import Source
from flotilla.importers.values import count, flag, integer, number, text, unchanged

Fields = dict[str, Any]
Section = dict[str, Any]

GAE = {"adv_estimator": "gae"}
REINFORCE = {"adv_estimator": "reinforce"}
KL = {"add_token_level_kl": True}
NORMED = {**REINFORCE, "reward_norm": "group"}
STATE = {**REINFORCE, "reward_normalization.grouping": "state"}
GIGPO = {"adv_estimator": "gigpo", "reward_normalization.grouping": "state", "reward_normalization.method": "mean_std"}
NORMALISED = "reward_normalization"
METHODS = {("group", None): "mean", ("group", "group"): "mean_std", (None, None): "identity"}
"""By the groups that mean and deviation are of."""
WORKER, PG_WORKER = "actor_train.worker_cls", "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
BY_VARIANT = {WORKER: PG_WORKER}
DEAD = "no release of ROLL that is still in use reads it"
INFER = "train_infer_correction.is_weight"
STATISTICS = ("norm_mean_type", "norm_std_type")
"""What rewards are normalised by, each of its own rewards."""
COMPARED = {"batch": "batch", "running": "run"}
"""Rewards of more than a group, and what they are called here."""

ROWS: tuple[Parameter, ...] = (
    translated("adv_estimator", "algorithm.advantage.kind", text,
               "grpo is reinforce on rewards normalised in their group; agentic_reinforce is turn_reinforce",
               example="reinforce", default="gae"),
    applied("gamma", "algorithm.advantage.gamma", number, "discount", example=0.99, default=1.0, context={}),
    applied("lambd", "algorithm.advantage.lam", number, "lambda of gae", example=0.9, default=0.95, context=GAE),
    applied("step_reward_gamma", "algorithm.advantage.gamma", number, "discount per turn, of gigpo and step_reinforce",
            example=0.9, default=0.95, context=GIGPO),
    applied("episode_reward_weight", "algorithm.advantage.episode_weight", number, "of the episode's part in gigpo",
            example=0.5, default=1.0, context=GIGPO),
    applied("step_reward_weight", "algorithm.advantage.step_weight", number, "of the step's part in gigpo",
            example=0.5, default=1.0, context=GIGPO),
    translated("whiten_advantages", "algorithm.advantage.whiten", flag, "over the sampled tokens of the batch",
               example=True, default=False),
    applied("advantage_clip", "algorithm.advantage.clip", number, "bounds advantages, last", example=2.0,
            default=None, context={}),
    applied("critic_warmup", "algorithm.value_loss.warmup_steps", integer, "steps of the critic alone", example=5,
            default=0, context=GAE),
    applied("critic.training_args.learning_rate", "algorithm.value_loss.learning_rate", number,
            "peak learning rate of the critic", example=1e-5, default=5e-5, context=GAE),
    applied("value_clip", "algorithm.value_loss.clip", number, "how far a value may move", example=0.2, default=None,
            context=GAE),
    refused("whiten_rewards", "token rewards are not whitened: use whiten_advantages, or reward_norm group",
            default=False),
    translated("add_token_level_kl", "algorithm.kl.placement", flag, "true takes the KL off the reward of each token",
               example=True, default=False),
    translated("kl_penalty", "algorithm.kl.estimator", text, "kl is k1, mse is k2; full is refused", example="mse",
               default="kl", context=KL),
    applied("init_kl_coef", "algorithm.kl.coefficient", number, "its weight", example=0.05, default=0.2, context=KL),
    applied("target_kl", "algorithm.kl.target", number, "steers the weight so that the KL approaches it",
            example=0.05, default=None, context=KL),
    applied("kl_horizon", "algorithm.kl.horizon", count, "slowness of that", example=5000, default=10_000,
            context={**KL, "target_kl": 0.1}),
    translated("use_kl_loss", "algorithm.kl.placement", flag, "true makes the KL, by k3, a term of the loss",
               example=True, default=False, context={"kl_loss_coef": 0.01}),
    applied("kl_loss_coef", "algorithm.kl.coefficient", number, "its weight; 0 is none", example=0.02, default=0.0,
            context={"use_kl_loss": True}),
    applied("entropy_loss_coef", "algorithm.entropy_coefficient", number, "weight of the entropy bonus", example=0.01,
            default=0.0),
    applied("sft_loss_coef", "algorithm.supervised.coefficient", number,
            "likelihood of the answers with a positive reward; 0 is none", example=0.1, default=0.0, context={}),
    applied("rl_loss_coef", "algorithm.policy_coefficient", number, "of the policy's loss, and of its KL; ROLL's "
            "agentic pipeline does not read it", example=0.5, default=1.0, context={}),
    translated("difficulty_loss_weight", "algorithm.sequence_weights.difficulty", flag,
               "sequences weigh 0.5 to 2 by the column difficulty", example=True, default=False),
    translated("length_loss_weight", "algorithm.sequence_weights.length", flag,
               "sequences weigh 1.5 to 0.5 by their length, over the whole step", example=True, default=False),
)  # fmt: skip

LOSS_ROWS: tuple[Parameter, ...] = (
    translated("use_topr_loss", "algorithm.policy_loss.kind", flag, "true is topr (pg_variant in new releases)",
               example=True, default=False),
    translated("pg_variant", "algorithm.policy_loss.kind", text,
               "of ROLL's ActorPGWorker: vanilla is policy_gradient, tis is cispo within [0, 1], kimi15 is dro",
               example="topr", default="vanilla", context=BY_VARIANT, aliases=("actor_train.pg_variant",)),
    translated(WORKER, "algorithm.policy_loss.kind", text,
               "ActorPGWorker reads pg_variant, ActorWorker is ROLL's own; others are refused",
               example=PG_WORKER, default=None),
    translated("importance_sampling", "algorithm.policy_loss.kind", text, "seq is gspo", example="seq",
               default="token"),
    translated("pg_clip", ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"), number, "both widths",
               example=0.1, default=0.2),
    applied("pg_clip_low", "algorithm.policy_loss.clip_low", number, "width below 1", example=0.1,
            default=Inherit("pg_clip"), context={"use_pg_clip_range": True}),
    applied("pg_clip_high", "algorithm.policy_loss.clip_high", number, "width above 1", example=0.28,
            default=Inherit("pg_clip"), context={"use_pg_clip_range": True}),
    translated("use_pg_clip_range", "algorithm.policy_loss.clip_high", flag, "chooses pg_clip_low and pg_clip_high",
               example=True, default=False, context={"pg_clip_high": 0.28}),
    translated("dual_clip_loss", "algorithm.policy_loss.dual_clip", flag, "1 + 2 pg_clip", example=True,
               default=False),
    translated("loss_agg_mode", "algorithm.aggregation.mode", text,
               "by itself seq-mean-token-mean; seq-mean-token-sum-norm is token-sum-norm over the response length",
               example="token-mean", default="seq-mean-token-mean"),
    translated(f"{INFER}.enabled", "algorithm.correction.weight.upper", flag, "weights bounded above", example=True,
               default=False),
    translated(f"{INFER}.weight_type", "algorithm.correction.weight.level", text,
               "token, segment, geometric or sequence", example="sequence", default="token",
               context={f"{INFER}.enabled": True}),
    applied(f"{INFER}.upper_bound", "algorithm.correction.weight.upper", number, "largest weight", example=2.0,
            default=1.2, context={f"{INFER}.enabled": True}),
    translated(FILTERS, "algorithm.correction", unchanged,
               "tests on ratio and probability; agg_type says what leaves together",
               example=[{"agg_type": "sequence", "ratio_enabled": True, "ratio_high": 1.5}], default=None),
    *ignored(f"{DEAD}: use training_args.weight_decay", "l2"),
    *ignored("old log-probabilities are always those of the trainer before the step",
             "enable_old_logprobs_recompute"),
)  # fmt: skip

REWARD_ROWS: tuple[Parameter, ...] = (
    translated("reward_norm", "reward.shaping.normalisation", text,
               "group, batch or running, as with the next; with reward_shift the mean alone, with reward_scale the "
               "deviation alone", example="group",
               default=None, context=REINFORCE),
    translated("reward_shift", "reward.shaping.normalisation.std", flag, "subtract the mean only", example=True,
               default=False, context=NORMED),
    translated("reward_scale", "reward.shaping.normalisation.mean", flag, "divide by the deviation only",
               example=True, default=False, context=NORMED),
    translated("norm_mean_type", "reward.shaping.normalisation.mean", text,
               "group; of batch, algorithm.advantage.baseline is batch_mean; of running with compared_with run",
               example="group", default=None, context=REINFORCE),
    translated("norm_std_type", "reward.shaping.normalisation.std", text,
               "group; of batch, algorithm.advantage.divide_by_std; of running with compared_with run",
               example="group", default=None, context=REINFORCE),
    applied("reward_clip", "reward.shaping.clip", number, "bounds rewards after their normalisation", example=10.0,
            default=None),
    translated("reward_normalization.grouping", "reward.shaping.normalisation", text,
               "state (traj_group_id) is our group; batch and inductive are refused", example="state",
               default="batch", context={**REINFORCE, "reward_normalization.method": "mean_std"}),
    translated("reward_normalization.method", "reward.shaping.normalisation", text,
               "mean, mean_std; asym_clip also bounds to [-1, 3]", example="mean_std", default="identity",
               context=STATE),
    translated(f"{NORMALISED}.norm_mean_type", "reward.shaping.normalisation", text,
               "group; it wins over what method says of the mean", example="group", default=None, context=STATE),
    translated(f"{NORMALISED}.norm_std_type", "reward.shaping.normalisation", text,
               "group; it wins over what method says of the deviation", example="group", default=None,
               context={**STATE, f"{NORMALISED}.norm_mean_type": "group"}),
    *ignored(f"{DEAD}: use reward_norm group with reward_scale", "use_reward_scaling"),
    *ignored(f"{DEAD}: use reward_norm group", "use_reward_norm"),
    *ignored(f"{DEAD}: use reward.shaping.length", "add_len_reward"),
    translated("max_len_mask", "reward.sample_mask.truncated", flag, "answers of response_length tokens are left out",
               example=True, default=False),
    translated("difficulty_mask", "reward.sample_mask.difficulty", flag,
               "groups whose mean is not between the two thresholds are left out", example=True, default=False),
    translated("difficulty_low_threshold", "reward.sample_mask.difficulty", number, "the mean must be above",
               example=0.1, default=0.0, context={"difficulty_mask": True}),
    translated("difficulty_high_threshold", "reward.sample_mask.difficulty", number, "the mean must be below",
               example=0.9, default=1.0, context={"difficulty_mask": True}),
    translated("error_max_len_clip", "reward.sample_mask.wrong_up_to_length", flag,
               "of the wrong answers only those shorter than error_max_len_threshold are kept", example=True,
               default=False, context={"error_max_len_threshold": 512}),
    applied("error_max_len_threshold", "reward.sample_mask.wrong_up_to_length", integer, "tokens", example=256,
            default=9_999_999_999, context={"error_max_len_clip": True}),
)  # fmt: skip


def _turns(source: Source) -> Section:
    return {"gamma": source.required("gamma")}


def _steps(source: Source) -> Section:
    """Make what estimators over steps share; they compare within a group, whatever else ROLL would compare with."""
    if source.required("gamma") != 1:
        source.refuse("gamma", "all tokens of a turn have its advantage: use step_reward_gamma, which discounts turns")
    by_std = {"mean": False, "mean_std": True}
    method, grouping = _method(source), source.value("reward_normalization.grouping")
    if method not in by_std:
        why = f"{method} leaves steps as they are, or cuts them, and they are compared here: use mean or mean_std"
        source.refuse("reward_normalization.method", why)
    section = {"gamma": source.required("step_reward_gamma"), "divide_by_std": by_std.get(method, True)}
    if grouping == "batch" and source.value("adv_estimator") == "step_reinforce":
        return section | {"over": "batch"}
    if grouping not in {"state", "traj_group_id"}:
        source.refuse("reward_normalization.grouping", "steps are compared within their group: use traj_group_id")
    return section


def _bound(source: Source, kind: str) -> float | None:
    """Return what bounds advantages; ROLL bounds those of steps twice, before and after it whitens them."""
    last, first = source.value("advantage_clip"), source.value("reward_clip") if kind in STEPWISE else None
    if first is None:
        return None if last is None else float(last)
    if source.value("whiten_advantages") or source.value("add_token_level_kl"):
        source.refuse("reward_clip", "ROLL bounds what comes out of the estimator by it, and then changes that by "
                                     "whiten_advantages or the KL: use advantage_clip")  # fmt: skip
    return float(first if last is None else min(first, last))


ESTIMATORS: Mapping[str, tuple[str, Callable[[Source], Section]]] = {
    "gae": ("gae", lambda s: {"gamma": s.required("gamma"), "lam": s.required("lambd")}),
    "reinforce": ("reinforce", _turns),
    "grpo": ("reinforce", _turns),
    "agentic_reinforce": ("turn_reinforce", _turns),
    "gigpo": ("gigpo", lambda s: {**_steps(s), "episode_weight": s.required("episode_reward_weight"),
                                  "step_weight": s.required("step_reward_weight")}),
    "step_reinforce": ("step_reinforce", _steps),
}  # fmt: skip


def advantage(source: Source) -> Fields:
    """Make the estimator, and the critic's loss where it has a critic."""
    found = source.choose("adv_estimator", ESTIMATORS)
    if found is None or is_pure(source):  # a teacher alone leaves nothing to estimate, whatever is written
        return {}
    whiten = {"variance": "unbiased", "floor": "add", "of_one": "raw"} if source.value("whiten_advantages") else None
    section = {"kind": found[0], **found[1](source), "whiten": whiten, "clip": _bound(source, found[0])}
    section |= _of_batch(source, found[0])
    fields: Fields = {"algorithm.advantage": section}
    if "score_clip" in section:
        fields["reward.shaping.clip"] = None
    if found[0] == "gae":
        fields["algorithm.value_loss"] = {
            "clip": source.value("value_clip"),
            "learning_rate": source.required("critic.training_args.learning_rate"),
            "warmup_steps": source.required("critic_warmup"),
            "aggregation": {"mode": "seq-mean-token-mean"},
        }
    return fields


def _of_batch(source: Source, kind: str) -> Section:
    """Make the normalisation of rewards over the step or the run, where ROLL's has a mean or a deviation of these."""
    if source.value("adv_estimator") == "grpo":
        return {}
    mean, std = _statistics(source)
    found = {each for each in (mean, std) if each is not None}
    if not found & COMPARED.keys():
        return {}
    is_old = source.value("reward_norm") is not None
    name = "reward_norm" if is_old else STATISTICS[0] if mean in COMPARED else STATISTICS[1]
    domains = {each.removeprefix("rewards.").partition(".")[0] for each in source.trees.get("rewards", {})}
    for is_asked, why in (
        (kind != "reinforce", "a reward is compared with those of its step by adv_estimator reinforce alone"),
        (len(domains) > 1, "ROLL compares the rewards of each domain apart, and here there is one step of all: give "
                           "one domain"),
        (len(found) > 1, "mean and deviation are both of the group, both of the batch or both running"),
    ):  # fmt: skip
        if is_asked:
            source.refuse(name, why)
    clip = source.value("reward_clip")
    return {
        "baseline": "batch_mean" if mean in COMPARED else "none",
        "divide_by_std": std in COMPARED,
        "compared_with": next(COMPARED[each] for each in (mean, std) if each in COMPARED),
        **({} if clip is None else {"score_clip": [-clip, clip]}),
    }


def _ppo(source: Source) -> Section:
    low = high = source.required("pg_clip")
    if source.value("use_pg_clip_range"):
        low, high = source.required("pg_clip_low"), source.required("pg_clip_high")
    dual = 1 + 2 * source.required("pg_clip") if source.value("dual_clip_loss") else None
    kind = source.choose("importance_sampling", {"token": "ppo", "seq": "gspo"}) or "ppo"
    more = {"gradient": "sequence"} if kind == "gspo" else {}
    return {"kind": kind, "clip_low": low, "clip_high": high, "dual_clip": dual, "log_ratio_clamp": None, **more}


LOSSES: Mapping[str, Callable[[Source], Section]] = {
    "ppo": _ppo,
    "vanilla": lambda s: {"kind": "policy_gradient"},
    "tis": lambda s: {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.0, "log_ratio_clamp": None},
    "topr": lambda s: {"kind": "topr", "log_ratio_clamp": None},
    "cispo": lambda s: {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.1, "log_ratio_clamp": None},
    "kimi15": lambda s: {"kind": "dro", "beta": 0.1},
}
MODES = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}


def _loss(source: Source) -> Section:
    """Make the loss by the worker that computes it: only one of ROLL's reads pg_variant."""
    worker = str(source.value(WORKER) or "ActorWorker").rpartition(".")[2]
    if worker not in {"ActorWorker", "ActorPGWorker"}:
        source.refuse(WORKER, f"{worker} computes a loss of its own: use ActorWorker or ActorPGWorker, or set "
                      "algorithm.policy_loss")  # fmt: skip
    if source.value("use_topr_loss"):
        return LOSSES["topr"](source)
    make = source.choose("pg_variant", LOSSES) if worker == "ActorPGWorker" else None
    return (make or _ppo)(source)


def policy_loss(source: Source) -> Fields:
    """Make the loss, how it is averaged, the ratio's denominator and the correction."""
    section = _loss(source)
    mode = source.choose("loss_agg_mode", {**MODES, "seq-mean-token-sum-norm": "token-sum-norm"})
    aggregation: Section = {"mode": mode or "seq-mean-token-mean"}
    if mode == "token-sum-norm":
        aggregation["fixed_length"] = response_length(source)
    correction: Section | None = None
    if source.value(f"{INFER}.enabled"):
        levels = {name: name for name in ("token", "segment", "geometric", "sequence")}
        level = source.choose(f"{INFER}.weight_type", levels) or "token"
        correction = {"weight": {"level": level, "upper": source.required(f"{INFER}.upper_bound")}}
    tests = rejections(source)
    if tests:
        correction = {"weight": None, **(correction or {}), "rejections": tests}
    is_read = correction is not None or source.value("add_token_level_kl") or section["kind"] != "policy_gradient"
    fields: Fields = {
        "algorithm.policy_loss": section,
        "algorithm.aggregation": aggregation,
        "algorithm.old_log_probs": "recompute" if is_read else "rollout",
        "algorithm.correction": correction,
    }
    weights = {
        "length": bool(source.value("length_loss_weight")),
        "difficulty": "difficulty" if source.value("difficulty_loss_weight") else None,
    }
    if any(weights.values()):
        fields["algorithm.sequence_weights"] = weights
    if _policy_weight(source) != 1:
        fields["algorithm.policy_coefficient"] = _policy_weight(source)
    weight = source.value("sft_loss_coef")
    return fields | ({"algorithm.supervised": {"coefficient": weight}} if weight else {})


def response_length(source: Source) -> int:
    """Return the most tokens of an answer."""
    answer, whole = source.value("response_length"), source.value("sequence_length")
    if answer is not None:
        return int(answer)
    if whole is None:
        source.lack("rollout.sampling.max_new_tokens: give response_length")
        return 1
    return max(int(whole) - int(source.required("prompt_length")), 1)


def _policy_weight(source: Source) -> float:
    """Return the weight of the policy's loss and of the KL in it: 1 in the agentic pipeline, which knows none."""
    return 1.0 if _has_environments(source) else float(source.required("rl_loss_coef"))


def kl(source: Source) -> Fields:
    """Make the KL's place, estimator and weight."""
    in_reward, in_loss = source.value("add_token_level_kl"), source.value("use_kl_loss")
    if is_pure(source):  # ROLL turns both off
        return {}
    if in_reward and in_loss:
        source.refuse("use_kl_loss", "the KL goes into the loss or off the reward, not both: choose one")
    if in_reward:
        estimator = source.choose("kl_penalty", {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"})
        coefficient = source.required("init_kl_coef")
        if estimator is None or not coefficient:
            return {}
        section: Section = {"placement": "reward", "estimator": estimator, "coefficient": coefficient}
        if source.value("target_kl") is not None:
            section |= {"target": source.value("target_kl"), "horizon": source.required("kl_horizon")}
    elif in_loss and (weight := source.required("kl_loss_coef") * _policy_weight(source)):
        section = {"placement": "loss", "estimator": "k3", "coefficient": weight}
    else:
        return {}
    clamp = 10.0 if section["estimator"] == "k3" else None
    bounds = {"log_ratio_bounds": [None, None]} if section["estimator"] == "k3" else {}
    return {"algorithm.kl": {**section, "value_clamp": clamp, **bounds}}


def normalisation(source: Source) -> Fields:
    """Make the normalisation of rewards, in any of ROLL's three spellings."""
    if source.value("adv_estimator") in STEPWISE or is_pure(source):
        return {}
    method = _method(source)
    if source.value("adv_estimator") == "grpo" and not _has_environments(source):
        statistics: tuple[str | None, str | None] = ("group", "group")
    elif method not in {None, "identity"}:
        return _agentic_normalisation(source)
    else:
        statistics = _statistics(source)
    mean, std = (each if each == "group" else None for each in statistics)
    if mean is None and std is None:
        return {}
    return {"reward.shaping.normalisation": {"mean": mean, "std": std, "epsilon": 1e-6}}


def _method(source: Source) -> str:
    """Return how rewards are normalised, by the newer names of it where they are written."""
    method = str(source.value(f"{NORMALISED}.method") or "identity")
    names = [f"{NORMALISED}.{each}" for each in STATISTICS]
    if not any(source.has(name) for name in names):
        return method
    whose = "batch" if source.value(f"{NORMALISED}.grouping") == "batch" else "group"
    of_method = {"mean": (whose, None), "mean_std": (whose, whose)}.get(method, (None, None))
    mean, std = (source.value(name) or default for name, default in zip(names, of_method, strict=True))
    # What is of the batch is of the one group that the batch is, where the batch is one.
    found = METHODS.get(("group" if mean == whose else mean, "group" if std == whose else std))
    if found is None:
        source.refuse(
            names[1],
            f"a mean of {mean} and a deviation of {std} do not go together here: use group for both, or the mean alone",
        )
        return "mean_std"
    return found


def _has_environments(source: Source) -> bool:
    """Whether it is the agentic pipeline, whose grpo normalises as reward_normalization says."""
    return bool(source.trees.get("env_manager"))


def _statistics(source: Source) -> tuple[str | None, str | None]:
    """Return what rewards a mean and a deviation are of; None where there is none."""
    old = _rewards(source, "reward_norm")
    if old is not None:
        shifts, scales = source.value("reward_shift"), source.value("reward_scale")
        return (old if shifts or not scales else None), (old if scales or not shifts else None)
    return _rewards(source, STATISTICS[0]), _rewards(source, STATISTICS[1])


def masks(source: Source) -> Fields:
    """Make the mask of samples."""
    section: Section = {}
    if source.value("max_len_mask"):
        section |= {"truncated": True, "max_length": response_length(source)}
    if source.value("difficulty_mask"):
        names = ("difficulty_low_threshold", "difficulty_high_threshold")
        section["difficulty"] = [source.required(name) for name in names]
    if source.value("error_max_len_clip"):
        section["wrong_up_to_length"] = source.required("error_max_len_threshold")
    return {"reward.sample_mask": section} if section else {}


def _rewards(source: Source, name: str) -> str | None:
    value = source.value(name)
    if value is None or value == "group" or value in COMPARED:
        return None if value is None else str(value)
    source.refuse(name, "use group, batch or running, or leave it out")
    return None


def _agentic_normalisation(source: Source) -> Fields:
    grouping, name = source.value("reward_normalization.grouping"), "reward_normalization.method"
    if grouping not in {"state", "traj_group_id"}:
        source.refuse("reward_normalization.grouping", "groups are graded one at a time: use state")
        return {}
    method = _method(source)
    if method not in {"mean", "mean_std", "asym_clip"}:
        source.refuse(name, f"{method!r} is not offered here: use asym_clip, mean, mean_std")
        return {}
    section: Section = {"mean": "group", "std": None, "epsilon": 1e-6}
    if method != "mean":
        section |= {"std": "group", "degenerate": "zero"}
    if method == "asym_clip":
        section["clip"] = [-1.0, 3.0]
    return {"reward.shaping.normalisation": section}
