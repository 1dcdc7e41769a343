"""verl: policy losses and rollout correction."""

from typing import Any

from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import Denominators
from flotilla.services.trainer.algorithms.importance import (
    Correction,
    correct,
    mismatch_metrics,
    normalised,
    normaliser_parts,
)
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.shared.config.sections import policy_loss as pol
from flotilla.shared.config.sections.algorithm import CorrectionConfig, RejectionConfig, WeightConfig
from tests.goldens.adapters.rows import Rows, aggregation, counted, fraction, gradient, mean, weighted_loss
from tests.goldens.case import Case, NotOffered


def loss_config(name: str, options: dict[str, Any]) -> pol.PolicyLossConfig:
    """Translate a loss mode and its actor options."""
    low, high = options.get("clip_ratio_low"), options.get("clip_ratio_high")
    low = options.get("clip_ratio", 0.2) if low is None else low
    high = options.get("clip_ratio", 0.2) if high is None else high
    cap = options.get("clip_ratio_c", 3.0)
    match name:
        case "vanilla":
            return pol.PpoConfig(clip_low=low, clip_high=high, dual_clip=cap)
        case "dppo_tv" | "dppo_kl":
            divergence = "tv" if name == "dppo_tv" else "binary_kl"
            return pol.DppoConfig(divergence=divergence, low=low, high=high, sides="outward", ratio_cap=cap)
        case "gspo":
            return pol.GspoConfig(clip_low=low, clip_high=high, gradient="token", log_ratio_clamp=10.0)
        case "sapo":
            return pol.SapoConfig(tau_positive=options["tau_pos"], tau_negative=options["tau_neg"])
        case "gpg":
            return pol.PolicyGradientConfig()
        case "clip_cov":
            ratio, lower, upper = options["clip_cov_ratio"], options["clip_cov_lb"], options["clip_cov_ub"]
            return pol.ClipCovConfig(
                clip_low=low,
                clip_high=high,
                fraction=ratio,
                lower=lower,
                upper=upper,
                covariance_of="current",
                log_ratio_clamp=None,
            )
        case "kl_cov":
            return pol.KlCovConfig(
                fraction=options["kl_cov_ratio"],
                coefficient=options["ppo_kl_coef"],
                covariance_of="current",
                log_ratio_clamp=None,
            )
        case "geo_mean":
            return pol.GmpoConfig(clip_low=low, clip_high=high, log_ratio_clamp=None)
        case "dro":
            return pol.DroConfig(beta=options["dro_beta"])
        case "cispo":
            return pol.CispoConfig(clip_low=low, clip_high=high)
        case _:
            raise NotOffered(f"loss mode {name}")


def policy(name: str) -> Any:
    def run(case: Case) -> dict[str, Any]:
        rows, options = Rows.of(case), case.config
        mode = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}.get(name, options["loss_agg_mode"])
        # Its geometric-mean loss averages over all rows, fully masked ones included.
        num_rows = rows.shape[0] if name == "geo_mean" else options.get("global_batch_size")
        log_probs = rows.leaf("log_probs")
        loss, per_token = weighted_loss(
            loss_config(name, options),
            rows,
            aggregation(mode, options.get("loss_scale_factor") or rows.shape[1]),
            counted(rows.sequences, num_tokens=options.get("batch_num_tokens"), num_sequences=num_rows),
            log_probs=log_probs,
            old_log_probs=rows["old_log_probs"],
            weights=rows["rollout_is_weights"] if "rollout_is_weights" in case.inputs else None,
        )
        loss = loss * options.get("dp_size", 1)
        return {
            "loss": loss.detach(),
            "grad_log_probs": rows.back(gradient(loss, log_probs)),
            "metrics": _policy_metrics(name, rows, log_probs, rows["old_log_probs"], per_token),
        }

    return run


def _policy_metrics(name: str, rows: Rows, log_probs: Tensor, old: Tensor, per_token: Any) -> dict[str, Any]:
    mask = rows.sequences.response_mask
    x = log_probs.detach() - old
    clamped = name in ("vanilla", "sapo", "cispo", "dppo_tv", "dppo_kl")
    distance = x.abs() if name == "kl_cov" else -(x.clamp(-20, 20) if clamped else x)
    metrics = {"approx_kl": mean(distance, mask)}
    if name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "cispo"):
        metrics["clip_fraction"] = fraction(per_token.clipped, mask)
    if name == "vanilla":
        metrics["clip_fraction_lower"] = fraction(per_token.clipped_lower, mask)
    return metrics


def correction_config(options: dict[str, Any]) -> CorrectionConfig | None:
    """Translate ``rollout_is*`` and ``rollout_rs*``; None where they only ask for metrics."""
    level, weight = options.get("rollout_is"), None
    if level is not None and options.get("rollout_is_threshold") is not None:
        lower, upper = _band(options["rollout_is_threshold"])
        normalise = options.get("rollout_is_batch_normalize", False)
        outside = "clamp" if lower is None else "zero"
        weight = WeightConfig(level=level, lower=lower, upper=upper, outside=outside, batch_normalise=normalise)
    names = (options.get("rollout_rs") or "").split(",") if options.get("rollout_rs") else []
    bands = str(options.get("rollout_rs_threshold")).split(",")
    bands = bands * len(names) if len(bands) == 1 else bands
    rejections = tuple(_rejection(name.strip(), band) for name, band in zip(names, bands, strict=True))
    return CorrectionConfig(weight=weight, rejections=rejections) if weight or rejections else None


def _band(text: Any) -> tuple[float | None, float | None]:
    parts = str(text).split("_")
    return (None, float(parts[0])) if len(parts) == 1 else (float(parts[0]), float(parts[1]))


def _rejection(name: str, band: str) -> RejectionConfig:
    """Its k1 is the log of sampler over trainer, so its band on the ratio is the inverse of one on exp(x)."""
    scope, *reduce, statistic = name.split("_")
    where: dict[str, Any] = {"scope": "token"} if scope == "token" else {"scope": "sequence", "reduce": reduce[0]}
    lower, upper = _band(band)
    if statistic != "k1":
        return RejectionConfig(statistic=statistic, upper=upper, **where)  # type: ignore[arg-type]
    assert upper is not None
    lowest = 1 / upper if lower is None else lower
    return RejectionConfig(statistic="ratio", lower=1 / upper, upper=1 / lowest, **where)


def correction(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    old, rollout = rows["old_log_probs"], rows["rollout_log_probs"]
    mismatch = summarise(mismatch_metrics(old, rollout, rows.sequences))
    metrics: dict[str, Any] = {
        name: mismatch[f"correction/{name}"]
        for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "training_log_ppl", "rollout_log_ppl", "log_ppl_abs_diff")
    }
    metrics["log_ppl_diff"] = metrics["training_log_ppl"] - metrics["rollout_log_ppl"]
    config = correction_config(case.config)
    if config is None:
        return {"mask_out": case.inputs["response_mask"], "metrics": metrics}
    result = correct(config, old, rollout, rows.sequences)
    weights = _normalised(result, rows, config)
    summary = summarise(result.metrics)
    if config.rejections:
        metrics["rollout_rs_masked_fraction"] = summary["correction/rejected_fraction"]
        metrics["rollout_rs_seq_masked_fraction"] = summary["correction/rejected_sequence_fraction"]
    outputs: dict[str, Any] = {"mask_out": rows.back(result.response_mask).long(), "metrics": metrics}
    if config.weight is not None:
        outputs["weights"] = rows.back(weights)
        metrics["rollout_is_mean"] = summary["correction/weight"]
        metrics["rollout_is_eff_sample_size"] = summary["correction/effective_sample_size"]
        metrics["rollout_is_ratio_fraction_high"] = summary["correction/above_fraction"]
        if config.weight.lower is not None:
            metrics["rollout_is_ratio_fraction_low"] = summary["correction/below_fraction"]
    return outputs


def _normalised(result: Correction, rows: Rows, config: CorrectionConfig) -> Tensor:
    """The weights, over their mean if the config says so."""
    if config.weight is None or not config.weight.batch_normalise:
        return result.weights
    weight_sum, weight_count = normaliser_parts(result, rows.sequences, config.weight)
    own = counted(rows.sequences)
    return normalised(result.weights, Denominators(own.num_tokens, own.num_sequences, weight_sum, weight_count))


def bypass(case: Case) -> dict[str, Any]:
    """Old policy = sampler: the correction's numerator is the current policy, detached."""
    rows, options = Rows.of(case), case.config
    config = correction_config(options)
    log_probs, rollout = rows.leaf("log_probs"), rows["rollout_log_probs"]
    survivors, weights, reinforce = rows.sequences, None, options["loss_type"] == "reinforce"
    if config is not None:
        result = correct(config, log_probs, rollout, rows.sequences)
        survivors = rows.sequences.with_mask(result.response_mask)
        weights = _normalised(result, rows, config) if reinforce else None
    loss, per_token = weighted_loss(
        pol.PolicyGradientConfig() if reinforce else loss_config("vanilla", options),
        rows,
        aggregation(options["loss_agg_mode"], rows.shape[1]),
        counted(survivors),
        log_probs=log_probs,
        old_log_probs=rollout,
        sequences=survivors,
        weights=weights,
    )
    metrics = {}
    if not reinforce:
        metrics["clip_fraction"] = fraction(per_token.clipped, survivors.response_mask)
        metrics["clip_fraction_lower"] = fraction(per_token.clipped_lower, survivors.response_mask)
    return {
        "loss": loss.detach(),
        "grad_log_probs": rows.back(gradient(loss, log_probs)),
        "metrics": metrics,
    }


ADAPTERS = {
    **{
        f"compute_policy_loss_{name}": policy(name)
        for name in (
            "vanilla",
            "dppo_tv",
            "dppo_kl",
            "gspo",
            "sapo",
            "gpg",
            "clip_cov",
            "kl_cov",
            "geo_mean",
            "dro",
            "cispo",
        )
    },
    "compute_policy_loss_bypass_mode": bypass,
    "compute_rollout_correction_and_rejection_mask": correction,
}
