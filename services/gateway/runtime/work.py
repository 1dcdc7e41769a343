"""What the gateway does for one experiment, as one task: feed, watch and evaluate it; in the end, bring it to rest."""

import asyncio
import contextlib
import functools
from collections.abc import Iterator

from flotilla.services.gateway import signals
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import WrittenAnswers
from flotilla.services.gateway.datasets.made import GroupMaker, open_maker
from flotilla.services.gateway.evaluation.evaluator import Evaluator
from flotilla.services.gateway.feeder.opening import RowSources, open_feeder, open_subscribed, unsubscribe
from flotilla.services.gateway.lifecycle.rules import Rules
from flotilla.services.gateway.monitoring.health.monitor import HealthMonitor
from flotilla.services.gateway.monitoring.watchdog import Stall, Watchdog
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.runtime import rows
from flotilla.services.gateway.runtime.orphaned_claims import OrphanedClaims
from flotilla.services.gateway.runtime.parts import GatewayParts
from flotilla.services.gateway.runtime.shifts import Shifts
from flotilla.services.gateway.runtime.teardown import Teardown
from flotilla.services.gateway.tracking.exporter import Tracking
from flotilla.services.gateway.uploads.uploads import Uploads


class ExperimentWork:
    """Runs the parts that every experiment has of its own."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._tracking = Tracking(parts.store, parts.events)
        self._uploads = Uploads(parts.store, parts.clock, parts.events, parts.settings.places)

    async def run(self, experiment: Experiment) -> None:
        """Feed, watch, evaluate and track an experiment until cancelled.

        Raises:
            DataError: a dataset cannot be read (any more), or all its prompts are too long.
        """
        # By the owner of the experiment, as at its start: links and files may lead elsewhere by now.
        places = self._parts.commands.places_of(experiment.record.owner)
        dataset, held_out = await rows.load(experiment, places, self._parts.events)
        finished = open_maker(experiment.spec, places)
        with self._closing(experiment, finished):
            if finished is not None:
                with_loss = await rows.load_with_loss(experiment, places)
                self._parts.held_out.of(experiment).open(finished, with_loss)
            await self._run(experiment, dataset, held_out, finished)

    async def _run(
        self,
        experiment: Experiment,
        dataset: Dataset | None,
        held_out: Dataset | None,
        finished: GroupMaker | None,
    ) -> None:
        parts = self._parts
        feeder_status = parts.feeder_status.of(experiment)
        watchdog = Watchdog(
            experiment,
            Stall(experiment, parts.repository, parts.events),
            parts.registry,
            parts.publications,
            parts.clock,
            measured=parts.measurements.of(experiment),
            why_blocked=feeder_status.why_blocked,
            stall_seconds=parts.settings.stall_seconds,
        )
        lanes = [
            watchdog.run(),
            self._health(experiment).run(),
            OrphanedClaims(experiment, parts.registry, parts.events, parts.fleet.left.of(experiment)).run(),
            self._tracking.run(experiment),
            self._uploads.run(experiment),
        ]
        if dataset is not None:
            outcomes = parts.measurements.of(experiment).outcomes
            rows_of = RowSources(dataset, parts.commands.live.place, outcomes, finished)
            lanes.append(open_feeder(experiment, rows_of, parts.store, parts.clock, feeder_status).run())
        elif experiment.spec.data.subscribes_to is not None:
            feeder = open_subscribed(
                experiment,
                parts.store,
                parts.clock,
                feeder_status,
                source=functools.partial(self._source_of, experiment),
                has_caught_up=functools.partial(self._has_caught_up, experiment),
                on_end=functools.partial(self._stop_without, experiment),
            )
            lanes.append(feeder.run())
        if experiment.spec.rules:
            points = parts.measurements.of(experiment).rule_points
            rules = Rules(experiment, parts.repository, parts.commands, parts.events, parts.store, parts.clock, points)
            lanes.append(rules.run())
        if experiment.spec.shares_devices:
            lanes.append(self._shifts(experiment).run())
        if held_out is not None:
            written = None if experiment.spec.written_answers is None else WrittenAnswers(experiment.spec)
            evaluator = Evaluator(experiment, held_out, parts.repository, parts.events, parts.clock, written)
            lanes.append(_evaluate(evaluator, written))
        await signals.run_together(*map(asyncio.create_task, lanes))

    def _shifts(self, experiment: Experiment) -> Shifts:
        parts = self._parts
        return Shifts(
            experiment,
            parts.repository,
            parts.registry,
            parts.publications,
            parts.clock,
            parts.feeder_status.of(experiment),
            parts.measurements.of(experiment).lending,
        )

    async def _stop_without(self, experiment: Experiment, source: Experiment) -> None:
        """Stop an experiment whose source has ended and left no groups for another step."""
        state, step = source.state.value, experiment.record.step
        async with self._parts.repository.transaction() as change:
            self._parts.events.stage(change, experiment.id, "source_ended", source=source.id, state=state, step=step)
            self._parts.commands.stage_stop(change, experiment)

    def _has_caught_up(self, experiment: Experiment, since: float) -> bool:
        """Whether a trainer is there that says to have done as many steps as were ever told, and has called since.

        One that hangs does not call; it is there until its lease ends, and another one comes after it.
        """
        trainer = self._parts.registry.trainer_of(experiment.id)
        if trainer is None or trainer.is_cut_off or trainer.heard_at < since:
            return False
        if trainer.observed.experiment_id != experiment.id:
            return False
        return trainer.observed.step is not None and trainer.observed.step >= experiment.record.step

    def _source_of(self, experiment: Experiment) -> Experiment | None:
        """Find the experiment whose groups this one trains; None: none can be used."""
        return self._parts.repository.find(experiment.spec.data.subscribes_to)

    @contextlib.contextmanager
    def _closing(self, experiment: Experiment, made: GroupMaker | None) -> Iterator[None]:
        """Close what makes groups that need no rollout, in the end; None where rollouts answer the rows."""
        try:
            yield
        finally:
            if made is not None:
                self._parts.held_out.of(experiment).close()
                made.close()

    def _health(self, experiment: Experiment) -> HealthMonitor:
        parts = self._parts
        return HealthMonitor(
            experiment,
            parts.repository,
            parts.events,
            parts.clock,
            parts.measurements.of(experiment).health,
            functools.partial(parts.commands.fail, experiment),
            parts.commands.stage_pause,
        )

    async def end(self, experiment: Experiment) -> None:
        """Bring an experiment to rest."""
        parts = self._parts
        # What the last step showed: a gradient that is no number may have ended the experiment.
        await self._health(experiment).look()
        await unsubscribe(experiment, parts.repository)
        teardown = Teardown(
            experiment,
            parts.repository,
            parts.registry,
            parts.fleet,
            parts.commands,
            parts.clock,
            idle_timeout_seconds=parts.settings.teardown_seconds,
            finish_sending=functools.partial(self._finish_sending, experiment),
        )
        await teardown.run()

    async def _finish_sending(self, experiment: Experiment) -> None:
        await self._tracking.finish(experiment)
        await self._uploads.finish(experiment)


async def _evaluate(evaluator: Evaluator, written: WrittenAnswers | None) -> None:
    """Evaluate until cancelled, and end the process that has the tokenizer of written answers."""
    try:
        await evaluator.run()
    finally:
        if written is not None:
            await asyncio.shield(asyncio.to_thread(written.close))
