"""SkyRL: its off-policy correction options to ours."""

from typing import Any

import torch

from flotilla.services.trainer.algorithms.importance import correct, importance_weights, kept_by_veto
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.shared.config.sections.algorithm import CorrectionConfig, RejectionConfig, VetoConfig, WeightConfig
from tests.goldens.adapters.rows import Rows, positive
from tests.goldens.case import Case


def weight_config(options: dict[str, Any]) -> WeightConfig | None:
    """Translate ``tis_ratio_type`` and its clips."""
    match options.get("tis_ratio_type"):
        case "token":
            return WeightConfig(level="token", upper=options["token_tis_ratio_clip_high"])
        case "sequence":
            return WeightConfig(level="sequence", upper=options["sequence_tis_ratio_clip_high"])
        case _:
            return None


def rejections(options: dict[str, Any]) -> tuple[RejectionConfig, ...]:
    """Translate the token mask and the sequence mask."""
    tests = []
    low, high = options.get("token_mask_is_threshold_low"), options.get("token_mask_is_threshold_high")
    if low is not None or high is not None:
        tests.append(RejectionConfig(lower=low, upper=high))
    match options.get("sequence_mask_metric"):
        case "geometric":
            bounds = {"lower": options["geo_mask_low"], "upper": options["geo_mask_high"]}
            tests.append(RejectionConfig(scope="sequence", reduce="mean", **bounds))
        case "product":
            bounds = {"lower": options["product_mask_low"], "upper": options["product_mask_high"]}
            tests.append(RejectionConfig(scope="sequence", reduce="sum", **bounds))
    return tuple(tests)


def correction(case: Case) -> dict[str, Any]:
    """Its order is veto, token mask, weight, sequence mask; the last two look at the tokens that are left by then."""
    rows, options = Rows.of(case), case.config
    low, high = options.get("outlier_token_is_threshold_low"), options.get("outlier_token_is_threshold_high")
    veto = None if low is None and high is None else VetoConfig(lower=positive(low), upper=high)
    weight, tests = weight_config(options), rejections(options)
    outputs: dict[str, Any] = {}
    mask = rows.sequences.response_mask
    if weight is None and veto is None and not tests:
        return {"mask_out": rows.back(mask).long()}
    is_shared = any(each.scope == "sequence" for each in tests) or (weight is not None and weight.level == "sequence")
    over = "surviving" if is_shared and any(each.scope == "token" for each in tests) else "original"
    config = CorrectionConfig(weight=weight, rejections=tests, veto=veto, statistics_over=over)
    result = correct(config, rows["old_log_probs"], rows["rollout_log_probs"], rows.sequences)
    outputs["mask_out"] = rows.back(result.response_mask).long()
    if weight is not None:
        x = rows["old_log_probs"] - rows["rollout_log_probs"]
        if weight.level == "sequence":
            # A row of which no token is left by then has the ratio of an empty product there.
            kept = mask if veto is None else mask & kept_by_veto(veto, x, rows.sequences)
            whole = rows.back(result.weights * kept).max(1, keepdim=True).values
            outputs["weights"] = torch.where(whole > 0, whole, 1.0)
        else:
            outputs["weights"] = rows.back(importance_weights(x, rows.sequences, weight))
        if veto is not None or tests:
            return outputs  # its clip fraction is of the tokens that are left by then, ours of all
        summary = summarise(result.metrics)
        name = "tis_seq_clip_high_ratio" if weight.level == "sequence" else "tis_token_clip_high_ratio"
        outputs["metrics"] = {name: summary["correction/above_fraction"]}
    return outputs


ADAPTERS = {"compute_off_policy_correction": correction}
