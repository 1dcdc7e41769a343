"""An experiment that waits for agents from outside: who is named, and who is not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.episodes.rollouts import EpisodeGone, Rollouts
from flotilla.services.gateway.monitoring.agents import AgentsSeen, missing_agents, see_agents, slowed_by_agents
from flotilla.services.gateway.monitoring.bottleneck import Look, StepTimes, find_bottleneck
from flotilla.services.gateway.monitoring.diagnosis import diagnose
from flotilla.services.gateway.monitoring.watchdog import Watchdog
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.episode import OpenEpisode
from flotilla.shared.schemas.experiment import Problem
from flotilla.shared.schemas.service import Failure, ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import HopCounts, Ledger
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, add_service, say
from tests.unit.gateway.test_diagnosis import WELL
from tests.unit.gateway.test_watchdog import a_watchdog

SPEC = a_spec(
    rollout={"group_size": 2, "sampling": {"max_new_tokens": 8}, "agents": {}},
    reward={"components": [{"kind": "agent", "window_seconds": 600}]},
)
MISSING = AgentsSeen(num_open=0, num_waiting=10, asked_at=1000.0, silent_seconds=42.0)
AT_WORK = replace(MISSING, num_open=3, num_waiting=7, silent_seconds=300.0)
FIVE_TASKS = Ledger(claimed=HopCounts(tasks=5), outstanding=5)


def test_agents_that_nobody_started_are_named_and_not_the_rollouts() -> None:
    found = diagnose(replace(WELL, ledger=FIVE_TASKS, agents=MISSING))

    assert found is not None
    component, cause = found
    assert component == "agents"
    assert cause.startswith("5 tasks are claimed and no agent has asked for an episode since 1970-01-01T00:16:40")
    assert "POST /v1/experiments/ID/episodes" in cause


@pytest.mark.parametrize("agents", [AT_WORK, replace(MISSING, silent_seconds=3.0)])
def test_agents_within_their_limits_hold_nothing_up(agents: AgentsSeen) -> None:
    assert diagnose(replace(WELL, ledger=FIVE_TASKS, agents=agents)) is None


def test_an_evaluation_that_waits_for_agents_is_theirs() -> None:
    evaluating = replace(WELL, ledger=Ledger(waiting=HopCounts(tasks=5)), evaluating_version=2, agents=MISSING)

    for is_trained in (False, True):
        found = diagnose(replace(evaluating, is_trained=is_trained))
        assert found is not None and found[0] == "agents"
        assert diagnose(replace(evaluating, is_trained=is_trained, agents=AT_WORK)) is None


def test_a_reward_that_may_still_come_holds_nothing_up() -> None:
    graded = replace(WELL, ledger=Ledger(claimed=HopCounts(generated=2)), agents=replace(MISSING, reward_seconds=600.0))

    assert diagnose(replace(graded, oldest_generated_seconds=599.0)) is None
    late = diagnose(replace(graded, oldest_generated_seconds=601.0))
    assert late is not None and late[0] == "reward"


def test_tasks_that_no_rollout_claims_are_the_rollouts_matter() -> None:
    found = diagnose(replace(WELL, ledger=Ledger(waiting=HopCounts(tasks=5)), agents=MISSING))

    assert found is not None and found[0] == "rollout"


@pytest.mark.parametrize(
    ("agents", "component", "words", "advice"),
    [
        (MISSING, "agents", "no agent has asked for an episode for 42 s", "start agents"),
        (AT_WORK, "agents", "3 episodes are with agents, and 7 wait for one", "more agents"),
        (replace(AT_WORK, num_waiting=0), "agents", "all 3 episodes of the claimed tasks are with agents", "faster"),
        (replace(AT_WORK, engine_share=0.9), "generation", "", "add rollouts"),
        (None, "generation", "", "add rollouts"),
    ],
)
def test_slow_agents_are_told_from_slow_engines(
    agents: AgentsSeen | None, component: str, words: str, advice: str
) -> None:
    look = Look(FIVE_TASKS, 0.002, is_publishing=False, is_evaluating=False, agents=agents)
    step = StepTimes(total=1.0, waited=0.8, paced=0.0, published=0.0)

    found = find_bottleneck([look] * 9, [step] * 5, budget=8, groups_per_step=4)
    unstepped = find_bottleneck([look] * 9, [], budget=8, groups_per_step=8)

    assert (found.component, unstepped.component) == (component, component)
    assert words in found.cause and words in unstepped.cause
    assert advice in found.advice
    assert found.evidence.get("agents/open_episodes") == (None if agents is None else agents.num_open)


def test_what_rollouts_say_is_summed_up() -> None:
    loads = [
        {"episodes_open": 2.0, "episodes_waiting": 1.0, "running": 1.0, "slots": 8.0},
        {"episodes_open": 1.0, "running": 3.0, "slots": 8.0},
    ]

    assert see_agents(SPEC, loads, now=60.0, asked_at=50.0) == AgentsSeen(
        num_open=3, num_waiting=1, asked_at=50.0, silent_seconds=10.0, engine_share=0.25, reward_seconds=600.0
    )
    assert see_agents(a_spec(), loads, now=60.0, asked_at=50.0) is None


class Fleet:
    """An experiment for agents whose one task is claimed, and the watchdog on it."""

    def __init__(self, gateway: GatewayState, clock: ManualClock, rollout: str, watchdog: Watchdog) -> None:
        self._gateway = gateway
        self._clock = clock
        self._rollout = rollout
        self._watchdog = watchdog

    async def rollout_says(self, num_open: int, failure: Failure | None = None) -> None:
        load = {"episodes_open": float(num_open), "episodes_waiting": 2.0 - num_open}
        at = {"experiment_id": "tiny-1", "state": WorkState.RUNNING, "policy_version": 0}
        await say(self._gateway, self._rollout, ObservedState(**at, load=load, failure=failure))

    async def problem_after(self, seconds: float) -> Problem | None:
        self._clock.advance(seconds)
        await self._watchdog.look()
        return self._gateway.commands.view(self._gateway.repository.get("tiny-1")).problem


async def a_fleet(gateway: GatewayState, clock: ManualClock) -> Fleet:
    experiment = await add_experiment(gateway, spec=SPEC.model_dump(mode="json"))
    for kind in (ServiceKind.TRAINER, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value, experiment.id)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "rollout", experiment.id)
    dataset = Dataset([{"prompt": "p", "label": "1"}], experiment.spec.data, 0)
    await experiment.train.admission.issue(dataset.task(0, group_size=2), limit=9)
    await experiment.train.hop(HopName.TASKS, "rollout").claim(1, wait_seconds=0)
    fleet = Fleet(gateway, clock, rollout, a_watchdog(gateway, clock))
    await fleet.problem_after(0.0)
    return fleet


async def test_the_watchdog_names_missing_agents_and_forgets_them_when_one_has_an_episode() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    fleet = await a_fleet(gateway, clock)
    await fleet.rollout_says(num_open=0)

    named = await fleet.problem_after(31.0)
    assert named is not None and named.component == "agents"
    assert await fleet.problem_after(20.0) == named, "time alone does not name it again"

    await fleet.rollout_says(num_open=1)
    assert await fleet.problem_after(1.0) is None
    assert await fleet.problem_after(250.0) is None


async def test_an_agent_that_rollouts_start_is_named_as_soon_as_it_dies_and_forgotten_when_it_plays() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    fleet = await a_fleet(gateway, clock)
    cause = "the agent of rollout.agents.environment (harbor) ended with code 2"

    await fleet.rollout_says(num_open=1, failure=Failure(component="agents", cause=cause, fatal=False))
    named = await fleet.problem_after(1.0)
    assert named is not None and (named.component, named.cause) == ("agents", cause)
    await fleet.rollout_says(num_open=1)
    assert await fleet.problem_after(1.0) is None

    await fleet.rollout_says(num_open=1, failure=Failure(component="agents", cause=cause))
    ended = gateway.repository.get("tiny-1")
    assert not ended.is_active
    assert ended.record.problem is not None
    assert (ended.record.problem["component"], ended.record.problem["cause"]) == ("agents", cause)


def test_agents_that_rollouts_start_are_not_asked_for() -> None:
    seen = replace(MISSING, are_started=True)

    _, cause = missing_agents(seen, 5)
    told = slowed_by_agents(seen)
    waiting = slowed_by_agents(replace(AT_WORK, are_started=True))

    assert told is not None and waiting is not None
    assert "POST" not in cause and "flotilla logs rollout" in cause
    assert "POST" not in told[1] and "flotilla logs rollout" in told[1]
    assert waiting[1] == "raise rollout.agents.environment.parallel"


async def test_an_agent_that_asks_counts_although_it_gets_no_task() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    fleet = await a_fleet(gateway, clock)
    await fleet.rollout_says(num_open=0)
    who = Principal(Scope.AGENT, "an agent", experiment_id="tiny-1")

    clock.advance(29.0)
    # The rollout of this test listens nowhere.
    with pytest.raises(Unavailable):
        await gateway.episodes.open("tiny-1", OpenEpisode(), who, "http://gateway")

    assert await fleet.problem_after(3.0) is None
    named = await fleet.problem_after(30.0)
    assert named is not None and named.component == "agents"


@pytest.mark.parametrize("kind", [ServiceKind.TRAINER, ServiceKind.REWARD, ServiceKind.SANDBOX])
async def test_what_rollouts_let_in_is_shown_to_no_service_of_another_kind(kind: ServiceKind) -> None:
    services = {"other-1": SimpleNamespace(kind=kind), "rollout-1": SimpleNamespace(kind=ServiceKind.ROLLOUT)}
    rollouts = Rollouts(cast(Any, SimpleNamespace(find=services.get)), lambda _kind: "secret")
    try:
        assert cast(Any, rollouts.find("rollout-1", "e.rollout-1.0")) is services["rollout-1"]
        with pytest.raises(EpisodeGone):
            rollouts.find("other-1", "e.other-1.0")
    finally:
        await rollouts.aclose()
