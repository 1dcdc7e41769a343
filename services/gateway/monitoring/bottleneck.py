"""What bounds the speed of an experiment that runs: a pure function of what was seen lately.

A pipeline of two stages with a queue between them is bound by the stage that never waits. So the trainer's own times
decide first (it measures them exactly, per step), then where the outstanding groups lie, then how long the rollouts
had nothing to sample and what was under way meanwhile. If both stages wait in turn, each for the other, the admission
budget keeps them apart. While no step ends, the looks alone decide: who had what the next step needs, most of the time.

Cores on which nothing computes, although something waits for a stage beside them, are named from spec and hosts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Final

from flotilla.services.gateway.monitoring.agents import AgentsSeen, slowed_by_agents
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger

COMPONENTS: Final = (
    "generation",
    "agents",
    "reward",
    "trainer",
    "admission",
    "publication",
    "redis",
    "evaluation",
    "data",
    "none",
)
SLOW_REDIS_SECONDS: Final = 0.1
"""A round trip that takes longer bounds everything: each hop makes several."""
AWAY_SHARE: Final = 0.2
WAITING_SHARE: Final = 0.15
"""A stage that waits for a smaller part of its time is as good as saturated."""
PUBLISHING_SHARE: Final = 0.2
HOLDING_SHARE: Final = 1 / 2
"""What holds everything up for a smaller part of the time is one cause among others."""
REDIS_LOOKS: Final = 6
"""Round trips are measured, not counted: few of them say enough."""
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
        agents: external agents that drove the episodes, if any.
    """

    ledger: Ledger | None
    redis_seconds: float
    is_publishing: bool
    is_evaluating: bool
    oldest_seconds: Mapping[HopName, float] = field(default_factory=dict)
    agents: AgentsSeen | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the trainer's time went in one step, in seconds."""

    total: float
    waited: float
    paced: float
    published: float
    saved: float = 0.0

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
            saved=values.get("time/checkpoint_seconds", 0.0),
        )


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What bounds the speed now.

    Attributes:
        component: one of ``COMPONENTS``.
        cause: what shows it, in one sentence.
        advice: which setting or service changes it.
        evidence: the figures; shares are of time and lie between 0 and 1.
    """

    component: str
    cause: str
    advice: str
    evidence: Mapping[str, float]


def find_bottleneck(
    looks: Sequence[Look],
    steps: Sequence[StepTimes],
    *,
    budget: int,
    groups_per_step: int,
    is_sampled: bool = True,
) -> Bottleneck:
    """Name what bounds the speed.

    Args:
        looks: of some time, at times that have nothing to do with those of the steps.
        steps: that ended in this time.
        budget: groups that may be outstanding or consumed since the last publication.
        groups_per_step: that a step trains.
        is_sampled: whether rollouts make the groups; else they are read.
    """
    found = _slowest_stage(looks, steps, budget, groups_per_step, is_sampled=is_sampled)
    agents = looks[-1].agents if looks else None
    about = None if agents is None or found.component != "generation" else slowed_by_agents(agents)
    if about is None:
        return found
    cause, advice = about
    return replace(found, component="agents", cause=cause, advice=advice)


def _slowest_stage(
    looks: Sequence[Look], steps: Sequence[StepTimes], budget: int, groups_per_step: int, *, is_sampled: bool
) -> Bottleneck:
    if len(looks) < MIN_LOOKS:
        return Bottleneck("none", "not enough was seen yet", "ask again in a few seconds", {"looks": len(looks)})
    evidence = _evidence(looks, steps, budget)
    if evidence["redis/away_share"] > AWAY_SHARE or evidence["redis/round_trip_seconds"] > SLOW_REDIS_SECONDS:
        return Bottleneck("redis", *_about_redis(evidence), evidence)
    if not steps:
        return Bottleneck(*_without_steps(looks, groups_per_step), evidence)
    if evidence["trainer/publish_share"] > PUBLISHING_SHARE:
        share = evidence["trainer/publish_share"]
        often = "asynchrony.trigger_parameter_sync_step" if is_sampled else "checkpoint.every_steps"
        return Bottleneck(
            "publication",
            f"the trainer spends {share:.0%} of its time on publications",
            f"raise {often}, or choose a faster asynchrony.publication",
            evidence,
        )
    if evidence["trainer/wait_share"] < WAITING_SHARE:
        return Bottleneck("trainer", *_about_the_trainer(evidence), evidence)
    if not is_sampled:
        return Bottleneck("data", *_about_the_data(evidence), evidence)
    return Bottleneck(*_while_the_trainer_waits(evidence), evidence)


def _evidence(looks: Sequence[Look], steps: Sequence[StepTimes], budget: int) -> dict[str, float]:
    ledgers = [look.ledger for look in looks if look.ledger is not None]
    total = sum(step.total for step in steps)
    evidence = {
        "looks": float(len(looks)),
        "steps": float(len(steps)),
        "redis/away_share": 1 - len(ledgers) / len(looks),
        "redis/round_trip_seconds": median(look.redis_seconds for look in looks[-REDIS_LOOKS:]),
        "publication/open_share": fmean(look.is_publishing for look in looks),
        "evaluation/held_share": fmean(look.is_evaluating for look in looks),
    }
    if total:
        evidence |= {
            "trainer/wait_share": sum(step.waited for step in steps) / total,
            "trainer/pace_share": sum(step.paced for step in steps) / total,
            "trainer/publish_share": sum(step.published for step in steps) / total,
            "trainer/checkpoint_share": sum(step.saved for step in steps) / total,
        }
    for hop in HopName:
        evidence[f"{hop.value}/oldest_seconds"] = max(look.oldest_seconds.get(hop, 0.0) for look in looks)
    agents = [look.agents for look in looks if look.agents is not None]
    if agents:
        evidence |= {
            "agents/open_episodes": fmean(each.num_open for each in agents),
            "agents/waiting_episodes": fmean(each.num_waiting for each in agents),
            "agents/silent_seconds": agents[-1].silent_seconds,
            "agents/engine_share": fmean(each.engine_share for each in agents),
        }
    if ledgers:
        evidence |= {
            "tasks/groups": fmean(_at(each, HopName.TASKS) for each in ledgers),
            "generated/groups": fmean(_at(each, HopName.GENERATED) for each in ledgers),
            "scored/groups": fmean(_at(each, HopName.SCORED) for each in ledgers),
            "rollout/idle_share": fmean(not _at(each, HopName.TASKS) for each in ledgers),
            "reward/busy_share": fmean(_at(each, HopName.GENERATED) > 0 for each in ledgers),
            "publication/holding_share": fmean(_waits_for_publication(look) for look in looks),
            "admission/full_share": fmean(
                each.outstanding + each.consumed_since_publication >= budget for each in ledgers
            ),
        }
    return evidence


def _at(ledger: Ledger, hop: HopName) -> int:
    """Count the groups that a hop has before it or in progress."""
    return int(getattr(ledger.waiting, hop.value) + getattr(ledger.claimed, hop.value))


def _waits_for_publication(look: Look) -> bool:
    """Whether a version was on its way and nothing else that the trainer waits for."""
    ledger = look.ledger
    return (
        look.is_publishing and ledger is not None and not (_at(ledger, HopName.TASKS) or _at(ledger, HopName.GENERATED))
    )


def _about_redis(evidence: Mapping[str, float]) -> tuple[str, str]:
    if evidence["redis/away_share"] > AWAY_SHARE:
        cause = f"the data plane did not answer in {evidence['redis/away_share']:.0%} of the looks"
    else:
        cause = f"a round trip to the data plane takes {1000 * evidence['redis/round_trip_seconds']:.0f} ms"
    return cause, "look at the Redis server's machine: memory, disk of the append-only file, network"


def _about_the_trainer(evidence: Mapping[str, float]) -> tuple[str, str]:
    waits = f"waits {evidence['trainer/wait_share']:.0%} of it"
    saves = evidence["trainer/checkpoint_share"]
    if saves > 1 / 2:
        return f"the trainer writes checkpoints for {saves:.0%} of its time and {waits}", "raise checkpoint.every_steps"
    return (
        f"the trainer computes nearly all the time and {waits}",
        "give it more cores (parallelism) or fewer tokens per step; more rollouts would not help",
    )


def _about_the_data(evidence: Mapping[str, float]) -> tuple[str, str]:
    return (
        f"the trainer waits {evidence['trainer/wait_share']:.0%} of its time for rows to be read and tokenised",
        "give the gateway's machine a free core, or make larger steps (optimisation.groups_per_mini_batch)",
    )


def _without_steps(looks: Sequence[Look], groups_per_step: int) -> tuple[str, str, str]:
    """Judge by the looks alone: no step has ended meanwhile."""
    holders = Counter(_holder(look, groups_per_step) for look in looks)
    component, count = holders.most_common(1)[0]
    if component == "none":
        return component, "no step ended and no group is on its way", "see the experiment's state and problem"
    doing = {
        "generation": "groups were being sampled",
        "reward": "groups waited for their grade",
        "trainer": "the trainer had its groups",
        "publication": "all waited for a version on its way",
        "evaluation": "all waited for an evaluation",
    }
    return (
        component,
        f"no step ended lately, and in {count} of {len(looks)} looks {doing[component]}",
        "nothing, if steps are known to take so long; else see the experiment's problem",
    )


def _holder(look: Look, groups_per_step: int) -> str:
    """Name the part that held what the next step needs."""
    if look.ledger is None:
        return "none"
    tasks, generated, scored = (_at(look.ledger, hop) for hop in (HopName.TASKS, HopName.GENERATED, HopName.SCORED))
    if scored >= groups_per_step:
        # With its groups ready, the trainer computes, or waits to publish.
        return "publication" if look.is_publishing else "trainer"
    if tasks or generated:
        return "reward" if generated > tasks else "generation"
    if look.is_publishing:
        return "publication"
    if look.is_evaluating:
        return "evaluation"
    return "trainer" if scored or look.ledger.consumed_since_publication else "none"


def _while_the_trainer_waits(evidence: Mapping[str, float]) -> tuple[str, str, str]:
    waits = f"the trainer waits {evidence['trainer/wait_share']:.0%} of its time"
    idle = evidence.get("rollout/idle_share", 0.0)
    tasks, generated = evidence.get("tasks/groups", 0.0), evidence.get("generated/groups", 0.0)
    if generated > tasks and evidence.get("reward/busy_share", 0.0) > HOLDING_SHARE:
        return (
            "reward",
            f"{waits} while {generated:.1f} groups wait for their grade and {tasks:.1f} for their tokens",
            "add reward services, raise the concurrency of the reward components, or make the grader faster",
        )
    if evidence["trainer/pace_share"] > evidence["trainer/wait_share"] / 2:
        return (
            "admission",
            f"{waits}, {evidence['trainer/pace_share']:.0%} for groups that the next version would find too old",
            "raise asynchrony.max_lag, or shorten the longest answers",
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
    if evidence["publication/holding_share"] > HOLDING_SHARE:
        return (
            "publication",
            f"{waits}; for {evidence['publication/holding_share']:.0%} of the time all wait for a version on its way",
            "choose a faster asynchrony.publication, raise asynchrony.trigger_parameter_sync_step, or raise "
            "asynchrony.staleness_threshold, so that sampling goes on meanwhile",
        )
    return (
        "admission",
        f"{waits} and the rollouts have no task {idle:.0%} of theirs: each waits for the other in turn",
        "raise asynchrony.staleness_threshold, so that sampling goes on while the trainer computes",
    )


TRAINER_SETTING, ROLLOUT_SETTING = "parallelism.threads", "rollout.engine.threads"


@dataclass(frozen=True, slots=True)
class Placed:
    """A service of the experiment and the machine that it runs on."""

    kind: ServiceKind
    host: str
    cores: int


def advice_on_cores(component: str, spec: ExperimentSpec, services: Sequence[Placed]) -> str | None:
    """Name a host with cores that the stage which bounds the speed leaves idle, and the setting that would use them.

    With ``threads: auto`` a stage takes what is there; so only numbers in the spec leave cores idle.

    Args:
        component: what bounds the speed, as ``bottleneck`` names it.
        spec: of the experiment.
        services: that work for it.
    """
    threads = _threads(spec)
    settings = {ServiceKind.TRAINER: TRAINER_SETTING, ServiceKind.ROLLOUT: ROLLOUT_SETTING}
    wanted = {
        "trainer": (ServiceKind.TRAINER,),
        "generation": (ServiceKind.ROLLOUT,),
        "admission": (ServiceKind.TRAINER, ServiceKind.ROLLOUT),
    }.get(component, ())
    for host, cores in {service.host: service.cores for service in services}.items():
        here = [service.kind for service in services if service.host == host]
        busy = [threads[kind] for kind in here if kind in threads]
        # Where the stages take turns, only one of them computes at a time.
        used = max(busy, default=0) if component == "admission" else sum(busy)
        short = [settings[kind] for kind in wanted if kind in threads and kind in here]
        if short and used < cores:
            return f"{cores - used} of {cores} cores of {host} compute nothing: set {' and '.join(short)} to auto"
    return None


def _threads(spec: ExperimentSpec) -> Mapping[ServiceKind, int]:
    """Return how many threads each stage takes, where the spec has a number and they compute on cores at all."""
    found = {}
    engine, parallelism = spec.rollout.engine, spec.parallelism
    if parallelism.threads != "auto" and not parallelism.device.startswith("cuda"):
        found[ServiceKind.TRAINER] = parallelism.threads * (parallelism.ranks // parallelism.nodes)
    if isinstance(engine, TorchEngineConfig) and engine.threads != "auto" and not engine.device.startswith("cuda"):
        found[ServiceKind.ROLLOUT] = engine.threads
    return found
