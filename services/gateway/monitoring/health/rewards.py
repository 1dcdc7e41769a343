"""Checks of grades: a reward that never differs gives no learning signal.

So is the hidden second grade: does the reward agree with another grader?
"""

import math
from statistics import NormalDist

from flotilla.services.gateway.monitoring.health.evidence import MIN_SAMPLES, Audited, Evidence, Seen

ALL = 0.98
MIN_UNGRADED = 2
"""One sample without a grade is chance."""
LONGEST_SHOWN = 80


def grader_failing(evidence: Evidence) -> Seen | None:
    """See graders that fail on nearly all samples."""
    graded, share = evidence.graded, evidence.facts.thresholds.failed_share
    if graded.samples < MIN_SAMPLES or graded.errors < share * graded.samples:
        return None
    words = f"; the last error: {evidence.last_error}" if evidence.last_error else ""
    return Seen(f"{graded.errors} of the last {graded.samples} samples could not be graded{words}", _counts(evidence))


def grades_missing(evidence: Evidence) -> Seen | None:
    """See a part of the samples, however small, that nothing is learned from since they have no grade."""
    graded, share = evidence.graded, evidence.facts.thresholds.ungraded_share
    ungraded = graded.samples - graded.scored
    if graded.samples < MIN_SAMPLES or ungraded < max(MIN_UNGRADED, share * graded.samples):
        return None
    abstained, example = ungraded - graded.errors, evidence.ungraded_sample
    parts = [f"grading failed for {graded.errors}"] if graded.errors else []
    parts += [f"no grader had an opinion of {abstained}"] if abstained else []
    words = f"; the last error: {evidence.last_error}" if graded.errors and evidence.last_error else ""
    shown = f"; such as the answer {example.completion[:LONGEST_SHOWN]!r} (label {example.label!r})" if example else ""
    return Seen(
        f"{ungraded} of the last {graded.samples} samples ({ungraded / graded.samples:.0%}) have no grade: "
        f"{', '.join(parts)}{words}{shown}",
        _counts(evidence) | {"ungraded": float(ungraded)},
        sample=example,
    )


def wrong_labels(evidence: Evidence) -> Seen | None:
    """See labels that graders cannot use."""
    graded, share = evidence.graded, evidence.facts.thresholds.failed_share
    if graded.samples < MIN_SAMPLES or graded.label_errors < share * graded.samples:
        return None
    return Seen(
        f"{graded.label_errors} of the last {graded.samples} samples could not be graded because of their label: "
        f"{evidence.last_error}",
        _counts(evidence),
    )


def no_answer_found(evidence: Evidence) -> Seen | None:
    """See completions in which the grader finds no answer."""
    graded = evidence.graded
    if not evidence.facts.names_answers or not evidence.is_enough_graded:
        return None
    if graded.scored < ALL * graded.samples or graded.answered > (1 - ALL) * graded.samples:
        return None
    return Seen(
        f"the grader found an answer in {graded.answered} of the last {graded.samples} completions", _counts(evidence)
    )


def never_right(evidence: Evidence) -> Seen | None:
    """See answers that are found, and of which none is right."""
    if not evidence.facts.names_answers or not evidence.is_reward_constant:
        return None
    graded = evidence.graded
    if graded.answered < graded.samples / 2 or evidence.did_rewards_differ:
        return None
    first = evidence.samples[0] if evidence.samples else None
    example = f", such as {first.answer!r} where the label is {first.label!r}" if first and first.answer else ""
    return Seen(
        f"the grader found an answer in {graded.answered} of the last {graded.samples} completions and none was right"
        f"{example}",
        _counts(evidence),
    )


def constant_reward(evidence: Evidence) -> Seen | None:
    """See a reward that is the same for every sample."""
    if not evidence.is_reward_constant or not evidence.facts.learns_from_rewards:
        return None
    return Seen(
        f"all of the last {evidence.graded.scored} samples have reward {evidence.last_reward:g}", _counts(evidence)
    )


def nothing_left(evidence: Evidence) -> Seen | None:
    """See a policy that always gets the best reward of a run in which rewards differed."""
    if not evidence.is_reward_constant or not evidence.did_rewards_differ:
        return None
    if evidence.last_reward is None or evidence.last_reward != evidence.highest_reward:
        return None
    return Seen(
        f"all of the last {evidence.graded.scored} samples have the best reward of the run, {evidence.last_reward:g}",
        _counts(evidence),
    )


def no_signal(evidence: Evidence) -> Seen | None:
    """See groups of which nearly every one has a single reward, whatever it is, or is filtered."""
    graded = evidence.graded
    share = evidence.facts.thresholds.signalless_share
    if not evidence.facts.learns_from_rewards:
        return None
    if not evidence.is_enough_graded or graded.signalless_groups < share * graded.groups:
        return None
    if graded.errors >= evidence.facts.thresholds.failed_share * graded.samples:
        return None
    filtered = f", {graded.filtered_groups} of them were filtered" if graded.filtered_groups else ""
    return Seen(
        f"{graded.signalless_groups:,} of the last {graded.groups:,} groups taught nothing{filtered}: the rewards "
        f"within each are the same, or outside of what the filter keeps",
        _counts(evidence),
    )


def _counts(evidence: Evidence) -> dict[str, float]:
    graded = evidence.graded
    names = ("groups", "signalless_groups", "filtered_groups", "samples", "scored", "errors", "answered")
    return {name: float(getattr(graded, name)) for name in names}


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
