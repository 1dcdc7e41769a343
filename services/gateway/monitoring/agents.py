"""What agents from outside do, as far as speed and stalls are concerned: pure.

The fleet waits for agents as long as the spec lets them take, and the rollouts end what takes longer. So an episode
that is with an agent, or a reward that may still come, holds nothing up; tasks that no agent asks for do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from flotilla.shared.clock import rfc3339
from flotilla.shared.config.sections.reward import AgentRewardConfig
from flotilla.shared.config.spec import ExperimentSpec

ASK: Final = "POST /v1/experiments/ID/episodes asks for one (docs/agents.md)"
STARTED: Final = "rollouts start them: see `flotilla logs rollout`"
SILENT_SECONDS: Final = 10.0
"""An agent that waits for a task asks again sooner."""
BUSY_SHARE: Final = 1 / 2
"""With more of its slots in use an engine is slow itself, and not only waiting for agents."""


@dataclass
class LastAsked:
    """When an agent last asked for an episode, in seconds since the epoch; None if none did since the gateway began."""

    at: float | None = None


@dataclass(frozen=True, slots=True)
class AgentsSeen:
    """The agents of one experiment at one instant, as its rollouts last said.

    Attributes:
        num_open: episodes that are with an agent.
        num_waiting: episodes of claimed tasks that wait for one.
        asked_at: when an agent last asked for an episode, or since when it is known that none did; in seconds since
            the epoch.
        silent_seconds: how long ago that was.
        engine_share: of the engines' slots, how many are in use.
        reward_seconds: how long after its end an episode's reward is waited for; 0 if agents give none.
        are_started: whether rollouts start them.
    """

    num_open: int
    num_waiting: int
    asked_at: float
    silent_seconds: float
    engine_share: float = 0.0
    reward_seconds: float = 0.0
    are_started: bool = False

    @property
    def hint(self) -> str:
        """What to do where there are none."""
        return STARTED if self.are_started else ASK

    @property
    def are_missing(self) -> bool:
        """Whether no episode is with an agent, and none was asked for lately."""
        return not self.num_open and self.silent_seconds >= SILENT_SECONDS


def see_agents(
    spec: ExperimentSpec, loads: Iterable[Mapping[str, float]], now: float, asked_at: float
) -> AgentsSeen | None:
    """Sum up what the rollouts of an experiment say; None if its episodes are not for agents.

    Args:
        spec: of the experiment.
        loads: gauges of each rollout.
        now: in seconds since the epoch.
        asked_at: see ``AgentsSeen``.
    """
    if spec.rollout.agents is None:
        return None
    gauges = list(loads)
    slots = sum(each.get("slots", 0.0) for each in gauges)
    windows = [each.window_seconds for each in spec.reward.components if isinstance(each, AgentRewardConfig)]
    return AgentsSeen(
        num_open=int(sum(each.get("episodes_open", 0.0) for each in gauges)),
        num_waiting=int(sum(each.get("episodes_waiting", 0.0) for each in gauges)),
        asked_at=asked_at,
        silent_seconds=max(0.0, now - asked_at),
        engine_share=sum(each.get("running", 0.0) for each in gauges) / slots if slots else 0.0,
        reward_seconds=max(windows, default=0.0),
        are_started=spec.rollout.starts_agents,
    )


def missing_agents(seen: AgentsSeen, num_tasks: int) -> tuple[str, str]:
    """Report that no agent requests the episodes of claimed tasks."""
    since = rfc3339(seen.asked_at)
    return "agents", f"{num_tasks} tasks are claimed and no agent has asked for an episode since {since}; {seen.hint}"


def slowed_by_agents(seen: AgentsSeen) -> tuple[str, str] | None:
    """Describe how the rollouts spent their time and what would change it; None if their engines were busy."""
    if seen.engine_share > BUSY_SHARE:
        return None
    if seen.are_missing:
        return (
            f"tasks are claimed and no agent has asked for an episode for {seen.silent_seconds:.0f} s",
            seen.hint if seen.are_started else f"start agents: {seen.hint}",
        )
    if seen.num_waiting:
        return (
            f"{seen.num_open} episodes are with agents, and {seen.num_waiting} wait for one",
            "raise rollout.agents.environment.parallel" if seen.are_started else "run more agents at a time",
        )
    return (
        f"all {seen.num_open} episodes of the claimed tasks are with agents",
        "make the agents faster, or hand out more tasks at a time (asynchrony.staleness_threshold); "
        "rollout.agents.lease_seconds says when a silent one is given up",
    )
