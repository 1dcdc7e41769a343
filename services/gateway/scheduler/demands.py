"""What experiments ask of a fleet, and what services there are for them, as the placement sees both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flotilla.services.gateway.records.repository import Experiment
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.config.rules.devices import DeviceFacts, DeviceNeed, decide, rollout_need, trainer_need
from flotilla.shared.config.rules.publication import decide_publication, publishes_adapters
from flotilla.shared.config.sections.engine import ServerEngineConfig
from flotilla.shared.config.sections.resources import QuotaConfig, RolloutQuotaConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.engine import with_adapters
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import LIVE_CHANGES
from flotilla.shared.schemas.service import ServiceKind as Kind

NO_NEED = DeviceNeed()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live service that may be given work.

    Attributes:
        experiment_id: what it is assigned to; None while it is idle.
        is_leaving: it was asked to leave its experiment, or has left it and is not yet idle.
        engines: kinds of engine that a rollout can start, and those that take adapters there (``with_adapters``);
            ``LIVE_CHANGES`` of a service that takes changes while it works.
        devices: identities of the GPUs that it may use; two services may have the same one.
        is_spot: its machine may be taken away.
    """

    service_id: str
    kind: Kind
    experiment_id: str | None = None
    is_leaving: bool = False
    engines: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    is_spot: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What an active experiment needs to run, and what it may have.

    Attributes:
        quotas: bounds by kind; a kind that is not here it does not use.
        is_placed: it had all that it needs at one time, so it gets replacements one by one.
        is_paused: it takes no surplus, and lends what it has to those who can use it.
        engine: the kind of engine that its rollouts have to start, or ``with_adapters`` of it; None if every rollout
            can.
        needs: the GPUs that services of a kind must have.
        shares_devices: trainer and rollouts take turns on the same ones.
        hearers: kinds whose services have to take changes while they work; those of an earlier release would continue
            with what the spec was before, and say nothing.
    """

    experiment_id: str
    quotas: Mapping[Kind, QuotaConfig]
    is_placed: bool
    weight: float = 1.0
    priority: int = 0
    is_paused: bool = False
    engine: str | None = None
    needs: Mapping[Kind, DeviceNeed] = field(default_factory=dict)
    shares_devices: bool = False
    hearers: frozenset[Kind] = frozenset()

    def uses(self, kind: Kind) -> bool:
        """Whether services of this kind work for it."""
        return kind in self.quotas

    def need_of(self, kind: Kind) -> DeviceNeed:
        """What GPUs a service of a kind must have."""
        return self.needs.get(kind, NO_NEED)

    def engine_of(self, kind: Kind) -> str | None:
        """The engine that a service of a kind has to start."""
        return self.engine if kind is Kind.ROLLOUT else None

    def abilities_of(self, kind: Kind) -> tuple[str, ...]:
        """What a service of a kind has to be able to, besides its devices: take changes, start an engine."""
        engine = self.engine_of(kind)
        changes = (LIVE_CHANGES,) if kind in self.hearers else ()
        return changes if engine is None else (*changes, engine)

    def floor_of(self, kind: Kind) -> int:
        """How many services of a kind it keeps whose machines are not taken away."""
        quota = self.quotas.get(kind)
        return quota.on_demand if isinstance(quota, RolloutQuotaConfig) else 0

    def kept_of(self, kind: Kind, services: Sequence[Candidate]) -> frozenset[str]:
        """Name those of its services of a kind that make up its floor: the first that are not leaving."""
        able = [each.service_id for each in services if not each.is_spot and not each.is_leaving]
        return frozenset(able[: self.floor_of(kind)])

    def lacking_of_floor(self, kind: Kind, services: Sequence[Candidate]) -> int:
        """Count what it lacks of its floor with these services; while it is paused it asks for none."""
        return 0 if self.is_paused else self.floor_of(kind) - len(self.kept_of(kind, services))

    def suits(self, candidate: Candidate) -> bool:
        """Whether a service meets the requirements, even if it is assigned to another experiment now."""
        is_able = candidate.engines.issuperset(self.abilities_of(candidate.kind))
        return self.uses(candidate.kind) and is_able and len(candidate.devices) >= self.need_of(candidate.kind).count


def quotas_of(spec: ExperimentSpec) -> dict[Kind, QuotaConfig]:
    """Read the bounds of what an experiment needs and may have."""
    resources = spec.resources
    nodes = spec.parallelism.nodes
    quotas = {Kind.TRAINER: QuotaConfig(min=nodes, max=nodes)} if spec.trains else {}
    if spec.needs_rollouts:
        engine = spec.rollout.engine
        # A second rollout would take the server from the first.
        is_one = isinstance(engine, ServerEngineConfig) and engine.is_one_server
        quotas[Kind.ROLLOUT] = QuotaConfig(min=1, max=1) if is_one else resources.rollouts
    if spec.samples_answers:
        quotas[Kind.REWARD] = resources.rewards
    if spec.runs_code:
        quotas[Kind.SANDBOX] = resources.sandboxes or QuotaConfig(min=1, max=1)
    return quotas


def engine_to_start(spec: ExperimentSpec) -> str | None:
    """Name the engine that an experiment's rollouts must be able to start; None where any rollout will do."""
    engine = spec.rollout.engine
    if publishes_adapters(spec):
        return with_adapters(engine.kind)
    return engine.kind if isinstance(engine, ServerEngineConfig) and engine.url is None else None


def needs_of(spec: ExperimentSpec) -> dict[Kind, DeviceNeed]:
    """Read the GPUs that trainer and rollouts must have."""
    return {Kind.TRAINER: trainer_need(spec), Kind.ROLLOUT: rollout_need(spec)}


@dataclass(frozen=True, slots=True)
class Has:
    """What a service has, by which ``auto`` is decided.

    Attributes:
        engines: as of a ``Candidate``.
    """

    service_id: str
    devices: DeviceFacts
    engines: frozenset[str] = frozenset()


def decided(
    spec: ExperimentSpec, *, trainers: Sequence[Has], rollouts: Sequence[Has]
) -> tuple[ExperimentSpec, dict[str, dict[str, str | None]]]:
    """Decide what ``auto`` is on the services that an experiment gets first.

    Returns:
        The spec with that, and what is told of it by the type of the event; no event where nothing was open.
    """
    changes = decide(spec, trainers=[each.devices for each in trainers], rollouts=[each.devices for each in rollouts])
    events: dict[str, dict[str, str | None]] = {"devices_decided": _flat(changes)} if changes else {}
    published = decide_publication(spec, {each.service_id: each.engines for each in rollouts})
    if published is not None:
        lora, reason = published
        changes |= {"asynchrony": {"publication": {"lora": lora}}}
        events["publication_decided"] = {"lora": lora, "reason": reason}
    return (with_changes(spec, changes) if changes else spec), events


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for key, value in changes.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return {name: value for name, value in found.items() if not name.endswith(".kind")}


class DemandFacts(NamedTuple):
    """All that a demand is made of. A spec is replaced when it changes: it is told apart by identity."""

    spec: ExperimentSpec
    state: ExperimentState
    was_placed: bool
    hearers: frozenset[Kind]


class Demands:
    """Makes what an experiment demands again only when what it is made of has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[DemandFacts, Demand]] = {}

    def of(self, experiments: Iterable[Experiment], mixed: frozenset[Kind]) -> list[Demand]:
        """List what they demand, in their order.

        Args:
            mixed: kinds of service of which not all take live changes.
        """
        known: dict[str, tuple[DemandFacts, Demand]] = {}
        for experiment in experiments:
            hearers = experiment.steering.hearers & mixed
            facts = DemandFacts(experiment.spec, experiment.state, _was_placed(experiment), frozenset(hearers))
            found = self._known.get(experiment.id)
            is_known = found is not None and found[0].spec is facts.spec and found[0][1:] == facts[1:]
            known[experiment.id] = found if found and is_known else (facts, _demand(experiment.id, facts))
        self._known = known
        return [demand for _, demand in known.values()]


def _demand(experiment_id: str, facts: DemandFacts) -> Demand:
    spec = facts.spec
    return Demand(
        experiment_id=experiment_id,
        quotas=quotas_of(spec),
        is_placed=facts.was_placed,
        weight=spec.resources.weight,
        priority=spec.resources.priority,
        is_paused=facts.state is ExperimentState.PAUSED,
        engine=engine_to_start(spec),
        needs=needs_of(spec),
        shares_devices=spec.shares_devices and spec.resources.lending is None,
        hearers=facts.hearers,
    )


def _was_placed(experiment: Experiment) -> bool:
    """Whether it has had all that it needs: a trainer is given with the rest, at once."""
    if experiment.spec.trains:
        return experiment.record.trainer_epoch > 0
    return experiment.state is not ExperimentState.STARTING
