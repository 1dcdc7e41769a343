"""Checks of what a policy may learn instead of its task: one component for another, or one answer for everything."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from flotilla.services.gateway.monitoring.health.evidence import Evidence, Seen

PREFIX, SUFFIX = "reward/", "/mean"
FEWEST_STEPS = 12
SURE = 3.0
"""Standard errors by which the means of two halves differ."""


def component_series(values: Mapping[str, float]) -> dict[str, float]:
    """Choose the means of the reward's components among a step's figures."""
    return {name: value for name, value in values.items() if name.startswith(PREFIX) and name.endswith(SUFFIX)}


def components_drift(evidence: Evidence) -> Seen | None:
    """See a component of the reward that rises while another one falls, both beyond chance."""
    steps = [step.chosen(component_series) for step in evidence.steps]
    steps = [each for each in steps if len(each) > 1]
    if len(steps) < FEWEST_STEPS:
        return None
    moved = {name: found for name in steps[-1] if (found := _moved([s[name] for s in steps if name in s])) is not None}
    least = evidence.facts.thresholds.drift
    up, (rose_from, rose_to) = max(moved.items(), key=lambda each: each[1][1] - each[1][0], default=("", (0.0, 0.0)))
    down, (fell_from, fell_to) = min(moved.items(), key=lambda each: each[1][1] - each[1][0], default=("", (0.0, 0.0)))
    if rose_to - rose_from < least or fell_from - fell_to < least:
        return None
    return Seen(
        f"in the last {len(steps)} steps {_name(up)} rose from {rose_from:.3g} to {rose_to:.3g} while {_name(down)} "
        f"fell from {fell_from:.3g} to {fell_to:.3g}",
        {"steps": float(len(steps)), "rose": rose_to - rose_from, "fell": fell_from - fell_to},
        subject=_name(up),
    )


def near_duplicates(evidence: Evidence) -> Seen | None:
    """See groups whose answers are nearly one text."""
    graded, share = evidence.graded, evidence.facts.thresholds.alike_share
    if not evidence.is_enough_graded or graded.alike_groups < share * graded.groups:
        return None
    return Seen(
        f"in {graded.alike_groups} of the last {graded.groups} groups most answers nearly repeat another one",
        {"groups": float(graded.groups), "alike_groups": float(graded.alike_groups)},
        samples=evidence.alike_samples,
    )


def _moved(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the means of both halves of a series; None where chance explains their difference."""
    if len(values) < FEWEST_STEPS:
        return None
    halves = values[: len(values) // 2], values[len(values) // 2 :]
    before, after = map(fmean, halves)
    error = math.sqrt(_variance(halves[0], before) / len(halves[0]) + _variance(halves[1], after) / len(halves[1]))
    return (before, after) if abs(after - before) > SURE * error else None


def _variance(values: Sequence[float], mean: float) -> float:
    """Compute the population variance; ``statistics`` computes with fractions, which takes 25 times as long."""
    return math.fsum([(value - mean) ** 2 for value in values]) / len(values)


def _name(series: str) -> str:
    return series.removeprefix(PREFIX).removesuffix(SUFFIX)
