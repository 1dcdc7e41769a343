"""Experiments read from a directory where no fleet runs: what its gateway would answer, from the database it left.

A copy of the database is read, and nothing is written but the index beside the samples. What only the data plane knows
is not there, such as the ledger of what has not ended.
"""

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from pydantic import ValidationError

from flotilla.cli.gateway import READ_SECONDS
from flotilla.cli.timeline import Occurrence
from flotilla.client.asynchronous import AsyncClient, Ledgers, Reference
from flotilla.client.calls import PAGE
from flotilla.client.views import Samples
from flotilla.connection import FleetInfo, choose_experiment
from flotilla.services.gateway.store.left_behind import DATABASE, copy_database, directory_of
from flotilla.shared.errors import NotFound, Unavailable
from flotilla.shared.samples.query import SampleOrder, SampleQuery
from flotilla.shared.schemas.experiment import (
    ExperimentView,
    ListedCheckpoint,
    MetricPoint,
    Page,
    UploadCheck,
    UploadRecord,
)
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.samples import SampleView
from flotilla.shared.schemas.service import ServiceView


class Source(Protocol):
    """A client, or the files that a gateway left: what is read of experiments at work or ended."""

    @property
    def base_url(self) -> str:
        """The gateway's URL; empty of files."""

    async def __aenter__(self) -> Self:
        """Open it."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""

    def with_deadline(self, seconds: float) -> "Source":
        """Return the same with another deadline for each call."""

    async def experiment(self, reference: Reference | None = None) -> ExperimentView:
        """Find one by id, name or the beginning of an id; or read one again."""

    async def ledger(self, experiment: ExperimentView) -> Ledgers | None:
        """Read where every group is; None where that is not known."""

    async def metric_page(
        self, experiment: ExperimentView, names: Sequence[str] = (), *, after: str | None = None
    ) -> Page[MetricPoint]:
        """Read the next values of some series, or of all."""

    async def checkpoints(self, experiment: ExperimentView) -> list[ListedCheckpoint]:
        """List the durable checkpoints, by step."""

    async def check_copy(self, experiment: ExperimentView, step: int) -> UploadCheck:
        """Compare a checkpoint with its copy."""

    async def samples(
        self, experiment: ExperimentView, *, step: int, kinds: Sequence[SampleKind], order: SampleOrder, limit: int
    ) -> Samples:
        """Read what the model wrote."""

    async def services(self) -> list[ServiceView]:
        """List the registered services."""


def open_source(gateway: str | None, data: Path, reference: str | None) -> tuple[Source, str | None]:
    """Find where to read an experiment: the fleet of a directory, or its files if none runs.

    Args:
        gateway: URL of a gateway.
        data: data directory that is asked where the reference is no directory.
        reference: an experiment, or a directory: of a run, of a fleet's data, or of an experiment.

    Returns:
        The source, and the experiment's reference there.

    Raises:
        NotFound: the reference is a path, and no experiments are there.
        Unavailable: no gateway is named, no fleet runs, and there are no files.
    """
    named = Path(reference) if reference else None
    if named is not None and (named.is_dir() or len(named.parts) > 1):  # No name of an experiment has a slash.
        place, inside = _place_of(named)
        return _of_data(place), inside
    try:
        return AsyncClient(gateway, data=data, deadline_seconds=READ_SECONDS), reference
    except Unavailable:
        if gateway or not (data / DATABASE).is_file():
            raise
        return StoredExperiments(data), reference


def stored_at(named: Path) -> "tuple[StoredExperiments, str | None]":
    """Open the files of a directory, whether or not a fleet works on them; see ``open_source``.

    Raises:
        NotFound: there is no such directory, or no experiment in it.
    """
    place, inside = _place_of(named)
    return StoredExperiments(place), inside


def _place_of(named: Path) -> tuple[Path, str | None]:
    """Find the data directory that belongs to a directory, and the experiment if that is one's own."""
    places = {named: None, named / "fleet": None, named.absolute().parent.parent: named.absolute().name}
    for place, inside in places.items():
        if (place / DATABASE).is_file():
            return place, inside
    raise NotFound(f"there are no experiments in {named}" if named.is_dir() else f"there is no directory {named}")


def _of_data(data: Path) -> Source:
    try:
        info = FleetInfo.read(data)
    except Unavailable:
        return StoredExperiments(data)
    return AsyncClient(info.gateway_url, info.token, deadline_seconds=READ_SECONDS)


class StoredPublication(NamedTuple):
    """A publication that has ended; times in seconds since the epoch."""

    version: int
    step: int
    phase: str
    announced_at: float
    ended_at: float


class StoredExperiments:
    """Answers as the gateway of a data directory would, from its database.

    Attributes:
        data: the directory.
    """

    base_url = ""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._place = tempfile.TemporaryDirectory(prefix="flotilla-stored-")
        try:
            copy_database(data, Path(self._place.name))
            self._database = sqlite3.connect(Path(self._place.name) / DATABASE, check_same_thread=False)
        except (OSError, sqlite3.Error, Unavailable) as error:
            self._place.cleanup()
            raise self._unreadable(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
        self._place.cleanup()

    def with_deadline(self, seconds: float) -> Self:
        """Return itself: nothing is waited for."""
        return self

    async def experiment(self, reference: Reference | None = None) -> ExperimentView:
        """Find one by id, name or the beginning of an id; one that was read does not change.

        Raises:
            NotFound: there is none.
        """
        if isinstance(reference, ExperimentView):
            return reference
        return choose_experiment(list(self._views()), reference)

    async def ledger(self, experiment: ExperimentView) -> Ledgers | None:
        """Read the last one; None of what has not ended: the data plane had it."""
        query = "SELECT final_ledger FROM experiments WHERE id = ?"
        ((stored,),) = self._rows(query, experiment.id)
        if not stored:
            return None
        try:
            return Ledgers.read(self._json(stored, "a ledger"))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._unreadable(f"a ledger is none: {error}") from error

    async def metric_page(
        self, experiment: ExperimentView, names: Sequence[str] = (), *, after: str | None = None
    ) -> Page[MetricPoint]:
        """Read the next values of some series, or of all."""
        # The text is made of question marks.
        chosen = f"AND name IN ({', '.join('?' * len(names))})" if names else ""
        query = (
            "SELECT sequence, name, step, version, value, at FROM metrics WHERE experiment_id = ? AND sequence > ? "  # noqa: S608
            f"{chosen} ORDER BY sequence LIMIT ?"
        )
        rows = self._rows(query, experiment.id, int(after or 0), *names, PAGE)
        try:
            items = [
                MetricPoint(name=name, step=step, version=version, value=value, at=at)
                for _, name, step, version, value, at in rows
            ]
        except ValidationError as error:
            raise self._unreadable(f"a series has a value that is none: {error.errors()[0]['msg']}") from error
        return Page[MetricPoint](items=tuple(items), next=str(rows[-1][0]) if rows else None)

    async def checkpoints(self, experiment: ExperimentView) -> list[ListedCheckpoint]:
        """List the durable checkpoints, by step, where they are now."""
        query = "SELECT data FROM windows WHERE experiment_id = ? AND name = 'uploads'"
        copies = [UploadRecord.model_validate_json(data) for (data,) in self._rows(query, experiment.id)]
        ((made_in,),) = self._rows("SELECT directory FROM experiments WHERE id = ?", experiment.id)
        query = "SELECT step, version, path, at FROM checkpoints WHERE experiment_id = ? ORDER BY step"
        return [
            ListedCheckpoint(
                step=step,
                version=version,
                path=str(self._moved(Path(path), Path(made_in), Path(experiment.directory))),
                at=at,
                upload=copies[0].view_of(step) if copies else None,
            )
            for step, version, path, at in self._rows(query, experiment.id)
        ]

    async def check_copy(self, experiment: ExperimentView, step: int) -> UploadCheck:
        """Raise ``Unavailable``: the store of the copies is examined by a gateway."""
        raise Unavailable(f"no fleet runs with the data directory {self.data}: only its gateway looks there now")

    async def samples(
        self, experiment: ExperimentView, *, step: int, kinds: Sequence[SampleKind], order: SampleOrder, limit: int
    ) -> Samples:
        """Read what the model wrote."""
        from flotilla.cli.sample_files import read_files

        query = SampleQuery(step=step, kinds=tuple(kinds), order=order)
        items, num_unread = read_files(Path(experiment.directory), query, limit)
        found = Samples(SampleView.model_validate(vars(item)) for item in items)
        found.num_unread = num_unread
        return found

    async def services(self) -> list[ServiceView]:
        """Return none: they ended with the fleet."""
        return []

    def publications(self, experiment: ExperimentView) -> list[StoredPublication]:
        """List the publications that have ended, by version."""
        query = (
            "SELECT version, step, phase, announced_at, ended_at FROM publications "
            "WHERE experiment_id = ? AND ended_at IS NOT NULL ORDER BY version"
        )
        return [StoredPublication(*row) for row in self._rows(query, experiment.id)]

    def publication_members(self, experiment: ExperimentView) -> list[int]:
        """Count the members of the publications that were committed, by version."""
        query = "SELECT members FROM publications WHERE experiment_id = ? AND phase = 'committed' ORDER BY version"
        found = [self._json(members, "the members of a publication") for (members,) in self._rows(query, experiment.id)]
        if not all(isinstance(members, list) for members in found):
            raise self._unreadable("the members of a publication are no list")
        return [len(members) for members in found]

    def events(self, experiment: ExperimentView) -> list[Occurrence]:
        """List the events, in their order."""
        query = "SELECT type, at, data FROM events WHERE experiment_id = ? ORDER BY id"
        rows = self._rows(query, experiment.id)
        return [Occurrence(type=type_, at=at, data=json.loads(data)) for type_, at, data in rows]

    def _views(self) -> Iterator[ExperimentView]:
        query = (
            "SELECT id, name, state, revision, step, policy_version, directory, created_at, updated_at, "
            "spec, problem, health, origin FROM experiments ORDER BY number, created_at, id"
        )
        rows = self._rows(query)
        for id_, name, state, revision, step, version, directory, created_at, updated_at, *documents in rows:
            spec, problem, health, origin = (self._json(each or "null", "an experiment") for each in documents)
            try:
                yield ExperimentView(
                    id=id_,
                    name=name,
                    state=state,
                    revision=revision,
                    spec=spec,
                    created_at=_time(created_at),
                    updated_at=_time(updated_at),
                    step=step,
                    total_steps=_total_steps(spec),
                    policy_version=version,
                    services={},
                    problem=problem,
                    health=health or (),
                    directory=str(directory_of(self.data, id_, directory)),
                    origin=origin,
                )
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
                raise self._unreadable(f"experiment {id_} is none: {error!r}"[:300]) from error

    def _rows(self, query: str, *values: str | int) -> list[Any]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _json(self, text: str, what: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._unreadable(f"{what} is no JSON: {error}") from error

    def _moved(self, path: Path, made_in: Path, directory: Path) -> Path:
        """Find a checkpoint where its experiment is now; one elsewhere is not believed."""
        if ".." in path.parts or not path.is_relative_to(made_in):
            raise self._unreadable(f"it names a checkpoint {path}, which is not in {made_in}")
        return directory / path.relative_to(made_in)

    def _unreadable(self, cause: object) -> Unavailable:
        return Unavailable(f"{self.data / DATABASE} cannot be read: {cause}")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _total_steps(spec: Mapping[str, Any]) -> int:
    is_evaluation = (spec.get("job") or {}).get("kind") == "evaluation"
    return 0 if is_evaluation else int(spec["optimisation"]["steps"])
