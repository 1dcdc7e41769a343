"""Membership of the fleet: registration, status calls, notices, leases that end.

A status call first records the observation, then waits until the service's desired state differs from the one it
acknowledged. A change that matters to a service fires its signal; nothing is polled.

Where a service reports and waits at the same time, what its report has changed is the answer to the report, and the
call that waits keeps waiting: its answer would be the same.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.membership.joining import Joining
from flotilla.services.gateway.membership.training_jobs import TrainingJobs
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.monitoring.idleness import IdleRatios
from flotilla.services.gateway.publications.negotiation import Reported
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.publications.transports import lacks_version, peers_of
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository, PerExperiment
from flotilla.services.gateway.registry.desired import (
    DesiredBodies,
    DesiredStates,
    ExperimentFacts,
    may_move_others,
    with_check,
)
from flotilla.services.gateway.registry.services import LiveService, Registry, wake_services
from flotilla.services.gateway.registry.shifts import SHARERS, holder_of, is_clear
from flotilla.services.gateway.signals import Signal, wait_for_any
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.shared.clock import Clock
from flotilla.shared.schemas.service import (
    DRAIN_NOTICE_SECONDS,
    DesiredState,
    ObservedState,
    Registered,
    Registration,
    ServedWeights,
    ServiceKind,
    WorkState,
)

log = logging.getLogger(__name__)


WatchCaller = Callable[[], asyncio.Future[Any]]
"""Begins to watch for a caller's connection to break, which ends the future; whichever process made it ends the
watch."""

HANDED_OVER_GAUGES = ("groups_handed_over", "tokens_handed_over")
"""What of a rollout's load is worth keeping when it leaves."""


class Fleet:
    """The gateway's side of membership.

    Args:
        measurements: of each experiment; what services report of its training health is recorded here.
        on_change: called when placement or an experiment's life may have to move.

    Attributes:
        left: fires whenever a service has left the experiment.
    """

    def __init__(
        self,
        registry: Registry,
        repository: ExperimentRepository,
        publications: Publications,
        commands: ExperimentCommands,
        events: EventLog,
        clock: Clock,
        store: Store,
        measurements: PerExperiment[Measurements],
        tokens: Tokens,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._publications = publications
        self._commands = commands
        self._events = events
        self._clock = clock
        self._store = store
        self._on_change = on_change
        self._measurements = measurements
        self._idle_ratios = IdleRatios(store, clock)
        self._tokens = tokens
        self._idle = DesiredStates()
        self._desired_cache = PerExperiment(DesiredStates)
        self.left = PerExperiment(Signal)
        self.bodies = DesiredBodies()
        self.jobs = TrainingJobs(registry, repository, events)
        self._joining = Joining(registry, repository, events, store, clock, self._stage_leave)
        self.returning = self._joining.returning

    async def register(self, registration: Registration) -> Registered:
        """Add a service to the fleet.

        Raises:
            Conflict: a service of another kind has this incarnation.
        """
        service = await self._joining.join(registration)
        log.info("service registered", extra={"service_id": service.id, "kind": service.kind.value})
        self._on_change()
        return Registered(
            service_id=service.id,
            lease_seconds=self._registry.lease_seconds,
            token=self._tokens.pass_of(service.kind, service.id),
            peers=self._tokens.peers_of(service.kind),
            accepts=self._tokens.accepted_by(service.kind),
            accepts_for_weights=self._tokens.accepted_for_weights(service.kind),
            accepts_for_logs=self._tokens.accepted_for_logs(service.id),
        )

    async def report(
        self, service_id: str, observed: ObservedState, wait_seconds: float, watch: WatchCaller
    ) -> DesiredState:
        """Record an observation and return the desired state, at the latest after ``wait_seconds``.

        Args:
            watch: called only if the call has to wait.

        Raises:
            NotFound: the service is not registered (any more).
        """
        service = self._registry.get(service_id)
        self._registry.renew(service, wait_seconds)
        if wait_seconds <= 0:
            return await self._answer_push(service, observed)
        await self._observe(service, observed)
        service.polls += 1
        service.told = None
        poll = service.polls
        answer = await self._wait_for_change(service, observed.acknowledged, wait_seconds, watch)
        if answer is None:
            self._registry.shorten(service)
            return self.desired(service)
        if poll == service.polls:
            self._registry.settle(service)
        return answer

    async def _answer_push(self, service: LiveService, observed: ObservedState) -> DesiredState:
        """Record an observation and answer at once; meanwhile the service's poll is not answered."""
        service.pushes += 1
        try:
            await self._observe(service, observed)
            answer = self.desired(service)
            service.told = answer.tag
            return answer
        finally:
            service.pushes -= 1
            if service.is_held:
                service.is_held = False
                service.changed.fire()

    async def _wait_for_change(
        self, service: LiveService, acknowledged: str | None, wait_seconds: float, watch: WatchCaller
    ) -> DesiredState | None:
        """Wait for another desired state, a newer poll or the end of the time; None if the caller hung up."""
        poll = service.polls
        end = self._clock.monotonic() + wait_seconds
        hung_up: asyncio.Future[Any] | None = None
        while True:
            changed = service.changed.next
            # Removed while it waited: the caller has to hear of it.
            self._registry.get(service.id)
            answer = self.desired(service)
            remaining = end - self._clock.monotonic()
            # A report that is being handled is answered first, perhaps with the same.
            service.is_held = service.pushes > 0 and answer.tag != acknowledged
            is_news = answer.tag != (service.told or acknowledged) and not service.is_held
            if is_news or remaining <= 0 or service.polls != poll:
                return answer
            if hung_up is None:
                hung_up = watch()
            if hung_up.done():
                return None
            await wait_for_any(remaining, changed, hung_up)

    def desired(self, service: LiveService) -> DesiredState:
        """Compute what a service should do now."""
        return with_check(self._desired_work(service), service.check)

    def _desired_work(self, service: LiveService) -> DesiredState:
        experiment = self._repository.find(service.experiment_id)
        if experiment is None:
            return self._idle.of(self._registry.facts(service), None)
        order = self._publications.order_for(service.id, experiment.id)
        facts = self._facts(experiment)
        service_facts = self._registry.facts(service)
        if service.kind is ServiceKind.TRAINER:
            token = self._tokens.assignment_of(service.id, experiment.id, facts.trainer_epoch)
            service_facts = replace(service_facts, node=self.jobs.place_of(service, experiment), token=token)
        if lacks_version(service, facts.policy_version):
            rollouts = partial(self._registry.of, experiment.id, ServiceKind.ROLLOUT)
            peers = tuple(peer.record.address for peer in peers_of(service, rollouts, facts.policy_checksum))
            service_facts = replace(service_facts, peers=peers)
        return self._desired_cache.of(experiment).of(service_facts, facts, order)

    def _facts(self, experiment: Experiment) -> ExperimentFacts:
        record = experiment.record
        trainer = self._registry.trainer_of(record.id)
        manifest = self._publications.committed(record.id, record.policy_version)
        return ExperimentFacts(
            experiment_id=record.id,
            state=record.state,
            revision=record.revision,
            spec=experiment.steering.base,
            spec_digest=experiment.steering.base_digest,
            directory=record.directory,
            trainer_epoch=record.trainer_epoch,
            last_change=record.changes[-1]["id"] if record.changes else None,
            policy_version=record.policy_version,
            weights_address=trainer.record.address if trainer else None,
            hold_version=experiment.hold_version,
            policy_checksum=None if manifest is None else manifest.checksum,
            policy_digest=None if manifest is None else manifest.digest,
            device_shift=record.device_shift if experiment.spec.shares_devices else None,
            is_lending=experiment.spec.resources.lending is not None,
            may_hold=self._may_hold(experiment) if experiment.spec.shares_devices else None,
            agent_token=self._tokens.agent_of(record.id) if experiment.spec.rollout.starts_agents else None,
        )

    def _may_hold(self, experiment: Experiment) -> ServiceKind | None:
        """Find the service that may use the shared devices now: the owner of the shift, once all others left them."""
        shift = experiment.record.device_shift
        holder = holder_of(shift)
        others = [kind for kind in SHARERS if kind is not holder]
        is_lending = experiment.spec.resources.lending is not None
        reports = [self._registry.device_reports(experiment.id, kind, is_lending=is_lending) for kind in others]
        return holder if all(is_clear(shift, each.values()) for each in reports) else None

    async def _observe(self, service: LiveService, observed: ObservedState) -> None:
        if 0 < observed.number < service.observed.number:
            return  # a later one has overtaken it, and is known: this one would stand until the next call
        before, service.observed = service.observed, observed
        was_observed, service.is_observed = service.is_observed, True
        experiment = self._repository.find(service.experiment_id)
        if experiment is not None:
            if observed.publication is not None:
                await self._publications.apply(experiment.id, Reported(service.id, observed.publication))
            if observed.device != before.device or observed.job != before.job:
                wake_services(self._registry, experiment.id)
                experiment.changed.fire()  # the shift may end by it
            if observed.experiment_id == experiment.id:
                self._measurements.of(experiment).add_reports(service, experiment.record.step)
                await self._compare(service, before, experiment)
        if not was_observed or may_move_others(before, observed, None if experiment is None else experiment.state):
            self._on_change()

    async def _compare(self, service: LiveService, before: ObservedState, experiment: Experiment) -> None:
        observed = service.observed
        failure = observed.failure
        if failure is not None and (failure != before.failure or failure.fatal):
            await self._record_failure(service, experiment)
        if service.kind is ServiceKind.ROLLOUT:
            await self._record_served(service, before.served, experiment)
        has_no_engine = service.kind is ServiceKind.ROLLOUT and observed.policy_version is None
        if has_no_engine and (
            before.policy_version is not None or self._publications.is_member(experiment.id, service.id)
        ):
            # Its engine starts again, and with it its end of the weight group, or loads again what it had wrong: the
            # epoch cannot be used any more.
            async with self._store.transaction() as change:
                self._publications.stage_gone(change, experiment.id, service, "its engine serves nothing now")
        if service.kind is ServiceKind.ROLLOUT:
            if not service.is_lent:  # one sleeps while the trainer needs its devices
                await self._idle_ratios.record(experiment, service.id, observed)
            self._publications.durations.serves(experiment.id, service.id, observed.policy_version)
        if service is self._registry.trainer_of(experiment.id):
            await self._record_progress(service, experiment)

    async def _record_served(self, service: LiveService, before: ServedWeights | None, experiment: Experiment) -> None:
        """Name a rollout whose engine has something else in memory than was published, and one that is right again."""
        served = service.observed.served
        if served is None or (before is not None and before.finding == served.finding):
            return
        named = partial(self._events.append, experiment.id, service_id=service.id, version=served.version)
        if served.diverged:
            await named("weights_diverged", times=served.diverged, detail=served.detail)
        elif before is not None and before.diverged:
            await named("weights_mended", is_proved=served.digest is not None)

    async def _record_progress(self, service: LiveService, experiment: Experiment) -> None:
        observed, record = service.observed, experiment.record
        # A trainer that had finished may report it again before it learns that there are more steps.
        is_last = (observed.step or 0) >= experiment.spec.optimisation.steps
        ends = observed.state is WorkState.FINISHED and is_last and not record.is_trained
        if not ends and observed.step in {None, record.step}:
            return
        step = observed.step
        if step is not None and step < record.step:
            # What it reported before its last checkpoint may come after it; a checkpoint that is lost is deleted.
            step = max(step, *(each.step for each in await self._store.checkpoints(experiment.id)), 0)
        async with self._store.transaction() as change:
            if step is not None:
                self._repository.stage(change, experiment, step=step)
            if ends and not experiment.record.is_trained:
                self._repository.stage(change, experiment, is_trained=True)
                self._events.stage(change, experiment.id, "training_finished", step=observed.step)
                change.then(self._on_change)

    async def _record_failure(self, service: LiveService, experiment: Experiment) -> None:
        failure = service.observed.failure
        assert failure is not None
        facts = {"service_id": service.id, "component": failure.component, "cause": failure.cause}
        if failure.fatal and experiment.is_active:
            async with self._store.transaction() as change:
                self._events.stage(change, experiment.id, "service_failed", **facts)
                self._commands.stage_failure(change, experiment, failure.component, failure.cause)
        elif not failure.fatal:
            await self._events.append(experiment.id, "service_recovers", **facts)

    async def drain(self, service_id: str, notice_seconds: float = DRAIN_NOTICE_SECONDS) -> LiveService:
        """Let a service finish the work it has in progress within a notice, and leave.

        Raises:
            NotFound: it is not registered.
        """
        service = self._registry.get(service_id)
        async with self._store.transaction() as change:
            self._registry.stage_drain(change, service, notice_seconds)
            if service.experiment_id is not None:
                facts = {"service_id": service_id, "notice_seconds": notice_seconds}
                self._events.stage(change, service.experiment_id, "service_draining", **facts)
        self._on_change()
        return service

    async def give_up(self, service: LiveService) -> None:
        """Forget a service whose lease has ended; one that was only out of reach may come back to its work.

        Raises:
            NotFound: it is not registered any more.
        """
        async with self._store.transaction() as change:
            if service.lease_ends > self._registry.now():
                return  # it called while this waited for its turn
            self._stage_leave(change, service.id, f"its lease ended: {self.returning.silence_of(service)}")
            self.returning.stage_memory(change, service)
        self._on_change()

    async def leave(self, service_id: str, *, reason: str) -> None:
        """Remove a service; others take over its claims.

        Raises:
            NotFound: it is not registered.
        """
        async with self._store.transaction() as change:
            self._stage_leave(change, service_id, reason)
        self._on_change()

    def _stage_leave(self, change: Transaction, service_id: str, reason: str) -> None:
        service = self._registry.stage_removal(change, service_id)
        change.then(lambda: log.info("service left", extra={"service_id": service_id, "reason": reason}))
        if service.experiment_id is not None:
            self._stage_departure(change, service, service.experiment_id, reason)

    async def ask_to_leave(self, service: LiveService, reason: str, notice_seconds: float) -> None:
        """Let a service finish the work it has in progress for its experiment, and take nothing new for it.

        What a rollout cannot finish within the notice it hands over, with the tokens that it has.
        """
        if service.experiment_id is None:
            return
        service.leaving = self._registry.notice(reason, notice_seconds)
        service.changed.fire()
        await self._events.append(
            service.experiment_id,
            "service_asked_to_leave",
            service_id=service.id,
            service_kind=service.kind.value,
            reason=reason,
            notice_seconds=notice_seconds,
        )

    def cancel_notice(self, service: LiveService) -> None:
        """Withdraw the notice of a service that may stay."""
        service.leaving = None
        service.changed.fire()

    async def release(self, service: LiveService, reason: str) -> None:
        """Take a service's assignment away."""
        if service.experiment_id is None:
            return
        async with self._store.transaction() as change:
            # Asked again: it may have been released, or have left, while this waited for its turn.
            if self._registry.find(service.id) is not service or service.experiment_id is None:
                return
            self._registry.stage_assignment(change, service, None)
            self._stage_departure(change, service, service.experiment_id, reason)
        self._on_change()

    def _stage_departure(self, change: Transaction, service: LiveService, experiment_id: str, reason: str) -> None:
        self._publications.stage_gone(change, experiment_id, service, reason)
        if service.observed.device is not None:
            # Services that wait for its memory need not wait any longer.
            change.then(partial(wake_services, self._registry, experiment_id))
        experiment = self._repository.find(experiment_id)
        if experiment is not None:
            self.jobs.stage_departure(change, service, experiment, reason)
            facts = {name: value for name, value in service.observed.load.items() if name in HANDED_OVER_GAUGES}
            self._events.stage(
                change,
                experiment_id,
                "service_left",
                service_id=service.id,
                service_kind=service.kind.value,
                reason=reason,
                **facts,
            )
            change.then(self.left.of(experiment).fire)
