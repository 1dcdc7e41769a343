"""Experiments read from a directory where no fleet runs: what its gateway would answer, from the database it left.

Nothing is written. What only the data plane knows is not there, such as the ledger of what has not ended.
"""

import json
import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flotilla.connection import Source, open_client
from flotilla.shared.errors import NotFound, Unavailable
from flotilla.shared.schemas.uploads import UploadRecord

DATABASE = "gateway.sqlite"
EXPERIMENTS = "experiments"
LOCK_SECONDS = 5.0


def open_source(gateway: str | None, data: Path, reference: str | None) -> tuple[Source, str | None]:
    """Find who knows an experiment: the fleet of a directory, or its files where none runs.

    Args:
        gateway: URL of a gateway.
        data: data directory that is asked where the reference is no directory.
        reference: an experiment, or a directory: of a run, of a fleet's data, or of an experiment.

    Returns:
        Who answers, and the experiment's reference there.

    Raises:
        NotFound: the reference is a path, and no experiments are there.
        Unavailable: no gateway is named, no fleet runs, and there are no files.
    """
    named = Path(reference) if reference else None
    if named is not None and (named.is_dir() or len(named.parts) > 1):  # No name of an experiment has a slash.
        places = {named: None, named / "fleet": None, named.absolute().parent.parent: named.absolute().name}
        for place, inside in places.items():
            if (place / DATABASE).is_file():
                return _of_data(place), inside
        raise NotFound(f"there are no experiments in {named}" if named.is_dir() else f"there is no directory {named}")
    try:
        return open_client(gateway, data), reference
    except Unavailable:
        if gateway or not (data / DATABASE).is_file():
            raise
        return StoredExperiments(data), reference


def _of_data(data: Path) -> Source:
    try:
        return open_client(None, data, environment={})
    except Unavailable:
        return StoredExperiments(data)


class StoredExperiments:
    """Answers as the gateway of a data directory would, from its database.

    Attributes:
        data: the directory.
        base_url: none.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        self.base_url = ""
        self._database = sqlite3.connect(
            f"{(data / DATABASE).absolute().as_uri()}?mode=rw", uri=True, timeout=LOCK_SECONDS, check_same_thread=False
        )
        self._database.row_factory = sqlite3.Row
        # To read what a killed process left in the journal is to write: nothing else may.
        self._database.execute("PRAGMA query_only = ON")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    async def call(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, deadline_seconds: float = 10.0
    ) -> Any:
        """Answer a GET of what is kept.

        Raises:
            NotFound: there is no such experiment.
            Unavailable: that is not kept in files.
        """
        _, _, what, *rest = path.split("/")
        if method != "GET" or what not in {"experiments", "services"}:
            raise Unavailable(f"no fleet runs with the data directory {self.data}")
        if what == "services":
            return {"items": [], "next": None}
        rows = self._rows("SELECT * FROM experiments ORDER BY number, created_at, id")
        if not rest:
            return {"items": [self._view(row) for row in rows], "next": None}
        row = next((row for row in rows if row["id"] == rest[0]), None)
        if row is None:
            raise NotFound(f"there is no experiment {rest[0]!r} in {self.data}")
        if rest[2:]:
            raise Unavailable(f"no fleet runs with the data directory {self.data}: only its gateway looks there now")
        return self._part(row, rest[1] if rest[1:] else "", params or {})

    def _part(self, row: Mapping[str, Any], name: str, params: Mapping[str, Any]) -> Any:
        match name:
            case "":
                return self._view(row)
            case "ledger":
                return json.loads(row["final_ledger"] or "null") or {"train": {}, "evaluation": {}}
            case "metrics":
                return self._metrics(row["id"], params)
            case "checkpoints":
                found = self._rows("SELECT * FROM checkpoints WHERE experiment_id = ? ORDER BY step", row["id"])
                names = ("step", "version", "at")
                place = self._directory(row)
                copies = self._uploads(row["id"])
                items = [
                    {each: made[each] for each in names}
                    | {"path": str(place / Path(made["path"]).relative_to(row["directory"]))}
                    | ({} if copies is None else {"upload": copies.view_of(made["step"]).model_dump(mode="json")})
                    for made in found
                ]
                return {"items": items, "next": None}
            case "samples":
                from flotilla.cli.sample_files import read_files

                items, num_unread = read_files(self._directory(row), params, int(params["limit"]))
                return {"items": items, "next": None, "num_unread": num_unread}
        raise Unavailable(f"no fleet runs with the data directory {self.data}, and {name} are not in its files")

    def _rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self._database.execute(query, values)]

    def _uploads(self, experiment_id: str) -> UploadRecord | None:
        query = "SELECT data FROM windows WHERE experiment_id = ? AND name = 'uploads'"
        found = self._rows(query, experiment_id)
        return UploadRecord.model_validate_json(found[0]["data"]) if found else None

    def _metrics(self, experiment_id: str, params: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in str(params.get("names") or "").split(",") if name]
        # The text is made of question marks.
        chosen = f"AND name IN ({', '.join('?' * len(names))})" if names else ""
        query = f"SELECT * FROM metrics WHERE experiment_id = ? AND sequence > ? {chosen} ORDER BY sequence LIMIT ?"  # noqa: S608
        rows = self._rows(query, experiment_id, int(params.get("after") or 0), *names, int(params["limit"]))
        items = [{name: row[name] for name in ("name", "step", "version", "value", "at")} for row in rows]
        return {"items": items, "next": str(rows[-1]["sequence"]) if rows else None}

    def _directory(self, row: Mapping[str, Any]) -> Path:
        """Find where it is now: a run may have been moved."""
        moved = self.data.absolute() / EXPERIMENTS / row["id"]
        return moved if moved.is_dir() else Path(row["directory"])

    def _view(self, row: Mapping[str, Any]) -> dict[str, Any]:
        same = ("id", "name", "state", "revision", "step", "policy_version")
        documents = {name: json.loads(row[name] or "null") for name in ("spec", "problem", "health", "origin")}
        return {
            **{name: row[name] for name in same},
            **documents,
            "health": documents["health"] or [],
            "created_at": datetime.fromtimestamp(row["created_at"], UTC).isoformat(),
            "updated_at": datetime.fromtimestamp(row["updated_at"], UTC).isoformat(),
            "total_steps": _total_steps(documents["spec"]),
            "services": {},
            "directory": str(self._directory(row)),
        }


def _total_steps(spec: Mapping[str, Any]) -> int:
    is_evaluation = (spec.get("job") or {}).get("kind") == "evaluation"
    return 0 if is_evaluation else int(spec["optimisation"]["steps"])
