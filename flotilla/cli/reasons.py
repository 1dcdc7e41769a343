"""What the ledger's reasons mean, for people: why a group was filtered, dropped or failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flotilla.shared.streams.ledger import Ledger

REASONS: Mapping[str, str] = {
    "abstained": "too few answers have a reward: graders abstained",
    "all_abstained": "no answer has a reward: graders abstained",
    "all_masked": "no answer is left to train on: reward.sample_mask",
    "cannot_be_shown": "the engine's server would take a token of the prompt's text for one more image",
    "data_error": "an image of the prompt cannot be shown",
    "episode_failed": "every answer failed while it was sampled: its environment, a tool or its prompt",
    "experiment_ended": "under way when the experiment ended",
    "grading_error": "no answer could be graded",
    "mean_in_range": "the mean reward is outside of reward.group_filter's range",
    "no_teacher": "an answer has no log-probabilities of a teacher",
    "nothing_sampled": "no token was sampled",
    "prompt_too_long": "the prompt is too long",
    "rollout_timeout": "sampling took longer than its limit",
    "spread_above": "the rewards differ too little for reward.group_filter",
    "stale": "older than asynchrony.max_lag",
    "teacher_error": "no answer could be judged by the teacher behind a URL",
    "too_few_scored": "too few answers could be graded",
    "zero_spread": "all answers had the same reward, which teaches nothing",
}


def meaning_of(reason: str) -> str:
    """Explain a reason; one that is not known is given as it is."""
    return f"{REASONS[reason]} ({reason})" if reason in REASONS else reason


def ended_lines(ledger: Ledger) -> list[tuple[str, str]]:
    """Write what was filtered, dropped or failed: how many groups, why, and how long they were.

    Returns:
        For each kind and reason, such as ``("dropped", "4: older than asynchrony.max_lag (stale); by sampled tokens:
        ...")``.
    """
    lengths = {(kind, reason): histogram for kind, reason, histogram in histograms(ledger)}
    found = []
    for kind, reasons in (("filtered", ledger.filtered), ("dropped", ledger.dropped), ("failed", ledger.failed)):
        for reason, count in reasons.items():
            if count:
                tail = f"; {lengths[kind, reason]}" if (kind, reason) in lengths else ""
                found.append((kind, f"{count}: {meaning_of(reason)}{tail}"))
    return found


def histograms(ledger: Ledger) -> list[tuple[str, str, str]]:
    """Write the lengths of what was filtered, dropped or failed.

    Returns:
        For each its kind, its reason and its histogram: groups by the sampled tokens of all their members.
    """
    return [
        (kind, reason, "groups by sampled tokens: " + ", ".join(f"{n} up to {most}" for most, n in histogram.items()))
        for kind, reasons in ledger.lengths.items()
        for reason, histogram in reasons.items()
        if set(histogram) != {0}  # Of what was never sampled the number alone is of interest.
    ]


def first_words(cause: str) -> str:
    """Omit the last log lines of a process that a signal ended: they do not show the cause."""
    what, mark, _ = cause.partition("last lines: ")
    return what.rstrip("; ").removesuffix("; its") if mark and re.search(r" signal | \(SIG", what) else cause
