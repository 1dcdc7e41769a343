"""Quotas at work: carries out what the placement decides, and shows which service works for which experiment.

A service that an experiment gives up is asked to leave first: it takes nothing new and finishes the work it has in
progress, until it says that it is done or its notice is over. Only then is it released, and given to another.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.membership.fleet import Fleet
from flotilla.services.gateway.monitoring.usage import machine_of
from flotilla.services.gateway.monitoring.watchdog import SCHEDULER
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.scheduler.demands import Candidate, Demand, Demands, Has, decided
from flotilla.services.gateway.scheduler.devices import counts_of, others, owners_of
from flotilla.services.gateway.scheduler.lending import LentDevices
from flotilla.services.gateway.scheduler.placement import Placement, WhyLeave, place
from flotilla.services.gateway.store.records import ServiceRecord
from flotilla.shared.clock import Clock
from flotilla.shared.config.rules.devices import DeviceFacts
from flotilla.shared.schemas.experiment import ExperimentShare, FleetView, KindShare
from flotilla.shared.schemas.service import LIVE_CHANGES, ServiceKind
from flotilla.shared.schemas.service import ServiceKind as Kind

Facts = tuple[ServiceRecord, bool, frozenset[str], frozenset[str]]
"""All that a candidate is made of: the record, whether it leaves, what it can do, its devices."""


PLURALS = {Kind.TRAINER: "trainers", Kind.ROLLOUT: "rollouts", Kind.REWARD: "rewards", Kind.SANDBOX: "sandboxes"}


def why_waiting(
    experiment_id: str, placement: Placement, demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> str | None:
    """Explain what an experiment waits for; None if it has all that it needs.

    Returns:
        Such as ``waiting for 1 rollout, which other-1a2b3c gives back``, or ``waiting for 1 trainer to register or to
        fall free: other-1a2b3c has 1 trainer``, also where that one ends and has not released it.
    """
    lacking = placement.lacking.get(experiment_id)
    if lacking:
        holders = _holders(experiment_id, lacking, demands, candidates)
        how = f"to register or to fall free: {'; '.join(holders)}" if holders else "to register"
        demand = next((demand for demand in demands if demand.experiment_id == experiment_id), None)
        facts = [] if demand is None else _facts(demand, lacking, demands, candidates)
        return f"waiting for {_counted(lacking, demand)} {how}{''.join(f'; {fact}' for fact in facts)}"
    coming = placement.coming.get(experiment_id)
    if coming:
        return f"waiting for {_counted(coming)}, {_givers(coming, candidates, placement)}"
    return None


def why_below_floor(demand: Demand, candidates: Sequence[Candidate]) -> str | None:
    """Return how many rollouts an experiment that was placed lacks of its floor of on-demand ones; None if none."""
    floor = demand.floor_of(Kind.ROLLOUT)
    mine = [each for each in candidates if each.kind is Kind.ROLLOUT and each.experiment_id == demand.experiment_id]
    has = len(demand.kept_of(Kind.ROLLOUT, mine))
    if not demand.is_placed or has >= floor:
        return None
    which = "rollout is" if floor == 1 else "rollouts is" if has == 1 else "rollouts are"
    lacks = floor - has
    return (
        f"{has} of {floor} on-demand {which} there, the machines of all others may be taken away: "
        f"{lacks} more without a spot pool {'has' if lacks == 1 else 'have'} to register or to fall free"
    )


def _counted(counts: Mapping[Kind, int], demand: Demand | None = None) -> str:
    phrases = []
    for kind, count in counts.items():
        phrase = f"{count} {kind.value if count == 1 else PLURALS[kind]}"
        if demand is not None:
            devices = demand.need_of(kind).count
            able = [] if not devices else [f"{devices} device{'' if devices == 1 else 's'}"]
            able += [
                "live changes" if ability == LIVE_CHANGES else f"an interpreter for {ability}"
                for ability in demand.abilities_of(kind)
            ]
            phrase += f" with {' and '.join(able)}" if able else ""
        phrases.append(phrase)
    return " and ".join(phrases)


def _facts(
    demand: Demand, lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    """Describe the devices of a kind if a number is required, and idle services that lack only devices or a release."""
    owners, facts = owners_of(demands, candidates), []
    for kind in lacking:
        if demand.need_of(kind).count and any(each.kind is kind for each in candidates):
            facts.append(f"the devices of the fleet's {PLURALS[kind]}: {counts_of(kind, candidates)}")
        idle = [each for each in candidates if each.kind is kind and each.experiment_id is None and not each.is_leaving]
        facts += [
            f"{each.service_id} is of a release that takes no changes while it works: start it again with this one"
            for each in idle
            if kind in demand.hearers and LIVE_CHANGES not in each.engines
        ]
        for service in idle:
            computing = sorted(others(service, owners) - {demand.experiment_id, ""})
            if demand.suits(service) and computing:
                facts.append(f"{' and '.join(computing)} computes on the devices of {service.service_id}")
    return facts


def _holders(
    experiment_id: str, lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    phrases = []
    for kind in lacking:
        for demand in demands:
            held = sum(c.kind is kind and c.experiment_id == demand.experiment_id for c in candidates)
            if held and demand.experiment_id != experiment_id:
                name = kind.value if held == 1 else PLURALS[kind]
                needed = demand.quotas[kind].min
                needs = "" if kind is Kind.TRAINER and needed == 1 else f" and needs {needed}"
                phrases.append(f"{demand.experiment_id} has {held} {name}{needs}")
    return phrases + _held_by_the_ending(lacking, demands, candidates)


def _held_by_the_ending(
    lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    """Name experiments that ask for nothing any more and still have what is lacking."""
    active = {demand.experiment_id for demand in demands}
    held = Counter((c.experiment_id, c.kind) for c in candidates if c.experiment_id and c.experiment_id not in active)
    phrases = []
    for experiment_id in sorted({holder for holder, _ in held if holder is not None}):
        counts = {kind: held[experiment_id, kind] for kind in lacking if held[experiment_id, kind]}
        if counts:
            phrases.append(f"{experiment_id} is ending and still has {_counted(counts)}")
    return phrases


def _givers(coming: Mapping[Kind, int], candidates: Sequence[Candidate], placement: Placement) -> str:
    givers = {
        candidate.experiment_id
        for candidate in candidates
        if candidate.kind in coming and candidate.experiment_id and candidate.service_id in placement.leaving
    }
    if not givers:
        return "on the way from an experiment that gave back or ended"
    return f"which {' and '.join(sorted(givers))} {'gives' if len(givers) == 1 else 'give'} back"


class Candidates:
    """Makes a service's candidate again only when what it is made of has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Facts, Candidate]] = {}

    def of(self, services: Iterable[LiveService]) -> list[Candidate]:
        """List those that may be given work, in the order of the services."""
        known: dict[str, tuple[Facts, Candidate]] = {}
        for service in services:
            record = service.record
            if service.is_lent:
                continue  # it goes where its host's trainer goes: ``lending.py``
            # A draining trainer keeps its place until it is idle: an experiment never has two.
            if record.is_draining and not (service.kind is ServiceKind.TRAINER and record.experiment_id is not None):
                continue
            facts = (record, service.leaving is not None or service.is_busy, _abilities(service), service.devices)
            found = self._known.get(record.id)
            known[record.id] = found if found is not None and found[0] == facts else (facts, _candidate(service, facts))
        self._known = known
        return [candidate for _, candidate in known.values()]


def _abilities(service: LiveService) -> frozenset[str]:
    return service.engines | {LIVE_CHANGES} if service.capabilities.live_changes else service.engines


def _candidate(service: LiveService, facts: Facts) -> Candidate:
    record, is_leaving, engines, devices = facts
    is_spot = service.capabilities.is_spot
    return Candidate(record.id, service.kind, record.experiment_id, is_leaving, engines, devices, is_spot)


class Scheduler:
    """Gives services to experiments.

    Args:
        why_lent: says why an experiment lends the trainer's devices now, or why not.
        unfair_seconds: how long a share must be unfair before services move: a process that dies and comes back
            within it moves no service.
        notice_seconds: how long a service that is asked to leave may take.
    """

    def __init__(
        self,
        registry: Registry,
        repository: ExperimentRepository,
        fleet: Fleet,
        events: EventLog,
        clock: Clock,
        why_lent: Callable[[Experiment], str],
        *,
        unfair_seconds: float,
        notice_seconds: float,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._fleet = fleet
        self._events = events
        self._clock = clock
        self.lent = LentDevices(registry, repository, why_lent)
        self._unfair_seconds = unfair_seconds
        self._notice_seconds = notice_seconds
        self._unfair_since: float | None = None
        self._candidates = Candidates()
        self._demands_of = Demands()
        self._placed: tuple[list[Demand], list[Candidate], Placement] | None = None

    async def reconcile(self) -> None:
        """Release who has left, ask those to leave who should, and assign what is idle."""
        for service in self._registry:
            if service.leaving is not None and service.experiment_id is not None:
                is_done = service.is_observed and not service.works_for(service.experiment_id)
                if is_done or service.leaving.ends_at <= self._clock.monotonic():
                    await self._fleet.release(service, service.leaving.reason)
        num_returned = self._fleet.returning.num_assigned
        demands, candidates, placed = self._place()
        placement = self.lent.with_lent(placed)
        await self._ask_to_leave(placement)
        # Sandboxes first: a reward looks for its experiment's when it starts.
        services = self._registry if placement.assigned else ()
        chosen = [service for service in services if service.id in placement.assigned]
        await self._decide(chosen, placement)
        for service in sorted(chosen, key=lambda service: service.kind is not ServiceKind.SANDBOX):
            await self._assign(service, self._repository.get(placement.assigned[service.id]), num_returned)
        for demand in demands:
            cause = why_waiting(demand.experiment_id, placement, demands, candidates) or why_below_floor(
                demand, candidates
            )
            silent = None if cause is None else self._fleet.returning.why_missing(demand.experiment_id)
            told = cause if silent is None else f"{silent}; {cause}"
            await self._report_waiting(self._repository.get(demand.experiment_id), told)

    def view(self) -> FleetView:
        """Show which service works for which experiment, and why."""
        demands, candidates, placement = self._place()
        return FleetView(
            experiments=tuple(self._share(demand, placement, demands, candidates) for demand in demands),
            idle={
                kind.value: tuple(s.id for s in self._registry if s.kind is kind and s.experiment_id is None)
                for kind in ServiceKind
            },
        )

    def _demands(self) -> list[Demand]:
        active = [experiment for experiment in self._repository if experiment.is_active]
        # Rows of before there was a number have none: the clock orders these among themselves.
        active.sort(key=lambda e: (e.record.start_number, e.record.started_at or 0.0))
        # Where all of a kind take changes, who needs that needs nothing special: nothing is kept for it.
        mixed = {each.kind for each in self._registry if not each.capabilities.live_changes}
        return self._demands_of.of(active, frozenset(mixed))

    def _place(self) -> tuple[list[Demand], list[Candidate], Placement]:
        """Decide the placement; while nothing has changed, what was decided before."""
        demands, candidates = self._demands(), self._candidates.of(self._registry)
        if self._placed is None or self._placed[:2] != (demands, candidates):
            self._placed = demands, candidates, place(demands, candidates)
        return self._placed

    async def _ask_to_leave(self, placement: Placement) -> None:
        now = self._clock.monotonic()
        if WhyLeave.SHARE not in placement.leaving.values():
            self._unfair_since = None
        elif self._unfair_since is None:
            self._unfair_since = now
        is_tolerated = self._unfair_since is not None and now - self._unfair_since < self._unfair_seconds
        for service in self._registry:
            if service.leaving is None and not placement.leaving:
                continue
            why = placement.leaving.get(service.id)
            if service.leaving is not None and why is None:
                self._fleet.cancel_notice(service)
            elif service.leaving is None and why is not None and not (why is WhyLeave.SHARE and is_tolerated):
                await self._fleet.ask_to_leave(service, why.value, self._notice_seconds)

    async def _decide(self, chosen: list[LiveService], placement: Placement) -> None:
        """Decide what ``auto`` is for those that get their first services; they and all later ones keep to it."""
        for experiment_id in dict.fromkeys(placement.assigned[service.id] for service in chosen):
            experiment = self._repository.get(experiment_id)
            mine = [service for service in chosen if placement.assigned[service.id] == experiment_id]
            mine += self._registry.of(experiment_id)
            trainers, rollouts = (
                [_has(each) for each in mine if each.kind is kind]
                for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT)
            )
            spec, events = decided(experiment.spec, trainers=trainers, rollouts=rollouts)
            if not events:
                continue
            async with self._repository.transaction() as change:
                if experiment.is_active:
                    self._repository.stage_spec(change, experiment, spec)
                    for name, facts in events.items():
                        self._events.stage(change, experiment_id, name, **facts)

    async def _assign(self, service: LiveService, experiment: Experiment, num_returned: int) -> None:
        async with self._repository.transaction() as change:
            if self._fleet.returning.num_assigned != num_returned:
                return  # somebody came back to a place, or to devices, that this was decided without
            if self._registry.find(service.id) is not service or not experiment.is_active:
                return  # it left, or the experiment was stopped, while this waited for its turn
            if service.kind in experiment.steering.hearers and not service.capabilities.live_changes:
                return  # the experiment was changed meanwhile, and this would not hear of it
            if service.kind is ServiceKind.TRAINER:
                self._repository.stage(change, experiment, trainer_epoch=experiment.record.trainer_epoch + 1)
            self._registry.stage_assignment(change, service, experiment.id)
            facts = machine_of(service, experiment.spec)
            facts |= {"service_id": service.id, "service_kind": service.kind.value}
            self._events.stage(change, experiment.id, "service_assigned", **facts)

    async def _report_waiting(self, experiment: Experiment, cause: str | None) -> None:
        known = experiment.record.problem
        is_ours = known is not None and known["component"] == SCHEDULER
        if (cause is None and not is_ours) or (is_ours and known is not None and known["cause"] == cause):
            return
        async with self._repository.transaction() as change:
            if not experiment.is_active or experiment.record.problem != known:
                return  # it has ended with a cause, or another problem was named, while this waited for its turn
            if cause is None:
                self._repository.stage(change, experiment, problem=None)
            elif self._repository.stage_problem(change, experiment, SCHEDULER, cause):
                self._events.stage(change, experiment.id, "waiting", component=SCHEDULER, cause=cause)

    def _share(
        self, demand: Demand, placement: Placement, demands: list[Demand], candidates: list[Candidate]
    ) -> ExperimentShare:
        experiment = self._repository.get(demand.experiment_id)
        targets = placement.targets.get(experiment.id, {})
        kinds = {}
        for kind, quota in demand.quotas.items():
            services = [each for each in self._registry.of(experiment.id, kind) if not each.is_lent]
            kinds[kind.value] = KindShare(
                min=quota.min,
                max=quota.max,
                share=targets.get(kind, 0),
                services=tuple(service.id for service in services),
                leaving={service.id: service.leaving.reason for service in services if service.leaving is not None},
            )
        return ExperimentShare(
            experiment_id=experiment.id,
            name=experiment.record.name,
            state=experiment.state,
            weight=demand.weight,
            priority=demand.priority,
            kinds=kinds,
            waiting=why_waiting(experiment.id, placement, demands, candidates) or why_below_floor(demand, candidates),
            lending=self.lent.told(experiment),
        )


def _has(service: LiveService) -> Has:
    devices = DeviceFacts(len(service.devices), service.capabilities.device == "cuda")
    return Has(service.id, devices, service.engines)
