"""OpenRLHF: its functions and option names to ours."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flotilla.services.reward.shaping import Graded, penalised
from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.advantages.groups import Groups
from flotilla.services.trainer.algorithms.advantages.returns import discounted_returns, gae, rewards_at_last_token
from flotilla.services.trainer.algorithms.aggregation import aggregate
from flotilla.services.trainer.algorithms.importance import correct
from flotilla.services.trainer.algorithms.kl import kl_loss, subtract_kl_from_rewards
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.services.trainer.algorithms.preference import dpo_loss, pairwise_loss
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
from flotilla.shared.config.sections.shaping import MeanInRangeConfig, OverlongConfig, ShapingConfig, TruncatedConfig
from tests.goldens.adapters import verl
from tests.goldens.adapters.rows import Rows, aggregation, counted, fraction, gradient, mean, positive, weighted_loss
from tests.goldens.case import Case, NotOffered


def estimator_config(options: dict[str, Any]) -> adv.AdvantageConfig:
    """Translate ``advantage_estimator``, gamma, lambda and ``no_advantage_std_norm``."""
    whiten = adv.WhitenConfig(centre_only=True)
    if not options.get("no_std_norm", False):
        whiten = adv.WhitenConfig(variance="population", floor="clamp")
    gamma = options["gamma"]
    match options["estimator"]:
        case "gae":
            return adv.GaeConfig(gamma=gamma, lam=options["lam"], masked_tokens="step", whiten=whiten)
        case "reinforce":
            return adv.ReinforcePlusPlusConfig(gamma=gamma, masked_tokens="step", whiten=whiten)
        case "flash_reinforce":
            return adv.ReinforceConfig(gamma=gamma, masked_tokens="step", baseline="batch_mean")
        # The system puts gamma to 1 where members of a group are compared: ours have none to give.
        case "reinforce_baseline":
            return adv.ReinforceBaselineConfig(whiten=whiten)
        case "group_norm":
            return adv.GrpoConfig(epsilon=1e-9)
        case "rloo":
            return adv.RlooConfig()
        case "dr_grpo":
            return adv.DrGrpoConfig()
        case other:
            raise NotOffered(f"estimator {other}")


def shaping_config(options: dict[str, Any]) -> ShapingConfig:
    """Translate the overlong and stop-properly penalties."""
    overlong = truncated = None
    if options.get("overlong_buffer_len"):
        overlong = OverlongConfig(
            max_length=options["max_response_length"],
            buffer=options["overlong_buffer_len"],
            factor=options["penalty_factor"],
            capped=True,
        )
    coefficient = options.get("stop_properly_coef", options.get("coef"))
    if coefficient is not None:
        truncated = TruncatedConfig(scale=coefficient) if coefficient >= 0 else TruncatedConfig(value=coefficient)
    return ShapingConfig(overlong=overlong, truncated=truncated)


def shaped_scores(scores: Tensor, lengths: Tensor, truncated: Tensor, config: ShapingConfig) -> Tensor:
    """Penalise each score."""
    rows = zip(scores.tolist(), lengths.tolist(), truncated.tolist(), strict=True)
    return torch.tensor([penalised(Graded(score, int(length), bool(cut)), config) for score, length, cut in rows])


def advantages(case: Case) -> dict[str, Any]:
    rows, options, given = Rows.of(case), case.config, case.inputs
    truncated = given.get("truncated", torch.zeros(rows.shape[0]))
    scores = shaped_scores(given["scores"], _span(given["response_mask"]), truncated, shaping_config(options))
    group_index = torch.arange(rows.shape[0]) // options["n_samples_per_prompt"]
    config, coefficient = estimator_config(options), options["kl_coef"]
    if options.get("reward_clip_range") is not None:
        config = config.model_copy(update={"score_clip": tuple(options["reward_clip_range"])})
    # The case gives the KL per token: as log-probs against a reference of 0 it is k1 itself.
    kl = None
    if coefficient > 0:
        kl = KlRewardConfig(coefficient=coefficient, estimator="k1", value_clamp=None, order="after_baseline")
    inputs = AdvantageInputs(
        sequences=rows.sequences,
        scores=scores,
        group_index=group_index,
        values=rows["values"] if "values" in given else None,
        old_log_probs=rows["kl"],
        ref_log_probs=torch.zeros_like(rows["kl"]),
    )
    plain = compute_advantages(config.model_copy(update={"whiten": None}), inputs, kl=kl)
    returns = plain.advantages if plain.returns is None else plain.returns
    return {
        "advantages": rows.back(compute_advantages(config, inputs, kl=kl).advantages),
        "returns": rows.back(returns),
        "group_reward_std": Groups.of(group_index).std(scores),
        "scores_after_penalty": scores,
    }


def _span(mask: Tensor) -> Tensor:
    """Tokens from the first to the last sampled one of each row."""
    positions = torch.arange(1, mask.shape[1] + 1)
    last = (mask * positions).max(1).values
    first = torch.where(mask.bool(), positions, mask.shape[1] + 1).min(1).values
    return (last - first + 1).clamp(min=0)


def gae_only(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    result, returns = gae(
        rows["token_rewards"],
        rows["values"],
        rows.sequences,
        gamma=options["gamma"],
        lam=options["lam"],
        masked_tokens="step",
    )
    return {"advantages": rows.back(result), "returns": rows.back(returns)}


def returns_only(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    returns = discounted_returns(
        rows["token_rewards"], rows.sequences, gamma=case.config["gamma"], masked_tokens="step"
    )
    return {"returns": rows.back(returns)}


def token_rewards(case: Case) -> dict[str, Any]:
    rows, clip = Rows.of(case), case.config["reward_clip_range"]
    placed = rewards_at_last_token(case.inputs["scores"], rows.sequences, clip=tuple(clip) if clip else None)
    charged, _ = subtract_kl_from_rewards(placed, rows["kl"], rows.sequences, case.config["kl_coef"])
    return {"token_rewards": rows.back(charged)}


def correction_config(options: dict[str, Any]) -> CorrectionConfig | None:
    """Translate ``is_correction_*``."""
    level, mode = options.get("is_correction_level", "off"), options.get("is_correction_mode")
    gating, threshold = options.get("is_correction_gating", "ratio"), options.get("is_correction_threshold")
    if level == "off" or threshold is None:
        return None
    bounds = list(threshold) if isinstance(threshold, (list, tuple)) else [None, threshold]
    lower, upper = bounds if len(bounds) == 2 else (None, bounds[0])
    if mode == "clip":
        return CorrectionConfig(weight=WeightConfig(lower=positive(lower), upper=upper, outside="clamp"))
    if level == "token" and gating == "ratio":
        return CorrectionConfig(weight=WeightConfig(lower=positive(lower), upper=upper, outside="zero"))
    test = RejectionConfig(
        statistic=gating, scope="token" if level == "token" else "sequence", lower=lower, upper=upper
    )
    return CorrectionConfig(weight=WeightConfig(upper=None), rejections=(test,), denominators="original")


def policy(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    low, high, mask = options["clip_eps_low"], options["clip_eps_high"], rows.sequences.response_mask
    is_gspo = options.get("policy_loss_type", "ppo") == "gspo"
    mode = "seq-mean-token-mean" if is_gspo else options.get("loss_agg_mode", "token-mean")
    log_probs, old = rows.leaf("log_probs"), rows["old_log_probs"]
    dual_clip = options.get("dual_clip")
    metrics: dict[str, Any] = {}
    weights = None
    if is_gspo:
        config: pol.PolicyLossConfig = pol.GspoConfig(
            clip_low=low, clip_high=high, dual_clip=dual_clip, gradient="sequence", log_ratio_clamp=None
        )
        if options.get("is_correction_level", "off") != "off":
            old = rows["rollout_log_probs"]
    else:
        config = pol.PpoConfig(clip_low=low, clip_high=high, dual_clip=dual_clip)
        weights = _weights(case, rows, metrics)
    loss, per_token = weighted_loss(
        config,
        rows,
        aggregation(mode, None),
        counted(
            rows.sequences,
            num_tokens=options.get("batch_num_tokens"),
            num_sequences=options.get("global_batch_size"),
        ),
        log_probs=log_probs,
        old_log_probs=old,
        weights=weights,
    )
    loss = loss * options.get("dp_size", 1)
    metrics["clip_fraction"] = fraction(per_token.clipped, mask)
    metrics["approx_kl"] = mean(rows["old_log_probs"] - log_probs.detach(), mask)
    if "rollout_log_probs" in case.inputs:
        metrics["rollout_kl"] = mean(rows["rollout_log_probs"] - rows["old_log_probs"], mask)
    if is_gspo:
        # Its mean of -x is taken of the shared ratio there, ours always per token.
        del metrics["approx_kl"]
    return {
        "loss": loss.detach(),
        "grad_log_probs": rows.back(gradient(loss, log_probs)),
        "metrics": metrics,
    }


def _weights(case: Case, rows: Rows, metrics: dict[str, Any]) -> Tensor | None:
    section = correction_config(case.config)
    if section is None:
        return None
    result = correct(section, rows["old_log_probs"], rows["rollout_log_probs"], rows.sequences)
    summary = summarise(result.metrics)
    if section.rejections and section.rejections[0].scope == "sequence":
        # Theirs is of all rows, and a row without sampled tokens counts as filtered.
        nonempty = rows.sequences.is_nonempty.sum()
        rejected = summary["correction/rejected_sequence_fraction"] * nonempty
        metrics["filter_ratio"] = (rejected + rows.shape[0] - nonempty) / rows.shape[0]
    elif section.rejections:
        metrics["filter_ratio"] = summary["correction/rejected_fraction"]
    elif section.weight is not None and section.weight.outside == "zero":
        metrics["filter_ratio"] = summary["correction/above_fraction"] + summary["correction/below_fraction"]
    return torch.where(result.response_mask, result.weights, 0.0)


def aggregated(case: Case) -> dict[str, Any]:
    return verl.aggregated(replace(case, config={**case.config, "loss_scale_factor": None}))


def value(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    preds = rows.leaf("value_preds")
    per_token = value_loss(preds, rows["values"], rows["returns"], clip=options["value_clip"])
    section = aggregation(options["loss_agg_mode"], None)
    loss = aggregate(per_token.values, rows.sequences, counted(rows.sequences), section)
    return {"loss": loss.detach(), "grad_value_preds": rows.back(gradient(loss, preds))}


def approx_kl(case: Case) -> dict[str, Any]:
    config = KlLossConfig.model_construct(
        estimator=case.config["kl_estimator"],
        gradient="weighted_k2" if case.config["unbiased_gradient"] else "estimator",
        value_clamp=10.0,
        log_ratio_bounds=(-10.0, None),
    )
    log_probs = case.inputs["log_probs"].clone().requires_grad_(True)
    kl = kl_loss(log_probs, case.inputs["ref_log_probs"], config, case.inputs.get("old_log_probs"))
    return {"kl": kl.detach(), "grad_log_probs_of_sum": gradient(kl.sum(), log_probs)}


def overlong(case: Case) -> dict[str, Any]:
    given = case.inputs
    before = given["scores"]
    after = shaped_scores(before, given["response_lengths"], torch.zeros_like(before), shaping_config(case.config))
    return {"scores_out": after, "n_penalized": int((after < before).sum())}


def stop_properly(case: Case) -> dict[str, Any]:
    given = case.inputs
    scores = shaped_scores(
        given["scores"], torch.zeros_like(given["scores"]), given["truncated"], shaping_config(case.config)
    )
    return {"scores_out": scores, "n_truncated": int(given["truncated"].sum())}


def dynamic_filter(case: Case) -> dict[str, Any]:
    low, high = [float(bound) for bound in case.config["range"]]
    return verl.split_groups(case, MeanInRangeConfig(low=low, high=high))


def preference(case: Case) -> dict[str, Any]:
    given, options = case.inputs, case.config
    chosen = given["policy_chosen_logps"].clone().requires_grad_(True)
    rejected = given["policy_rejected_logps"].clone().requires_grad_(True)
    result = dpo_loss(
        chosen,
        rejected,
        given["ref_chosen_logps"],
        given["ref_rejected_logps"],
        beta=options["beta"],
        label_smoothing=options["label_smoothing"],
        ipo=options["ipo"],
    )
    gradients = torch.autograd.grad(result.loss, [chosen, rejected])
    return {
        "loss": result.loss.detach(),
        "chosen_rewards": result.chosen_rewards,
        "rejected_rewards": result.rejected_rewards,
        "grad_policy_chosen_logps": gradients[0],
        "grad_policy_rejected_logps": gradients[1],
    }


def pairs(case: Case) -> dict[str, Any]:
    given = case.inputs
    return {"loss": pairwise_loss(given["chosen_scores"], given["rejected_scores"], given.get("margin"))}


def supervised(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    section = aggregation(case.config["loss_agg_mode"], None)
    return {"loss": aggregate(-rows["log_probs"], rows.sequences, counted(rows.sequences), section)}


ADAPTERS = {
    "RemoteExperienceMaker.compute_advantages_and_returns": advantages,
    "RemoteExperienceMaker.get_advantages_and_returns": gae_only,
    "RemoteExperienceMaker.get_cumulative_returns": returns_only,
    "compute_reward": token_rewards,
    "PolicyLoss.forward": policy,
    "aggregate_loss": aggregated,
    "ValueLoss.forward": value,
    "compute_approx_kl": approx_kl,
    "AdaptiveKLController.update": verl.controller,
    "FixedKLController.update": verl.controller,
    "log_probs_from_logits": verl.log_probs_of_logits,
    "compute_entropy": verl.entropy_of_logits,
    "apply_overlong_penalty": overlong,
    "apply_stop_properly_penalty": stop_properly,
    "SamplesGenerator._generate_vllm": dynamic_filter,
    "DPOLoss.forward": preference,
    "PairWiseLoss.forward": pairs,
    "LogExpLoss.forward": pairs,
    "SFTLoss.forward": supervised,
    "get_seqlen_balanced_partitions": verl.partition,
    "get_minimum_num_micro_batch_size": verl.micro_batches,
}
