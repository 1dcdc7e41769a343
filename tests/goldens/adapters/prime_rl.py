"""prime-rl: its loss functions to ours."""

from typing import Any

from flotilla.shared.config.sections import policy_loss as pol
from tests.goldens.adapters.rows import Rows, aggregation, counted, gradient, weighted_loss
from tests.goldens.case import Case, NotOffered


def _policy(case: Case, config: pol.DppoConfig) -> dict[str, Any]:
    """Its loss is a plain sum over tokens, against the sampler, with advantages scaled by ``adv_tau``."""
    if case.config.get("adv_tau", 1.0) != 1.0:
        raise NotOffered("a factor on the advantages: scale the reward instead")
    rows = Rows.of(case)
    log_probs = rows.leaf("log_probs")
    loss, per_token = weighted_loss(
        config,
        rows,
        aggregation("token-sum", None),
        counted(rows.sequences),
        log_probs=log_probs,
        old_log_probs=rows["rollout_log_probs"],
    )
    assert per_token.clipped is not None
    return {"loss_sum": loss.detach(), "grad_log_probs": rows.back(gradient(loss, log_probs))}


def default(case: Case) -> dict[str, Any]:
    options = case.config
    config = pol.DppoConfig(
        divergence="tv",
        low=options["dppo_mask_low"],
        high=options["dppo_mask_high"],
        sides="outward",
        ratio_cap=None,
        penalty=2 * options["kl_tau"],
    )
    return _policy(case, config)


def ipo(case: Case) -> dict[str, Any]:
    options = case.config
    bound = options["ipo_threshold"]
    config = pol.DppoConfig(
        divergence="tv", low=bound, high=bound, sides="both", ratio_cap=None, penalty=2 * options["kl_tau"]
    )
    return _policy(case, config)


def reference_kl(case: Case) -> dict[str, Any]:
    raise NotOffered("a distillation loss whose trust region looks at the sign of advantages that it does not use")


ADAPTERS = {"default_loss_fn": default, "ipo_loss_fn": ipo, "ref_kl_loss_fn": reference_kl}
