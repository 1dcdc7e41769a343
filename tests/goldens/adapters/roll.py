"""ROLL, trainer side: its functions and option names to ours."""

from typing import Any

import torch

from flotilla.services.trainer.algorithms.advantages.agentic import (
    EnvironmentSteps,
    gigpo,
    step_reinforce,
    step_returns,
)
from flotilla.services.trainer.algorithms.advantages.compute import whiten
from flotilla.services.trainer.algorithms.advantages.distillation import distil
from flotilla.services.trainer.algorithms.advantages.returns import (
    discounted_returns,
    gae,
    rewards_at_last_token,
    turn_returns,
)
from flotilla.services.trainer.algorithms.aggregation import aggregate
from flotilla.services.trainer.algorithms.balancing import balanced_partition, loads, rank_micro_batches
from flotilla.services.trainer.algorithms.importance import correct
from flotilla.services.trainer.algorithms.kl import exact_kl, kl_loss, subtract_kl_from_rewards, updated_coefficient
from flotilla.services.trainer.algorithms.sample_weights import sequence_weights
from flotilla.services.trainer.algorithms.value import value_loss
from flotilla.shared.config.sections import advantage as adv
from flotilla.shared.config.sections import policy_loss as pol
from flotilla.shared.config.sections.algorithm import (
    CorrectionConfig,
    KlLossConfig,
    KlRewardConfig,
    RejectionConfig,
    WeightConfig,
)
from tests.goldens.adapters import roll_rewards, verl
from tests.goldens.adapters.rows import Rows, aggregation, counted, gradient, mean, numbered, weighted_loss
from tests.goldens.case import Case, NotOffered
from tests.goldens.compare import AtMost

WHITENED = adv.WhitenConfig(variance="unbiased", floor="add", epsilon=1e-8, of_one="raw")
ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}


def gae_only(case: Case) -> dict[str, Any]:
    rows = Rows.of(case, mask=torch.ones_like(case.inputs["token_rewards"]))
    options = case.config
    advantages, returns = gae(
        rows["token_rewards"], rows["values"], rows.sequences, gamma=options["gamma"], lam=options["lam"]
    )
    return {"advantages": rows.back(advantages), "returns": rows.back(returns)}


def reinforce_only(case: Case) -> dict[str, Any]:
    rows = Rows.of(case, mask=torch.ones_like(case.inputs["token_rewards"]))
    returns = rows.back(discounted_returns(rows["token_rewards"], rows.sequences, gamma=case.config["gamma"]))
    return {"advantages": returns, "returns": returns}


def turns_only(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    returns = rows.back(turn_returns(rows["token_rewards"], rows.sequences, gamma=case.config["gamma"]))
    return {"advantages": returns, "returns": returns}


def advantages(case: Case) -> dict[str, Any]:
    """Order: whiten rewards, mask, estimate, whiten advantages, mask, clip. Its estimators know no mask: ours get one
    of ones, so that values at padded positions bootstrap as they do there."""
    rows, options = Rows.of(case), case.config
    mask, rewards = rows.sequences.response_mask, rows["token_rewards"]
    if options.get("whiten_rewards"):
        rewards = whiten(rewards, mask, WHITENED)
    rewards = rewards * mask
    if options["estimator"] == "gae":
        raw, returns = gae(rewards, rows["values"], rows.ones, gamma=options["gamma"], lam=options["lam"])
    elif options["estimator"] == "agentic_reinforce":
        raw = returns = turn_returns(rewards, rows.sequences, gamma=options["gamma"])
    else:
        raw = returns = discounted_returns(rewards, rows.ones, gamma=options["gamma"])
    result = raw
    if "teacher_log_probs" in case.inputs:
        result = distil(
            raw,
            rows["old_log_probs"],
            rows["teacher_log_probs"],
            rows.sequences,
            coefficient=options["kl_coef"],
            estimator=ESTIMATORS[options["kl_penalty"]],  # type: ignore[arg-type]
            pure=options["pure"],
        )
    if options.get("whiten_advantages"):
        result = whiten(result, mask, WHITENED)
    clip = options.get("advantage_clip")
    outputs = {
        "raw_advantages": rows.back(raw),
        "returns": rows.back(returns),
        "token_rewards_used": rows.back(rewards),
    }
    if clip is not None:
        # Its clip fraction counts padding as well.
        outputs["clip_fraction"] = mean((result.abs() > clip).float(), rows.ones.response_mask)
        result = result.clamp(-clip, clip)
    return outputs | {"advantages": rows.back(result * mask)}


def agentic(case: Case) -> dict[str, Any]:
    given, options = case.inputs, case.config
    if options["grouping"] not in ("traj_group_id", "batch", "tags", "state", "inductive"):
        raise NotOffered(f"grouping by the field {options['grouping']}")
    if options["method"] not in ("mean", "mean_std", "asym_clip"):
        raise NotOffered(f"step estimators with the method {options['method']}, which compares nothing")
    groups = torch.zeros(len(given["step_scores"]), dtype=torch.long)
    if options["grouping"] != "batch":
        groups = numbered(given["group_index"])
    steps = EnvironmentSteps(
        step_scores=given["step_scores"],
        trajectory_index=numbered(given["trajectory_index"]),
        step_index=given["step_index"].long(),
        state_index=numbered(given["state_index"]),
        episode_scores=given["episode_scores"],
    )
    divide, gamma = options["method"] != "mean", options["gamma"]
    outputs: dict[str, Any] = {"step_rewards": step_returns(steps, gamma=gamma)}
    if options["estimator"] == "gigpo":
        weights = {"episode_weight": options["episode_reward_weight"], "step_weight": options["step_reward_weight"]}
        outputs["scores_out"] = gigpo(steps, groups, gamma=gamma, divide_by_std=divide, **weights)
        outputs["episode_rewards_norm"] = gigpo(
            steps, groups, gamma=gamma, divide_by_std=divide, episode_weight=1.0, step_weight=0.0
        )
        outputs["step_rewards_norm"] = gigpo(
            steps, groups, gamma=gamma, divide_by_std=divide, episode_weight=0.0, step_weight=1.0
        )
    elif options["estimator"] == "step_reinforce":
        outputs["scores_out"] = step_reinforce(steps, groups, gamma=gamma, divide_by_std=divide)
    else:
        outputs["scores_out"] = roll_rewards.agentic_scores(given["step_scores"], groups, "group", divide)
    if options.get("reward_clip") is not None:
        outputs["scores_out"] = outputs["scores_out"].clamp(-options["reward_clip"], options["reward_clip"])
    return outputs


def loss_config(options: dict[str, Any]) -> pol.PolicyLossConfig:
    """Translate ``pg_variant``, the clip range, dual clip, ``importance_sampling`` and ``ratio_type``."""
    low, high = options["pg_clip"], options["pg_clip"]
    if options.get("use_pg_clip_range"):
        low, high = options["pg_clip_low"], options["pg_clip_high"]
    dual_clip = 1 + 2 * options["pg_clip"] if options.get("dual_clip_loss") else None
    match options.get("pg_variant", "ppo"):
        case "ppo":
            level = "segment" if options.get("ratio_type") == "segment" else "sequence"
            if level == "sequence" and options.get("importance_sampling", "token") == "token":
                return pol.PpoConfig(clip_low=low, clip_high=high, dual_clip=dual_clip, log_ratio_clamp=None)
            return pol.GspoConfig(
                clip_low=low,
                clip_high=high,
                dual_clip=dual_clip,
                level=level,  # type: ignore[arg-type]
                gradient="sequence",
                log_ratio_clamp=None,
            )
        case "vanilla":
            return pol.PolicyGradientConfig()
        case "tis":
            lower, upper = options["tis_lower_bound"], options["tis_upper_bound"]
            return pol.CispoConfig(clip_low=1 - lower, clip_high=upper - 1, log_ratio_clamp=None)
        case "cispo":
            return pol.CispoConfig(
                clip_low=options["cispo_epsilon_low"],
                clip_high=options["cispo_epsilon_high"],
                drop_outside=options["cispo_use_unified_mask"],
                log_ratio_clamp=None,
            )
        case "topr":
            return pol.ToprConfig(
                positive_weight=options["topr_positive_weight"],
                negative_weight=options["topr_negative_weight"],
                log_ratio_clamp=None,
            )
        case "kimi15":
            if options["loss_agg_mode"] == "token-mean":
                raise NotOffered("kimi15 with token-mean adds the quadratic term of padded positions: ours masks them")
            return pol.DroConfig(beta=options["kimi15_tau"])
        case other:
            raise NotOffered(f"pg_variant {other}")


def policy(case: Case) -> dict[str, Any]:
    options, given = case.config, case.inputs
    if options.get("entropy_loss_coef"):
        raise NotOffered("the case has no entropies to take an entropy loss of")
    rows = Rows.of(case, mask=given.get("final_response_mask"))
    section = _aggregation(options["loss_agg_mode"], rows)
    log_probs = rows.leaf("log_probs")
    difficulty = given["difficulty"] if options.get("difficulty_loss_weight") else None
    lengths = Rows.of(case).sequences.lengths if options.get("length_loss_weight") else None
    weights = sequence_weights(difficulty, lengths)
    # Its loss function never sees the difficulty column: what it multiplies by are the length weights alone.
    applied = sequence_weights(None, lengths)
    loss, _ = weighted_loss(
        loss_config(options),
        rows,
        section,
        counted(rows.sequences),
        log_probs=log_probs,
        old_log_probs=rows["old_log_probs"],
        weights=None if applied is None else rows.sequences.spread(applied),
        scores=given.get("scores"),
    )
    total = loss
    if options.get("use_kl_loss"):
        kl = kl_loss(log_probs, rows["ref_log_probs"], _kl_section("k3"))
        share = aggregate(kl, rows.sequences, counted(rows.sequences), section)
        total = total + options["kl_loss_coef"] * share
    if "agentic_actor_worker" not in case.source:  # the agentic worker's loss does not read it
        total = options.get("rl_loss_coef", 1.0) * total
    return {
        "loss": total.detach(),
        "grad_log_probs": rows.back(gradient(total, log_probs)),
        "sample_weights": torch.ones(rows.shape[0]) if weights is None else weights,
        "metrics": {"total_loss": total.detach(), "valid_samples": rows.sequences.is_nonempty.sum()},
    }


def _aggregation(mode: str, rows: Rows) -> Any:
    """Its -norm mode divides by the width only."""
    return aggregation("token-sum-norm" if mode == "seq-mean-token-sum-norm" else mode, rows.shape[1])


def aggregated(case: Case) -> dict[str, Any]:
    """Its token-mean counts by the mask but sums the whole matrix: ours gets a mask of ones and the count."""
    rows, options = Rows.of(case), case.config
    mode, token_loss = options["loss_agg_mode"], rows.leaf("token_loss")
    tokens = options.get("batch_num_tokens", float(rows.sequences.response_mask.sum()))
    samples = options.get("global_valid_samples", rows.shape[0])
    weights = case.inputs.get("sample_weights")
    values = token_loss if weights is None else token_loss * rows.sequences.spread(weights.float())
    sequences = rows.ones if mode == "token-mean" else rows.sequences
    denominators = counted(sequences, num_tokens=tokens, num_sequences=samples)
    loss = aggregate(values, sequences, denominators, _aggregation(mode, rows))
    return {"loss": loss.detach(), "grad_token_loss": rows.back(gradient(loss, token_loss))}


def _kl_section(estimator: str) -> KlLossConfig:
    """No clamp on the log-ratio; the value clamped for k3 alone."""
    return KlLossConfig.model_construct(
        estimator=estimator,
        gradient="estimator",
        value_clamp=10.0 if estimator == "k3" else None,
        log_ratio_bounds=(None, None),
    )


def approx_kl(case: Case) -> dict[str, Any]:
    given, name = case.inputs, case.config["kl_penalty"]
    mask = given.get("response_mask")
    if name == "full":
        log_probs = given["log_probs_vocab"].clone().requires_grad_(True)
        kl = exact_kl(log_probs, given["ref_log_probs_vocab"])
    else:
        log_probs = given["log_probs"].clone().requires_grad_(True)
        kl = kl_loss(log_probs, given["ref_log_probs"], _kl_section(ESTIMATORS[name]))
    kl = kl if mask is None else kl * mask
    return {"kl": kl.detach(), "grad_log_probs_of_sum": gradient(kl.sum(), log_probs)}


def kl_in_reward(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    if options.get("reward_clip") is not None:
        raise NotOffered("clamping each token's reward once more after the KL: the KL's own value_clamp bounds it")
    section = _kl_section(ESTIMATORS[options["kl_penalty"]])
    kl = kl_loss(rows["old_log_probs"], rows["ref_log_probs"], section)
    placed = rewards_at_last_token(case.inputs["scores"], rows.sequences)
    coefficient = options["init_kl_coef"]
    rewards, observed = subtract_kl_from_rewards(placed, kl, rows.sequences, coefficient)
    outputs = {"token_rewards": rows.back(rewards), "mean_kl": observed, "coef_used": coefficient}
    if "target_kl" in options:
        config = KlRewardConfig(target=options["target_kl"], horizon=options["horizon"])
        outputs["coef_after"] = updated_coefficient(
            coefficient, config, observed_kl=float(observed), num_sequences=rows.shape[0]
        )
    return outputs


def value(case: Case) -> dict[str, Any]:
    """The mean over rows counts fully masked ones."""
    rows = Rows.of(case)
    preds = rows.leaf("value_preds")
    per_token = value_loss(preds, rows["values"], rows["returns"], clip=case.config["value_clip"])
    denominators = counted(rows.sequences, num_sequences=rows.shape[0])
    loss = aggregate(per_token.values, rows.sequences, denominators, aggregation("seq-mean-token-mean", None))
    return {
        "loss": loss.detach(),
        "grad_value_preds": rows.back(gradient(loss, preds)),
        "metrics": {"loss": loss.detach()},
    }


def masked_statistics(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    values, mask = rows["values"], rows.sequences.response_mask
    return {
        "masked_mean": mean(values, mask),
        "masked_mean_rows": rows.sequences.mean(values),
        "masked_whiten": rows.back(whiten(values, mask, WHITENED)),
    }


LEVELS: dict[str, dict[str, Any]] = {
    "token": {"scope": "token"},
    "geometric": {"scope": "sequence", "reduce": "mean"},
    "sequence": {"scope": "sequence", "reduce": "sum"},
    "segment": {"scope": "segment", "reduce": "mean"},
}


def correction(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    weight, tests = None, []
    if options["is_weight"]["enabled"]:
        weight = WeightConfig(level=options["is_weight"]["level"], upper=options["is_weight"]["upper_bound"])
    for entry in options["filters"]:
        if not entry["enabled"]:
            continue
        where = LEVELS[entry["agg_type"]]
        if entry["ratio_enabled"]:
            bounds = {"lower": entry["ratio_low"], "upper": entry["ratio_high"]}
            tests.append(RejectionConfig(statistic="ratio", **where, **bounds))
        if entry["diff_enabled"]:
            bounds = {"lower": entry["diff_low"], "upper": entry["diff_high"]}
            tests.append(RejectionConfig(statistic="probability_difference", **where, **bounds))
    mask = rows.sequences.response_mask
    if weight is None and not tests:
        ones = rows.back(torch.ones(mask.shape))
        return {"weights": ones, "filter_mask": ones.long(), "mask_out": rows.back(mask).long()}
    config = CorrectionConfig(weight=weight, rejections=tuple(tests), log_ratio_clamp=None)
    result = correct(config, rows["old_log_probs"], rows["rollout_log_probs"], rows.sequences)
    kept = rows.back(result.response_mask).long()
    metrics = {"train_infer_final_mask_mean": mean(result.response_mask.float(), mask)} if tests else {}
    return {"weights": rows.back(result.weights), "filter_mask": kept, "mask_out": kept, "metrics": metrics}


def batch_balance(case: Case) -> dict[str, Any]:
    lengths = case.inputs["lengths"].tolist()
    # Judged by tokens, so balanced by tokens.
    parts = balanced_partition(lengths, case.config["dp_size"], equal_size=True)
    return {"max_load": AtMost(max(loads(lengths, parts)))}


def dynamic_batching(case: Case) -> dict[str, Any]:
    """Its micro-batches are padded to the longest row; ours are packed, so only their number can be compared."""
    lengths, budget = case.inputs["lengths"].tolist(), case.config["max_tokens_per_micro_batch"]
    ranks = rank_micro_batches(lengths, case.config["dp_size"], budget)
    assert all(max(loads(lengths, parts)) <= budget for parts in ranks)
    return {"num_micro_batches": AtMost(len(ranks[0]))}


ADAPTERS = {
    "compute_gae_advantage_return": gae_only,
    "compute_reinforce_return": reinforce_only,
    "compute_agentic_reinforce_return": turns_only,
    "compute_advantage": advantages,
    "agentic_compute_advantage": advantages,
    "compute_discounted_returns + compute_response_level_rewards": agentic,
    "ActorWorker.loss_func": policy,
    "ActorPGWorker.loss_func": policy,
    "ActorWorker.loss_func + compute_sample_weights": policy,
    "agg_loss": aggregated,
    "compute_approx_kl": approx_kl,
    "compute_token_reward": kl_in_reward,
    "apply_kl_penalty": kl_in_reward,
    "get_kl_controller": verl.controller,
    "CriticWorker.loss_func": value,
    "log_probs_from_logits": verl.log_probs_of_logits,
    "entropy_from_logits": verl.entropy_of_logits,
    "masked_mean/masked_var/masked_whiten/masked_normalize": masked_statistics,
    "compute_train_infer_correction": correction,
    "get_seqlen_balanced_partitions": verl.partition,
    "batch_balance": batch_balance,
    "dynamic_batching_shard": dynamic_batching,
    **roll_rewards.ADAPTERS,
}
