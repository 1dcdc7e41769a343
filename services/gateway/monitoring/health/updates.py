"""Checks of the optimiser's updates: figures that are not finite, that explode, a policy that falls apart."""

from collections.abc import Mapping, Sequence
from statistics import median

from flotilla.services.gateway.monitoring.health.evidence import Evidence, Seen

MIN_STEPS = 3
"""Steps before a figure is compared with those of the run so far."""
LOUD_NORM = 10.0
"""A gradient norm that is not large by itself may have grown by any factor."""
LOUD_LOSS = 10.0
IDENTICAL_SHARE = 0.75
FEWEST_GAPS = 12
"""Earlier steps that make a band."""
NORMAL_SPREAD = 1.4826
"""Standard deviation of a normal distribution whose median distance from its median is 1."""
BAND = 6.0
"""Its half width, in standard deviations as the median of distances from the median tells them."""
LEAST_GAP = 1e-3
"""Nats per token: what rounding in bfloat16 makes, and no reason to look."""
MOVED_STEPS = 16
"""How long a policy that collapsed in one step is reported."""


def not_finite(evidence: Evidence) -> Seen | None:
    """See steps none of whose gradients was finite."""
    broken = [step for step in evidence.steps[-evidence.facts.thresholds.steps :] if _is_broken(step.values)]
    if not broken:
        return None
    made = broken[-1].values["updates/in_step"]
    return Seen(
        f"loss or gradient was not finite in step {broken[-1].step}: {made:g} of its {made:g} updates were left out",
        {"steps": float(len(broken))},
    )


def exploding(evidence: Evidence) -> Seen | None:
    """See a gradient norm, or a loss, that is many times what it was."""
    growth = evidence.facts.thresholds.growth
    for name, word, loud in (("grad_norm", "gradient norm", LOUD_NORM), ("loss/total", "loss", LOUD_LOSS)):
        values = [abs(step.values[name]) for step in evidence.steps if name in step.values]
        found = _exploded(values, growth, loud)
        if found is not None:
            before, now = found
            return Seen(
                f"the {word} is {now:.3g}, {now / max(before, 1e-12):,.0f} times the {before:.3g} of the steps before; "
                f"the learning rate is {evidence.facts.learning_rate:g}",
                {"now": now, "before": before},
            )
    return None


def policy_moved(evidence: Evidence) -> Seen | None:
    """See a policy that is another one after a single version."""
    bound = evidence.facts.thresholds.policy_move
    for step in reversed(evidence.steps[-MOVED_STEPS:]):
        moved = _distance(step.values, evidence) if step.values.get("lag/max", 0.0) > 0 else None
        if moved is not None and moved > bound * step.values["lag/max"]:
            return Seen(
                f"in step {step.step} the policy was {moved:.3g} nats per token from the one that sampled, "
                f"{step.values['lag/max']:g} versions before; the learning rate is {evidence.facts.learning_rate:g}",
                {"nats": moved},
            )
    return None


def diverging(evidence: Evidence) -> Seen | None:
    """See updates that are far too large."""
    return policy_moved(evidence) or exploding(evidence)


def collapsed(evidence: Evidence) -> Seen | None:
    """See a policy whose rewards differed, and are all the worst of the run now."""
    worst = evidence.lowest_reward
    if not evidence.is_reward_constant or not evidence.did_rewards_differ or evidence.last_reward != worst:
        return None
    if worst is None or worst == evidence.highest_reward:
        return None
    return Seen(
        f"rewards were up to {evidence.highest_reward:g} before, and all of the last {evidence.graded.scored} samples "
        f"have {worst:g}; the learning rate is {evidence.facts.learning_rate:g}",
        {"scored": float(evidence.graded.scored)},
    )


def kl_exploding(evidence: Evidence) -> Seen | None:
    """See a policy that is far from the reference."""
    values = evidence.recent("kl/mean")
    bound = evidence.facts.thresholds.kl
    if len(values) < 2 or min(values[-2:]) < bound:
        return None
    return Seen(f"the KL from the reference is {values[-1]:.3g} nats per token", {"kl/mean": values[-1]})


def entropy_gone(evidence: Evidence) -> Seen | None:
    """See a policy that has nothing left to choose while its groups do not differ any more."""
    graded = evidence.graded
    if not evidence.is_enough_graded or graded.flat_groups < graded.groups / 2:
        return None
    if graded.identical_groups >= IDENTICAL_SHARE * graded.groups:
        return Seen(
            f"in {graded.identical_groups} of the last {graded.groups} groups all completions are the same text",
            {"groups": float(graded.groups), "identical_groups": float(graded.identical_groups)},
        )
    values = evidence.recent("entropy")
    if len(values) < MIN_STEPS or max(values) > evidence.facts.thresholds.entropy:
        return None
    return Seen(
        f"the policy's entropy is {values[-1]:.2g} nats per token, and {graded.flat_groups} of the last "
        f"{graded.groups} groups have a single reward",
        {"entropy": values[-1]},
    )


def engine_mismatch(evidence: Evidence) -> Seen | None:
    """See engine and trainer that give the same tokens different probabilities under the same weights."""
    gaps = [gap for step in evidence.steps if (gap := _gap(step.values, evidence)) is not None]
    gaps = gaps[-evidence.facts.thresholds.steps :]
    if not gaps or min(gaps) <= evidence.facts.thresholds.engine_gap:
        return None
    return Seen(
        f"tokens that the trained version itself sampled have log-probabilities that differ by {gaps[-1]:.2g} nats "
        "between engine and trainer",
        {"gap": gaps[-1]},
    )


def engine_gap_grows(evidence: Evidence) -> Seen | None:
    """See the distance between engine and trainer leave the band in which it was, however small it is still."""
    gaps = [gap for step in evidence.steps if (gap := _gap(step.values, evidence)) is not None]
    count = evidence.facts.thresholds.steps
    before, now = gaps[:-count], gaps[-count:]
    if len(before) < FEWEST_GAPS:
        return None
    usual = median(before)
    upper = usual + BAND * NORMAL_SPREAD * median(abs(each - usual) for each in before)
    if min(now) <= max(upper, 2 * usual, LEAST_GAP):
        return None
    return Seen(
        f"tokens that the trained version itself sampled have log-probabilities that differ by {now[-1]:.2g} nats "
        f"between engine and trainer, in {len(now)} steps in a row above the {upper:.2g} up to which they did before",
        {"gap": now[-1], "usual": usual, "upper": upper},
    )


def _is_broken(values: Mapping[str, float]) -> bool:
    made = values.get("updates/in_step", 0.0)
    return made > 0 and values.get("updates/skipped", 0.0) >= made


def _exploded(values: Sequence[float], growth: float, loud: float) -> tuple[float, float] | None:
    if len(values) < MIN_STEPS:
        return None
    for at in range(max(1, len(values) - MIN_STEPS), len(values)):
        before = median(values[:at])
        if values[at] > loud and values[at] > growth * before:
            return before, values[at]
    return None


def _gap(values: Mapping[str, float], evidence: Evidence) -> float | None:
    """Distance in nats on tokens of lag 0; None where the figures do not show it."""
    if values.get("lag/max", 1.0) > 0 or evidence.facts.updates_per_version > 1:
        return None
    return _distance(values, evidence)


def _distance(values: Mapping[str, float], evidence: Evidence) -> float | None:
    """Nats per token between the engine's log-probabilities and the trainer's; None where they do not compare."""
    if not evidence.facts.compares_log_probs:
        return None
    if "correction/log_ppl_abs_diff" in values:
        return abs(values["correction/log_ppl_abs_diff"])
    return abs(values["ratio/approx_kl"]) if "ratio/approx_kl" in values else None
