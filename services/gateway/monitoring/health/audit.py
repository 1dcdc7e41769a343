"""The check of the hidden second grade: does the reward say what another grader says?"""

import math
from statistics import NormalDist

from flotilla.services.gateway.monitoring.health.evidence import Audited, Evidence, Seen


def lower_bound(share: float, count: int, confidence: float) -> float:
    """Return what a share is at least, with a one-sided confidence.

    Args:
        share: mean of ``count`` independent values between 0 and 1.
        count: at least 1.
        confidence: from 0.5 to below 1.

    Returns:
        Wilson's bound for a share of ones, which no other distribution on that range with this mean exceeds in spread.

    Source: Wilson, Probable Inference, JASA 22(158), 1927.
    """
    z = NormalDist().inv_cdf(confidence)
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (middle - spread) / (1 + z * z / count))


def disagreement(audited: Audited, confidence: float) -> tuple[float, float]:
    """Return the mean share of samples whose grades disagree, and what it is at least."""
    share = min(1.0, max(0.0, audited.audit_disagreement / audited.audited_groups))
    return share, lower_bound(share, audited.audited_groups, confidence)


def audit_missing(evidence: Evidence) -> Seen | None:
    """See second grades that are not given: what they would say of the reward is not known then."""
    config, audited = evidence.facts.audit, evidence.audited
    if config is None or audited.chosen_groups < config.min_groups:
        return None
    share = min(1.0, max(0.0, audited.audit_missing / audited.chosen_groups))
    if lower_bound(share, audited.chosen_groups, config.confidence) <= config.bound:
        return None
    words = f"; the last: {evidence.last_audit_error}" if evidence.last_audit_error else ""
    return Seen(
        f"of the samples of {audited.chosen_groups} audited groups {share:.0%} have no second grade, in "
        f"{audited.failed_audits} groups none: it failed, or abstained{words}",
        {
            "chosen_groups": float(audited.chosen_groups),
            "failed_audits": float(audited.failed_audits),
            "missing": share,
        },
    )


def graders_disagree(evidence: Evidence) -> Seen | None:
    """See a reward that another grader contradicts more often than the bound allows, and not by chance."""
    config, audited = evidence.facts.audit, evidence.audited
    if config is None or audited.audited_groups < config.min_groups:
        return None
    share, least = disagreement(audited, config.confidence)
    if least <= config.bound:
        return None
    kinder = min(1.0, audited.audit_higher / audited.audit_disagreement)
    return Seen(
        f"in {audited.audited_groups} audited groups {share:.0%} of the grades disagree (at least {least:.0%} with "
        f"{config.confidence:.0%} confidence, reward.audit.bound is {config.bound:.0%}); in {kinder:.0%} of these the "
        "reward is above the second grade",
        {
            "audited_groups": float(audited.audited_groups),
            "failed_audits": float(audited.failed_audits),
            "disagreement": share,
            "disagreement_at_least": least,
            "higher": kinder,
        },
        samples=evidence.audited_samples,
    )
