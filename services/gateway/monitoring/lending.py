"""Whether it pays to lend the trainer's devices while it waits: by what its own steps measured, without and with it.

A step that waits for groups could be shorter by them; getting the devices back makes each step longer. Neither is
predicted: devices are lent where the wait is long and longer than that takes, and then steps show whether it was right.
Where the lent rollouts sample nothing, as where each shift ends before an engine has its weights, steps cannot show it:
they differ by chance. So what those have sampled is looked at, too.
The judgement begins again with each gateway process, which lends nothing until it has seen some steps.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from flotilla.shared.config.sections.resources import LendingConfig

MOST_STEPS: Final = 2048
REST: Final = 4
"""After lending that did not pay, so many times ``over_steps`` pass until it is tried again."""
HEARD_SECONDS: Final = 10.0
"""Of steps, after which at the latest a rollout has told what it sampled before."""
LENT_SECONDS, BACK_SECONDS = "time/lent_seconds", "time/device_seconds"


@dataclass(frozen=True, slots=True)
class LentStep:
    """Where the time of a step went, in seconds.

    Attributes:
        total: all of it, ``back`` included.
        waited: for groups, with or without its devices.
        lent: of it, without them.
        back: until it had them again.
        sampled: tokens that the lent rollouts had sampled by its end, in all; None where they do not say.
    """

    total: float
    waited: float
    lent: float = 0.0
    back: float = 0.0
    sampled: float | None = None

    @classmethod
    def from_metrics(cls, values: Mapping[str, float], sampled: float | None = None) -> "LentStep | None":
        """Read them from a step's metrics; None if these are not there."""
        total, back = values.get("time/step_seconds", 0.0), values.get(BACK_SECONDS, 0.0)
        if total <= 0:
            return None
        return cls(total + back, values.get("time/wait_seconds", 0.0), values.get(LENT_SECONDS, 0.0), back, sampled)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the steps that were seen.

    Attributes:
        lends: whether the devices are lent when the trainer waits.
        reason: why, in words.
        usual_seconds: how long a step took before they were.
        back_seconds: how long the trainer waited for them in each step, when they were lent last.
        is_resting: lending did not pay, and is not tried again at once.
    """

    lends: bool = False
    reason: str = "no step has ended yet"
    usual_seconds: float = 0.0
    back_seconds: float = 0.0
    is_resting: bool = False


def judge(steps: Sequence[LentStep], before: Verdict, config: LendingConfig) -> Verdict:
    """Judge again, after a step.

    Args:
        steps: since the devices began, or ceased, to be lent, in order.
        before: the last verdict.
        config: from when on it is tried, and over how many steps.
    """
    return _while_lent(steps, before, config) if before.lends else _while_kept(steps, before, config)


def _while_kept(steps: Sequence[LentStep], before: Verdict, config: LendingConfig) -> Verdict:
    # An engine that has to be loaded gets the devices, too.
    steps = [each for each in steps if not each.lent]
    if before.is_resting and len(steps) < REST * config.over_steps:
        return before
    if len(steps) < config.over_steps:
        return replace(before, reason=f"{len(steps)} of {config.over_steps} steps were seen")
    recent = steps[-config.over_steps :]
    waited, took = median(each.waited for each in recent), median(each.total for each in recent)
    share = sum(each.waited for each in recent) / sum(each.total for each in recent)
    kept = replace(before, is_resting=False)
    if share < config.when_waiting:
        why = f"the trainer waits {share:.0%} of its time, less than the {config.when_waiting:.0%} of when_waiting"
        return replace(kept, reason=why)
    # It may have taken long once, beside other work: after each further rest half as much is believed.
    believed = before.back_seconds / 2 ** (max(1, len(steps) // (REST * config.over_steps)) - 1)
    if waited <= believed:
        why = f"a step waits {waited:.2f} s, and to get the devices back took {before.back_seconds:.2f} s"
        return replace(kept, reason=why)
    why = f"the trainer waited {share:.0%} of its time, {waited:.2f} s in each step"
    return replace(kept, lends=True, reason=why, usual_seconds=took)


def _while_lent(steps: Sequence[LentStep], before: Verdict, config: LendingConfig) -> Verdict:
    lent = [each for each in steps if each.lent > 0][-config.over_steps :]
    if len(lent) < config.over_steps:
        return before
    took, back = median(each.total for each in lent), median(each.back for each in lent)
    usual, away = before.usual_seconds, median(each.lent for each in lent)
    over = replace(before, lends=False, back_seconds=back, is_resting=True)
    if count := _steps_in_vain(steps, config.over_steps):
        why = f"they were lent {away:.2f} s in each step, and nothing was sampled there in the last {count} steps"
        return replace(over, reason=why)
    if away <= back:
        return replace(
            over, reason=f"they were lent {away:.2f} s in each step, and getting them back took {back:.2f} s"
        )
    if took >= usual:
        return replace(over, reason=f"it did not pay: a step took {took:.2f} s with it, and {usual:.2f} s without")
    why = f"a step takes {took:.2f} s, {back:.2f} s of it to get them back, and {usual:.2f} s without lending"
    return replace(before, reason=why, back_seconds=back)


def _steps_in_vain(steps: Sequence[LentStep], over_steps: int) -> int:
    """Count the last steps in which the lent rollouts sampled nothing; 0 where they did, or too few were seen."""
    heard, num_lent = 0.0, 0
    for count, (step, before) in enumerate(pairwise(reversed(steps)), start=1):
        heard, num_lent = heard + step.total, num_lent + (step.lent > 0)
        if heard >= HEARD_SECONDS and num_lent >= over_steps:
            return count if before.sampled is not None and before.sampled == steps[-1].sampled else 0
    return 0


class Lending:
    """What the steps of one experiment say; see ``judge``."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self._steps: deque[LentStep] = deque(maxlen=MOST_STEPS)

    def add_step(self, values: Mapping[str, float], config: LendingConfig, sampled: float | None = None) -> None:
        """Record a step's metrics, if there are times among them, and judge by them.

        Args:
            values: the metrics.
            config: from when on lending is tried, and over how many steps.
            sampled: tokens that the lent rollouts have sampled so far; None where they do not say.
        """
        found = LentStep.from_metrics(values, sampled)
        if found is None:
            return
        self._steps.append(found)
        before, self.verdict = self.verdict, judge(list(self._steps), self.verdict, config)
        if before.lends is not self.verdict.lends:
            self._steps.clear()
