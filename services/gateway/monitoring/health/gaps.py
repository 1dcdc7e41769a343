"""Whether one rollout's log-probabilities are further from the trainer's than the others', beyond their noise."""

from collections.abc import Mapping
from statistics import median

from flotilla.services.gateway.monitoring.health.evidence import Evidence, Seen
from flotilla.services.gateway.monitoring.health.updates import BAND, FEWEST_GAPS, LEAST_GAP, NORMAL_SPREAD

PREFIX = "engine_gap/"


def gap_series(values: Mapping[str, float]) -> dict[str, float]:
    """Choose the distances of rollouts among a step's figures."""
    return {name: value for name, value in values.items() if name.startswith(PREFIX)}


def rollout_differs(evidence: Evidence) -> Seen | None:
    """See a rollout whose tokens have left the band of all the others' distances, in several of its steps in a row.

    The band is the median of the others' distances and six standard deviations, as the median of distances from the
    median tells them.
    """
    if not evidence.facts.compares_log_probs:
        return None
    steps = [step.chosen(gap_series) for step in evidence.steps]
    count = evidence.facts.thresholds.steps
    found: list[tuple[float, str, float]] = []
    for name in sorted({name for step in steps for name in step}):
        own = [step[name] for step in steps if name in step][-count:]
        others = [value for step in steps for other, value in step.items() if other != name]
        if len(own) < count or len(others) < FEWEST_GAPS or name not in _newest(steps):
            continue
        usual = median(others)
        upper = usual + BAND * NORMAL_SPREAD * median(abs(each - usual) for each in others)
        upper = max(upper, 2 * usual, LEAST_GAP)
        if min(own) > upper:
            found.append((own[-1], name.removeprefix(PREFIX), upper))
    if not found:
        return None
    gap, rollout, upper = max(found)
    return Seen(
        f"tokens of rollout {rollout} have log-probabilities that differ by {gap:.2g} nats from the trainer's, in "
        f"{count} of its steps in a row above the {upper:.2g} up to which those of the other rollouts do",
        {"gap": gap, "upper": upper},
        subject=rollout,
    )


def _newest(steps: list[dict[str, float]]) -> frozenset[str]:
    """Name the rollouts that took part lately: one that has left is no finding."""
    return frozenset(name for step in steps[-8:] for name in step)
