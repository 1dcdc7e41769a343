"""Why an experiment makes no progress: a pure function of what is observed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flotilla.services.gateway.monitoring.agents import AgentsSeen, missing_agents
from flotilla.services.gateway.registry.services import host_of, told
from flotilla.services.gateway.store.records import ServiceRecord
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.publication import PublicationPhase
from flotilla.shared.schemas.service import ServiceKind, WorkState
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.redis.connection import SILENT_GAUGE

JUST_WAIT_START = "loading torch and the model may take a minute, just wait"
JUST_WAIT_ANSWERS = "long answers take as long, just wait, or see `flotilla logs rollout`"
"""What a healthy fleet may be seen doing, too, is said with it."""
SILENT_SECONDS = 5.0
"""A service that has had no answer from Redis for so long is cut off: a broken connection is made again sooner."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One service, as far as a diagnosis needs it.

    Attributes:
        cause: why it cannot work for now, as it reports.
    """

    service_id: str
    kind: ServiceKind
    state: WorkState
    policy_version: int | None
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """All inputs of a diagnosis.

    Attributes:
        ledger: the train lane; None while the data plane does not answer.
        budget, groups_per_step: the admission budget and R.
        publication: phase of the open publication, if any.
        evaluating_version: version under evaluation, if any.
        trains: whether the experiment needs a trainer.
        samples_answers: whether the experiment needs rewards, and rollouts unless answers are written.
        needs_rollouts: whether it needs rollouts.
        agents: external agents that drive its episodes, if any.
        oldest_generated_seconds: how long the oldest group has waited for its rewards.
    """

    state: ExperimentState
    services: Sequence[Observation]
    ledger: Ledger | None
    budget: int
    groups_per_step: int
    policy_version: int
    publication: PublicationPhase | None = None
    evaluating_version: int | None = None
    trains: bool = True
    is_trained: bool = False
    samples_answers: bool = True
    needs_rollouts: bool = True
    agents: AgentsSeen | None = None
    oldest_generated_seconds: float = 0.0

    def of(self, kind: ServiceKind) -> list[Observation]:
        """List the live services of a kind."""
        return [service for service in self.services if service.kind is kind]


def progress_of(step: int, policy_version: int, ledger: Ledger | None, evaluation: Ledger | None) -> tuple[int, ...]:
    """Sum up what counts as progress: any change of it does."""
    counters = [step, policy_version]
    for lane in (ledger, evaluation):
        if lane is not None:
            resolved = [sum(reasons.values()) for reasons in (lane.filtered, lane.dropped, lane.failed)]
            counters += [lane.issued, lane.planned, lane.trained, lane.tokens.generated, lane.tokens.scored, *resolved]
    return tuple(counters)


def diagnose(situation: Situation) -> tuple[str, str] | None:
    """Name the component that holds everything up, and why; call it when there was no progress for long.

    Returns:
        Component and cause; None while agents from outside take no longer than the spec lets them.
    """
    if (lacking := _lacking_service(situation)) is not None:
        return lacking
    if situation.state is ExperimentState.STARTING:
        return _not_started(situation)
    if situation.ledger is None:
        return "redis", "the data plane does not answer"
    if situation.publication is not None:
        return "publication", f"a publication is {situation.publication}"
    agents = situation.agents
    if situation.evaluating_version is not None and agents is not None and (agents.num_open or agents.num_waiting):
        return missing_agents(agents, agents.num_waiting) if agents.are_missing else None
    if situation.is_trained and situation.evaluating_version is not None:
        return "evaluation", f"the final evaluation of version {situation.evaluating_version} makes no progress"
    return _stuck_work(situation, situation.ledger)


def _lacking_service(situation: Situation) -> tuple[str, str] | None:
    """Find a kind of service that is needed and has no live one, or none that works."""
    is_needed = {
        ServiceKind.TRAINER: situation.trains,
        ServiceKind.ROLLOUT: situation.samples_answers and situation.needs_rollouts,
        ServiceKind.REWARD: situation.samples_answers,
    }
    needed = [kind for kind in is_needed if is_needed[kind]]
    for kind in needed:
        if not situation.of(kind):
            return kind.value, f"no live {kind} service"
    for kind in needed:
        unable = next((service for service in situation.of(kind) if service.cause is not None), None)
        if unable is not None and all(service.state is not WorkState.RUNNING for service in situation.of(kind)):
            return kind.value, f"{unable.service_id} is {unable.state}: {unable.cause}"
    return None


def _not_started(situation: Situation) -> tuple[str, str]:
    for service in situation.services:
        if service.state is not WorkState.RUNNING:
            return service.kind.value, f"{service.service_id} is {service.state} and not yet running; {JUST_WAIT_START}"
    starting = next((s for s in situation.of(ServiceKind.ROLLOUT) if (s.policy_version or 0) < 0), None)
    if starting is not None:
        return "rollout", f"{starting.service_id} has not loaded its engine; {JUST_WAIT_START}"
    return "gateway", "every service runs, but the experiment does not"


def _why_unclaimed(situation: Situation) -> str:
    behind = [s for s in situation.of(ServiceKind.ROLLOUT) if (s.policy_version or 0) < situation.policy_version]
    if not behind:
        return "and none is claimed"
    version = behind[0].policy_version
    # None before it has an engine, negative before the engine has weights.
    serves = "has not loaded any version yet" if version is None or version < 0 else f"serves version {version}"
    return f"for version {situation.policy_version}; {behind[0].service_id} {serves}"


def _stuck_work(situation: Situation, ledger: Ledger) -> tuple[str, str] | None:
    ready = ledger.waiting.scored + ledger.claimed.scored
    if ready >= situation.groups_per_step:
        return "trainer", f"{ready} scored groups are ready, a step needs {situation.groups_per_step}, none is trained"
    agents = situation.agents
    if ledger.claimed.generated:
        if agents is not None and situation.oldest_generated_seconds < agents.reward_seconds:
            return None
        return "reward", f"{ledger.claimed.generated} generated groups are claimed and none is scored"
    if ledger.waiting.generated:
        return "reward", f"{ledger.waiting.generated} generated groups wait and none is claimed"
    if ledger.claimed.tasks and agents is not None:
        return missing_agents(agents, ledger.claimed.tasks) if agents.are_missing else None
    if ledger.claimed.tasks:
        return "rollout", f"{ledger.claimed.tasks} tasks are claimed and none is finished; {JUST_WAIT_ANSWERS}"
    if ledger.waiting.tasks:
        return "rollout", f"{ledger.waiting.tasks} tasks wait {_why_unclaimed(situation)}"
    used = ledger.outstanding + ledger.consumed_since_publication
    if used >= situation.budget:
        consumed = ledger.consumed_since_publication
        return (
            "trainer",
            f"the budget of {situation.budget} groups is used ({consumed} consumed) and nothing is published",
        )
    if situation.is_trained:
        return "gateway", "training is over and the experiment does not end"
    return "gateway", "tasks could be issued and are not"


def without_redis(services: Iterable[tuple[ServiceRecord, Mapping[str, float]]]) -> tuple[str, str] | None:
    """Name a host that reaches the gateway and not the data plane, as component and cause; None if there is none.

    Args:
        services: each with the load that it reports.
    """
    for record, load in services:
        seconds = load.get(SILENT_GAUGE, 0.0)
        if seconds >= SILENT_SECONDS:
            return "network", f"{host_of(record)} reaches the gateway, not Redis, for {told(seconds)} s"
    return None
