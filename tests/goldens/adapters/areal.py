"""AReaL: its functions and option names to ours."""

from typing import Any

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import aggregate
from flotilla.services.trainer.algorithms.importance import Correction, correct
from flotilla.services.trainer.algorithms.losses import policy_loss
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.shared.config.sections import policy_loss as pol
from flotilla.shared.config.sections.algorithm import CorrectionConfig, RejectionConfig, WeightConfig
from tests.goldens.adapters.rows import Rows, aggregation, counted, gradient, positive, weighted_loss
from tests.goldens.case import Case, NotOffered


def correction_config(options: dict[str, Any]) -> CorrectionConfig:
    """Translate ``rejection_sampling``: at sequence level a ratio gives every token the geometric-mean weight."""
    metric, bounds = options["metric"], {"lower": options["lower"], "upper": options["upper"]}
    is_sequence = options["level"] == "sequence"
    shares = is_sequence and metric == "ratio"
    if shares and options["agg"] != "mean":
        raise NotOffered(f"a sequence ratio weight that is the {options['agg']} of token ratios")
    level: Any = "geometric" if shares else "token"
    if options["action"] == "clamp":
        if metric != "ratio":
            raise NotOffered(f"clamping by {metric}")
        weight = WeightConfig(level=level, lower=positive(options["lower"]), upper=options["upper"])
        return CorrectionConfig(weight=weight, log_ratio_clamp=None)
    where: dict[str, Any] = {"scope": "sequence", "reduce": options["agg"]} if is_sequence else {"scope": "token"}
    # It estimates KL(proximal || behaviour): its k1 is ours with the other sign, its k3 that of the inverse ratio.
    statistic = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "reverse_k3"}[metric]
    if metric == "kl_k1":
        if is_sequence and options["agg"] == "max":
            raise NotOffered("the largest kl_k1 of a sequence, which is the least of ours")
        lower, upper = options["lower"], options["upper"]
        bounds = {"lower": None if upper is None else -upper, "upper": None if lower is None else -lower}
    test = RejectionConfig(statistic=statistic, **where, **bounds)  # type: ignore[arg-type]
    weight = WeightConfig(level=level, upper=None)
    return CorrectionConfig(weight=weight, rejections=(test,), denominators="original", log_ratio_clamp=None)


def _corrected(case: Case, rows: Rows, options: dict[str, Any] | None) -> tuple[Correction, Tensor]:
    """Without rejection the proximal policy's loss is weighted all the same, without a bound."""
    config = CorrectionConfig(weight=WeightConfig(upper=None), log_ratio_clamp=None)
    if options is not None:
        config = correction_config(options)
    result = correct(config, rows["old_log_probs"], rows["rollout_log_probs"], rows.sequences)
    return result, torch.where(result.response_mask, result.weights, 0.0)


def rejection(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    result, weights = _corrected(case, rows, case.config)
    summary = summarise(result.metrics)
    filtered = summary["correction/rejected_fraction"]
    if case.config["action"] == "clamp":
        filtered = summary["correction/above_fraction"] + summary["correction/below_fraction"]
    outputs = {"mask_out": rows.back(result.response_mask).long(), "weights": rows.back(weights)}
    if case.config["action"] == "clamp" and case.config["level"] == "sequence":
        return outputs  # its fraction of clamped sequences is of tokens
    return outputs | {"filtered_fraction": filtered}


def decoupled_ppo(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    low, high = options["eps_clip"], options.get("eps_clip_higher")
    high = low if high is None else high
    config: pol.PolicyLossConfig = pol.PpoConfig(
        clip_low=low, clip_high=high, dual_clip=options.get("c_clip"), log_ratio_clamp=None
    )
    if options["importance_sampling_level"] == "sequence":
        config = pol.GspoConfig(
            clip_low=low,
            clip_high=high,
            dual_clip=options.get("c_clip"),
            gradient="sequence",
            mean_advantages=True,
            log_ratio_clamp=None,
        )
    result, weights = _corrected(case, rows, options.get("rejection_sampling"))
    log_probs = rows.leaf("log_probs")
    loss, per_token = weighted_loss(
        config,
        rows,
        aggregation("token-mean", None),
        counted(rows.sequences),
        log_probs=log_probs,
        old_log_probs=rows["old_log_probs"],
        sequences=rows.sequences.with_mask(result.response_mask),
        weights=weights,
    )
    mask = result.response_mask
    outputs: dict[str, Any] = {"loss": loss.detach(), "grad_log_probs": rows.back(gradient(loss, log_probs))}
    for name, flags in (("clip_mask", per_token.clipped), ("dual_clip_mask", per_token.clipped_lower)):
        if flags is not None:
            outputs[name] = rows.back(flags & mask).long()
    return outputs


def sapo(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    config = pol.SapoConfig(
        tau_positive=options["tau_pos"],
        tau_negative=options["tau_neg"],
        level=options["importance_sampling_level"],
        log_ratio_clamp=None,
    )
    log_probs = rows.leaf("log_probs")
    per_token = policy_loss(config, log_probs, rows["old_log_probs"], rows["advantages"], rows.sequences)
    loss = aggregate(per_token.values, rows.sequences, counted(rows.sequences), aggregation("token-mean", None))
    return {"loss": loss.detach(), "grad_log_probs": rows.back(gradient(loss, log_probs))}


ADAPTERS = {"apply_rejection_sampling": rejection, "ppo_actor_loss_fn": decoupled_ppo, "sapo_loss_fn": sapo}
