"""Training jobs of the Tinker API as experiments: their client is what a spec would be, and decides each step."""

import asyncio
import logging
from pathlib import Path
from typing import Final

from flotilla.services.gateway.tinker.tinker import Tinker
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import NotFound, Unavailable
from flotilla.shared.schemas.experiment import (
    ExperimentKind,
    ExperimentState,
    ExperimentView,
    ListedCheckpoint,
    Origin,
    Problem,
)
from flotilla.shared.schemas.tinker import RequestLedger
from flotilla.shared.tinker.paths import RUN, SavedPath, saved_of
from flotilla.shared.tinker.records import Update
from flotilla.shared.tinker.sessions import ENDED, Run

log = logging.getLogger(__name__)

LIST_SECONDS: Final = 3.0
"""The other experiments, which are listed from memory, wait no longer for Redis."""


class TinkerJobs:
    """The models that are trained.

    Args:
        tinker: None: the API is not served, and there are none.
        data: the fleet's directory.
    """

    def __init__(self, tinker: Tinker | None, data: Path) -> None:
        self._tinker, self._data = tinker, data

    def is_one(self, experiment_id: str) -> bool:
        """Return whether an id is one of theirs; no other experiment's has a colon."""
        return self._tinker is not None and RUN.fullmatch(experiment_id) is not None

    async def views(self) -> list[ExperimentView]:
        """List the newest, oldest first; none while Redis is away."""
        if self._tinker is None:
            return []
        try:
            async with asyncio.timeout(LIST_SECONDS):
                _, newest = await self._tinker.runs(None)
                return [self._view(run) for run in reversed(newest)]
        except (TimeoutError, Unavailable) as error:
            log.warning("training jobs cannot be listed", extra={"error": repr(error)})
            return []

    async def show(self, run: str) -> ExperimentView:
        """Show one.

        Raises:
            NotFound: there is none of this id.
        """
        return self._view(await self._get(run))

    async def ledger(self, run: str) -> RequestLedger:
        """Count what became of its requests.

        Raises:
            NotFound: there is none of this id.
        """
        found = await self._get(run)
        return RequestLedger(
            accepted=found.accepted, answered=found.answered, failed=found.failed, waiting=found.waiting
        )

    async def checkpoints(self, run: str) -> list[ListedCheckpoint]:
        """List what was saved of it, oldest first.

        Raises:
            NotFound: there is none of this id.
        """
        await self._get(run)
        assert self._tinker is not None
        found = await asyncio.to_thread(self._tinker.saved.of_run, run)
        return [
            ListedCheckpoint(step=each.step, version=each.step, path=each.path, at=rfc3339(each.created))
            for each in found
        ]

    async def updates(self, run: str, after: int) -> tuple[int, list[Update]]:
        """List what is known of its newest updates, behind the first ``after`` of all; return their count.

        Raises:
            NotFound: there is none of this id.
        """
        await self._get(run)
        assert self._tinker is not None
        return await self._tinker.sessions.updates(run, after)

    async def _get(self, run: str) -> Run:
        if self._tinker is not None:
            _, found = await self._tinker.runs(None, model_id=run)
            if found:
                return found[0]
        raise NotFound(f"there is no experiment {run}")

    def _view(self, run: Run) -> ExperimentView:
        model, is_lost = run.model, run.closed not in {"", ENDED}
        state = ExperimentState.RUNNING if run.is_open else ExperimentState.STOPPED
        seen = rfc3339(max(run.seen, model.created))
        return ExperimentView(
            id=model.model_id,
            name=model.user_metadata.get("name") or model.model_id,
            kind=ExperimentKind.TINKER,
            state=ExperimentState.FAILED if is_lost else state,
            revision=0,
            spec={},
            created_at=rfc3339(model.created),
            updated_at=seen,
            step=run.updates,
            total_steps=0,
            policy_version=run.updates,
            services={},
            problem=Problem(component="redis", cause=run.closed, at=seen) if is_lost else None,
            directory=str(saved_of(self._data, model.model_id)),
            origin=None if model.began_from is None else _origin(model.began_from, model.began_at),
        )


def _origin(path: str, step: int) -> Origin:
    return Origin(experiment_id=SavedPath.read(path).run, step=step, version=step, path=path, first_group_id=0)
