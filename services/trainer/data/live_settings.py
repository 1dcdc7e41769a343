"""Settings that change while the experiment runs: from which version each holds, and the spec of a version.

A change waits in the gateway until the trainer is about to begin a version, that is its first step, of which no plan
stands. The trainer asks then, the gateway records the version, and only its answer lets that step begin: so a trainer
that comes back from any checkpoint trains each version with the same settings again.
"""

import logging
from collections.abc import Awaitable, Callable

from flotilla.shared.config.load.live import with_applied
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.live_changes import AdoptAnswer, AdoptRequest, Effect, LiveChange, held_at, settled

log = logging.getLogger(__name__)

Ask = Callable[[AdoptRequest], Awaitable[AdoptAnswer]]
"""Asks the gateway, until it answers."""
Keep = Callable[[tuple[LiveChange, ...]], None]
"""Is given the changes that are known, for checkpoints."""


class LiveSettings:
    """The spec as it was when the trainer was assigned, and what was changed since.

    Args:
        base: the spec without live changes.
        changes: that the gateway knew when this trainer took over.
        ask: from which version on further ones hold.
        keep: called with what is known, now and whenever there is more.
    """

    def __init__(self, base: ExperimentSpec, changes: tuple[LiveChange, ...], ask: Ask, keep: Keep) -> None:
        self._base, self._ask, self._keep = base, ask, keep
        self._announced: str | None = None
        self._known: tuple[tuple[LiveChange, ...], ExperimentSpec] = ((), base)
        self.changes = changes
        keep(changes)

    def announce(self, newest: str | None) -> None:
        """Note the id of the gateway's newest change: its database may have come back without some of those before."""
        self._announced = newest

    @property
    def has_news(self) -> bool:
        """Whether a change waits for a version or a group, or is not known here; a curriculum always has news."""
        is_known = self._announced is None or any(each.id == self._announced for each in self.changes)
        has_rows_to_keep = self._base.data.curriculum is not None
        return has_rows_to_keep or not is_known or not all(each.is_settled for each in self.changes)

    async def adopt(self, version: int, step: int) -> None:
        """Let what waits hold from a version on; blocks until the gateway answers, since only that makes it so.

        What was trained with stays, also where the gateway's database has lost it: a checkpoint restores it.

        Args:
            version: of which no step was begun.
            step: done.
        """
        found = (await self._ask(AdoptRequest(version=version, step=step))).changes
        known, told = {each.id for each in self.changes}, {each.id: each for each in found}
        news = [each for each in found if each.id not in known]
        for each in news:
            paths = [key.path for key in each.keys]
            log.info("settings are changed", extra={"keys": paths, "effect": each.effect, "version": each.version})
        held = (settled(each, told.get(each.id, each)) for each in self.changes)
        self.changes = (*held, *news)
        self._keep(self.changes)

    def spec_at(self, version: int) -> ExperimentSpec:
        """Return the spec that a version is trained with; the same object while nothing changes.

        What groups carry is not in it: they were sampled before.
        """
        held = self.trained_with(version)
        if held != self._known[0]:
            self._known = held, with_applied(self._base, held)
        return self._known[1]

    def trained_with(self, version: int) -> tuple[LiveChange, ...]:
        """Choose the changes that make ``spec_at`` of a version, oldest first."""
        return tuple(each for each in held_at(self.changes, version) if each.effect is Effect.TRAINER)
