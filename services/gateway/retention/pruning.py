"""Deletes expired data of finished experiments, or lists what would be deleted.

Each part is examined again before it goes: an experiment may have been resumed, or another begun from it. While a
part goes its experiment cannot start. Files go before the record, so what a crash leaves is found at the next look.

Links are never followed; all calls on files block.
"""

import asyncio
import logging
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flotilla.services.gateway.access.caller import owner
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.retention.plan import Decision, Left, plan, why_needed
from flotilla.services.gateway.retention.references import Reference, part_of, references
from flotilla.services.gateway.samples.indexing import SampleIndexes
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.errors import Conflict, FlotillaError, NotFound
from flotilla.shared.schemas.retention import Part, PrunedPart, Pruning, Retention

log = logging.getLogger(__name__)


def sizes_of(directory: Path) -> Mapping[Part, int]:
    """Add up what each part of an experiment's directory would free, in bytes.

    A file with several names, such as one that a fork has links to, frees nothing. What vanishes meanwhile counts for
    nothing.
    """
    found: Counter[Part] = Counter()
    for entry in _entries(directory):
        part = part_of(entry.name)
        found[part] += _sum(entry.path) if entry.is_dir(follow_symlinks=False) else _size(entry.path)
    return found


def remove(directory: Path, part: Part) -> None:
    """Delete a part of an experiment's directory, or all of it; what is gone already is no error.

    Raises:
        OSError: something could not be deleted; what could is gone.
    """
    meant = [entry for entry in _entries(directory) if part in {Part.RUN, part_of(entry.name)}]
    for path in [*(Path(entry.path) for entry in meant), *([directory] if part is Part.RUN else ())]:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            continue


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    if directory.is_symlink():
        return []
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sum(folder: str) -> int:
    return sum(_size(f"{where}/{name}") for where, _, names in os.walk(folder) for name in names)


def _size(path: str) -> int:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0


class Retainer:
    """Keeps what finished experiments left within bounds.

    Args:
        directory: where each experiment has its own.
    """

    def __init__(
        self,
        repository: ExperimentRepository,
        commands: ExperimentCommands,
        events: EventLog,
        samples: SampleIndexes,
        clock: Clock,
        directory: Path,
    ) -> None:
        self._repository = repository
        self._commands = commands
        self._events = events
        self._samples = samples
        self._clock = clock
        self._directory = directory
        self._is_busy = False

    async def prune(self, retention: Retention, *, dry_run: bool) -> Pruning:
        """Delete expired data, or only list it.

        Raises:
            Conflict: that is being done already.
        """
        if self._is_busy:
            raise Conflict("what finished experiments left is being looked through already: try again later")
        self._is_busy = True
        try:
            return await self._prune(retention, dry_run=dry_run)
        finally:
            self._is_busy = False

    async def delete(self, experiment_id: str) -> None:
        """Delete a draft or a finished experiment with all its files.

        Raises:
            NotFound: there is no such experiment.
            ActionNotAllowed: it is at work.
            Conflict: another experiment needs its files, or they are not in the gateway's own directory.
        """
        experiment = self._repository.get(experiment_id)
        directory = Path(experiment.record.directory)
        if directory.parent != self._directory:
            raise Conflict(
                f"{directory} is not in {self._directory}, so the gateway deletes no files there: delete "
                f"{experiment_id} without its files, and them by hand"
            )
        with self._commands.at_rest(experiment):
            needed = why_needed(experiment_id, Part.RUN, self._seen_by_owner(experiment, await self._references()))
            if needed is not None:
                raise Conflict(
                    f"the files of {experiment_id} stay: {needed}. Delete that one first, or {experiment_id} without "
                    "its files"
                )
            try:
                await self._remove_files(experiment, Part.RUN)
            except OSError as error:
                raise Conflict(
                    f"some files of {experiment_id} could not be deleted, and so its record stays: {error}"
                ) from None
        await self._commands.act(experiment_id, Action.DELETE)
        log.info("an experiment was deleted with its files", extra={"experiment_id": experiment_id})

    async def _prune(self, retention: Retention, *, dry_run: bool) -> Pruning:
        found = [each for each in self._repository if self._is_finished(each)]
        left, unread = await asyncio.to_thread(_left_by, found)
        needs = await self._references()
        decided = plan(left, needs, retention, self._clock.now())
        removed, kept = [], [*unread, *(_view(each) for each in decided.kept)]
        for each in decided.removed:
            why = None if dry_run else await self._remove(each)
            if why is None:
                removed.append(_view(each))
            else:
                kept.append(_view(each).model_copy(update={"why": why}))
        return Pruning(
            dry_run=dry_run, removed=tuple(removed), kept=tuple(kept), bytes=sum(each.bytes for each in removed)
        )

    def _seen_by_owner(self, experiment: Experiment, needs: Iterable[Reference]) -> Iterator[Reference]:
        """Leave out what another owner's experiment names and may not read; of who may, tell the caller's own alone."""
        for each in needs:
            of = self._repository.record_of(each.by).owner
            if of in {None, experiment.record.owner}:
                yield (
                    each if owner() in {None, of} else replace(each, words="an experiment of another owner needs them")
                )

    async def _references(self) -> list[Reference]:
        records = [each.record for each in (*self._repository, *self._repository.unusable())]
        return await asyncio.to_thread(lambda: list(references(records, self._directory)))

    def _is_finished(self, experiment: Experiment) -> bool:
        """Whether it has ended, and what it left is ours."""
        is_ours = Path(experiment.record.directory).parent == self._directory
        return experiment.state.is_final and experiment.record.final_ledger is not None and is_ours

    async def _remove(self, decision: Decision) -> str | None:
        """Delete a part; return why it was not."""
        experiment_id, part = decision.left.experiment_id, decision.part
        try:
            experiment = self._repository.get(experiment_id)
            if not self._is_finished(experiment) or experiment.record.updated_at != decision.left.ended_at:
                return "it was resumed or changed meanwhile"
            with self._commands.at_rest(experiment):
                needed = why_needed(experiment_id, part, await self._references())
                if needed is not None:
                    return needed
                await self._remove_files(experiment, part)
            if part is Part.RUN:
                await self._commands.act(experiment_id, Action.DELETE)
            else:
                await self._tell(experiment_id, decision)
        except NotFound:
            return None  # it was deleted meanwhile
        except (FlotillaError, OSError) as error:
            log.warning("a part could not be deleted", extra={"experiment_id": experiment_id, "error": repr(error)})
            return f"it could not be deleted: {error.detail if isinstance(error, FlotillaError) else error}"
        log.info("a part was deleted", extra={"experiment_id": experiment_id, "part": part.value, "why": decision.why})
        return None

    async def _remove_files(self, experiment: Experiment, part: Part) -> None:
        if part in {Part.RUN, Part.SAMPLES}:
            await asyncio.to_thread(self._samples.forget, experiment)
        await asyncio.to_thread(remove, Path(experiment.record.directory), part)

    async def _tell(self, experiment_id: str, decision: Decision) -> None:
        part, num_bytes, why = decision.part.value, decision.num_bytes, decision.why
        async with self._repository.transaction() as change:
            self._repository.stage_audit(change, experiment_id, "prune", part=part, bytes=num_bytes, why=why)
            self._events.stage(change, experiment_id, "experiment_pruned", part=part, bytes=num_bytes, why=why)


def _left_by(experiments: Iterable[Experiment]) -> tuple[list[Left], list[PrunedPart]]:
    """Find what each left; one that cannot be looked through is kept, with the reason, and the others continue."""
    left, kept = [], []
    for each in experiments:
        ended_at = each.record.updated_at
        try:
            left.append(Left(each.id, ended_at, sizes_of(Path(each.record.directory))))
        except OSError as error:
            log.warning(
                "what an experiment left cannot be read", extra={"experiment_id": each.id, "error": repr(error)}
            )
            why = f"its size could not be read: {error.strerror or type(error).__name__}"
            kept.append(PrunedPart(experiment_id=each.id, part=Part.RUN, bytes=0, ended_at=rfc3339(ended_at), why=why))
    return left, kept


def _view(decision: Decision) -> PrunedPart:
    return PrunedPart(
        experiment_id=decision.left.experiment_id,
        part=decision.part,
        bytes=decision.num_bytes,
        ended_at=rfc3339(decision.left.ended_at),
        why=decision.why,
    )
