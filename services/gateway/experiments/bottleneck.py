"""What bounds the speed of an experiment that runs: a pure function of what was seen over the last minute.

A pipeline of two stages with a queue between them is bound by the stage that never waits. So the trainer's own times
decide first (it measures them exactly, per step), then how long the rollouts had nothing to sample, then where the
outstanding groups lie. If both stages wait in turn, each for the other, the admission budget keeps them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from shared.streams.keys import HopName
from shared.streams.ledger import Ledger

SLOW_REDIS_SECONDS: Final = 0.1
"""A round trip that takes longer bounds everything: each hop makes several."""
AWAY_SHARE: Final = 0.2
WAITING_SHARE: Final = 0.15
"""A stage that waits for a smaller part of its time is as good as saturated."""
PUBLISHING_SHARE: Final = 0.2
MIN_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one instant.

    Attributes:
        ledger: the train lane; None if the data plane did not answer.
        redis_seconds: round trip of reading it.
        is_publishing: whether a publication was open.
        is_evaluating: whether rollouts were held at a version that is evaluated.
        oldest_seconds: how long ago the oldest entry of a hop came there; without hops that are empty.
    """

    ledger: Ledger | None
    redis_seconds: float
    is_publishing: bool
    is_evaluating: bool
    oldest_seconds: Mapping[HopName, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the trainer's time went in one step, in seconds."""

    total: float
    waited: float
    paced: float
    published: float

    @classmethod
    def from_metrics(cls, values: Mapping[str, float]) -> "StepTimes | None":
        """Read them from a step's metrics; None if these are not there."""
        total = values.get("time/step_seconds", 0.0)
        if total <= 0:
            return None
        return cls(
            total=total,
            waited=values.get("time/wait_seconds", 0.0),
            paced=values.get("time/pace_seconds", 0.0),
            published=values.get("time/publish_seconds", 0.0),
        )


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What bounds the speed now.

    Attributes:
        component: generation, reward, trainer, admission, publication, redis, evaluation; or none.
        cause: what shows it, in one sentence.
        advice: which setting or service changes it.
        evidence: the figures; shares are of time and lie between 0 and 1.
    """

    component: str
    cause: str
    advice: str
    evidence: Mapping[str, float]


def find_bottleneck(looks: Sequence[Look], steps: Sequence[StepTimes], *, budget: int) -> Bottleneck:
    """Name what bounds the speed.

    Args:
        looks: of the last minute, evenly spaced.
        steps: that ended in this time.
        budget: groups that may be outstanding or consumed since the last publication.
    """
    if len(looks) < MIN_LOOKS:
        return Bottleneck("none", "not enough was seen yet", "ask again in a few seconds", {"looks": len(looks)})
    evidence = _evidence(looks, steps, budget)
    if evidence["redis/away_share"] > AWAY_SHARE or evidence["redis/round_trip_seconds"] > SLOW_REDIS_SECONDS:
        return Bottleneck("redis", *_about_redis(evidence), evidence)
    if not steps:
        return Bottleneck(*_without_steps(evidence), evidence)
    if evidence["trainer/publish_share"] > PUBLISHING_SHARE:
        share = evidence["trainer/publish_share"]
        return Bottleneck(
            "publication",
            f"the trainer spends {share:.0%} of its time on publications",
            "raise asynchrony.trigger_parameter_sync_step, or choose a faster asynchrony.publication",
            evidence,
        )
    if evidence["trainer/wait_share"] < WAITING_SHARE:
        return Bottleneck(
            "trainer",
            f"the trainer computes nearly all the time and waits {evidence['trainer/wait_share']:.0%} of it",
            "give it more cores (parallelism) or fewer tokens per step; more rollouts would not help",
            evidence,
        )
    return Bottleneck(*_while_the_trainer_waits(evidence), evidence)


def _evidence(looks: Sequence[Look], steps: Sequence[StepTimes], budget: int) -> dict[str, float]:
    ledgers = [look.ledger for look in looks if look.ledger is not None]
    total = sum(step.total for step in steps)
    evidence = {
        "looks": float(len(looks)),
        "steps": float(len(steps)),
        "redis/away_share": 1 - len(ledgers) / len(looks),
        "redis/round_trip_seconds": median(look.redis_seconds for look in looks),
        "publication/open_share": fmean(look.is_publishing for look in looks),
        "evaluation/held_share": fmean(look.is_evaluating for look in looks),
    }
    if total:
        evidence |= {
            "trainer/wait_share": sum(step.waited for step in steps) / total,
            "trainer/pace_share": sum(step.paced for step in steps) / total,
            "trainer/publish_share": sum(step.published for step in steps) / total,
        }
    for hop in HopName:
        evidence[f"{hop.value}/oldest_seconds"] = max(look.oldest_seconds.get(hop, 0.0) for look in looks)
    if ledgers:
        evidence |= {
            "tasks/groups": fmean(each.waiting.tasks + each.claimed.tasks for each in ledgers),
            "generated/groups": fmean(each.waiting.generated + each.claimed.generated for each in ledgers),
            "scored/groups": fmean(each.waiting.scored + each.claimed.scored for each in ledgers),
            "rollout/idle_share": fmean(not each.waiting.tasks and not each.claimed.tasks for each in ledgers),
            "admission/full_share": fmean(
                each.outstanding + each.consumed_since_publication >= budget for each in ledgers
            ),
        }
    return evidence


def _about_redis(evidence: Mapping[str, float]) -> tuple[str, str]:
    if evidence["redis/away_share"] > AWAY_SHARE:
        cause = f"the data plane did not answer in {evidence['redis/away_share']:.0%} of the looks"
    else:
        cause = f"a round trip to the data plane takes {1000 * evidence['redis/round_trip_seconds']:.0f} ms"
    return cause, "look at the Redis server's machine: memory, disk of the append-only file, network"


def _without_steps(evidence: Mapping[str, float]) -> tuple[str, str, str]:
    """Judge by the queues alone: no step has ended in the window."""
    queues = {name: evidence.get(f"{name}/groups", 0.0) for name in ("tasks", "generated", "scored")}
    fullest = max(queues, key=lambda name: queues[name])
    if not queues[fullest]:
        return "none", "no step ended and no group is on its way", "see the experiment's state and problem"
    component = {"tasks": "generation", "generated": "reward", "scored": "trainer"}[fullest]
    return (
        component,
        f"no step ended in the window; most groups ({queues[fullest]:.0f}) are at {fullest}",
        "nothing, if steps take longer than the window; else see the experiment's problem",
    )


def _while_the_trainer_waits(evidence: Mapping[str, float]) -> tuple[str, str, str]:
    waits = f"the trainer waits {evidence['trainer/wait_share']:.0%} of its time"
    idle = evidence.get("rollout/idle_share", 0.0)
    tasks, generated = evidence.get("tasks/groups", 0.0), evidence.get("generated/groups", 0.0)
    if generated > tasks:
        return (
            "reward",
            f"{waits} while {generated:.0f} groups wait for their grade and {tasks:.0f} for their tokens",
            "add reward services, raise the concurrency of the reward components, or make the grader faster",
        )
    if idle < WAITING_SHARE:
        return (
            "generation",
            f"{waits} and the rollouts are busy {1 - idle:.0%} of theirs",
            "add rollouts, or raise rollout.engine.slots or threads",
        )
    if evidence["evaluation/held_share"] > 1 / 2:
        return (
            "evaluation",
            f"{waits}, the rollouts have no task {idle:.0%} of theirs and evaluations hold the version",
            "evaluate less often or fewer rows, or add rollouts",
        )
    return (
        "admission",
        f"{waits} and the rollouts have no task {idle:.0%} of theirs: each waits for the other in turn",
        "raise asynchrony.staleness_threshold, so that sampling goes on while the trainer computes",
    )
