"""``flotilla ls | delete | checkpoints``: what a gateway keeps."""

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console, short_path, table_of, write_json
from flotilla.cli.progress import number, of_rows
from flotilla.cli.reading import PAGE, read_checkpoints
from flotilla.cli.stored import open_source
from flotilla.connection import Source, find_experiment, is_active, list_experiments
from flotilla.shared.schemas.experiment import ExperimentView, MetricPoint, Page
from flotilla.shared.schemas.uploads import ListedCheckpoint, UploadCheck

COLUMNS = ("id", "name", "state", "step", "version", "created")


async def ls(arguments: argparse.Namespace) -> int:
    """List experiments: those that are active, then the others, newest first."""
    async with open_gateway(arguments) as client:
        views = await list_experiments(client)
    found = select(views, names=arguments.name or None, states=arguments.state, only_active=arguments.active)
    found = found[: arguments.last]
    if arguments.json:
        write_json([facts_of(view) for view in found])
    elif found:
        console = new_console()
        console.print(table_of(COLUMNS, [row_of(view) for view in found], whole=("id", "state", "step", "created")))
        for view in found:
            if view.problem:
                console.print(f"problem  {view.id}: {view.problem.component}: {view.problem.cause}", markup=False)
    else:
        what = f"none of {len(views)} experiments matches" if views else "there is no experiment"
        new_console().print(what)
    return 0


def select(
    views: Sequence[ExperimentView], *, names: Sequence[str] | None, states: Sequence[str] | None, only_active: bool
) -> list[ExperimentView]:
    """Choose experiments, the active ones first, then newest first.

    Args:
        views: all, oldest first.
        names: patterns such as ``sum-*``, any of which may match the name or the id; None: all.
        states: any of which it may be in; None: all.
        only_active: leave out drafts and what has ended.
    """
    found = [
        view
        for view in views
        if (names is None or any(fnmatchcase(text, name) for name in names for text in (view.name, view.id)))
        and (states is None or view.state in states)
        and (is_active(view) or not only_active)
    ]
    newest_first = list(reversed(found))
    return [view for view in newest_first if is_active(view)] + [view for view in newest_first if not is_active(view)]


def facts_of(view: ExperimentView) -> dict[str, Any]:
    """What ``--json`` prints of an experiment: its view without the spec."""
    return view.model_dump(mode="json", exclude={"spec"}) | {"is_active": is_active(view)}


def row_of(view: ExperimentView) -> dict[str, str]:
    """What the table shows of an experiment."""
    return {
        "id": view.id,
        "name": view.name,
        "state": str(view.state),
        "step": f"{view.step}/{view.total_steps}",
        "version": str(view.policy_version),
        "created": view.created_at[:19].replace("T", " "),
    }


async def delete(arguments: argparse.Namespace) -> int:
    """Delete an experiment and its series; its directory, with the checkpoints, stays."""
    async with open_gateway(arguments) as client:
        view = await find_experiment(client, arguments.experiment, is_unique=True)
        await client.call("DELETE", f"/v1/experiments/{view.id}", deadline_seconds=30)
    if arguments.json:
        write_json({"id": view.id, "name": view.name, "directory": view.directory})
        return 0
    console = new_console()
    console.print(f"{view.id} is deleted, with its metrics and events", markup=False)
    console.print(f"its directory stays: {short_path(view.directory)}", markup=False)
    return 0


async def checkpoints(arguments: argparse.Namespace) -> int:
    """List the checkpoints of an experiment: where they are, and which is newest and best."""
    source, reference = open_source(arguments.gateway, Path(arguments.data), arguments.experiment)
    async with source as client:
        view = await find_experiment(client, reference)
        found = await read_checkpoints(client, view)
        evaluations = await read_evaluations(client, view)
        counts = await read_evaluated_rows(client, view)
        rows = describe_checkpoints(found, evaluations, Path(view.directory), counts)
        checked = await verify(client, view, rows) if arguments.verify else {}
    code = ExitCode.DONE if all(each.is_whole for each in checked.values()) else ExitCode.FAILED
    if arguments.json:
        copies = {step: each.model_dump(mode="json") for step, each in checked.items()}
        write_json([row | ({"copy": copies[row["step"]]} if row["step"] in copies else {}) for row in rows])
        return code
    console = new_console()
    if not rows:
        console.print(f"{view.id} has no checkpoint yet", markup=False)
        return code
    shown = [row for row in rows if arguments.all or row["is_kept"] is not False]
    columns = ["step", "version", "held-out", "made", ""]
    cells = [
        [str(row["step"]), str(row["version"]), _held_out(row), row["at"][:19].replace("T", " "), _marks(row)]
        for row in shown
    ]
    if any(row["upload"] for row in shown):
        columns.insert(4, "copy")
        for cell, row in zip(cells, shown, strict=True):
            cell.insert(4, row["upload"]["state"] if row["upload"] else "")
    console.print(table_of(columns, cells, title=f"{view.name} ({view.id})"))
    for row in shown:
        if row["is_kept"] is not False:
            console.print(f"step {row['step']:<6} {short_path(row['path'])}", markup=False)
        if row["upload"] and row["upload"]["state"] != "removed":
            console.print(f"            {_copy_of(row['upload'], checked.get(row['step']))}", markup=False)
    if len(shown) < len(rows):
        num_removed = len(rows) - len(shown)
        what = "1 older one was" if num_removed == 1 else f"{num_removed} older ones were"
        console.print(f"{what} removed (checkpoint.keep); --all lists {'it' if num_removed == 1 else 'them'}")
    return code


async def verify(client: Source, view: ExperimentView, rows: Sequence[Mapping[str, Any]]) -> dict[int, UploadCheck]:
    """Compare the checkpoints that are kept with their copies, by step."""
    path, found = f"/v1/experiments/{view.id}/checkpoints", {}
    for row in rows:
        if row["upload"] and row["is_kept"] is not False and row["upload"]["state"] != "removed":
            answer = await client.call("GET", f"{path}/{row['step']}/upload", deadline_seconds=60)
            found[int(row["step"])] = UploadCheck.model_validate(answer)
    return found


def _copy_of(upload: Mapping[str, Any], checked: UploadCheck | None) -> str:
    """Say where the copy of a checkpoint is, and whether it is whole."""
    if checked is not None:
        return f"{upload['url']} ({'whole' if checked.is_whole else 'lacks ' + ', '.join(checked.missing)})"
    match upload["state"]:
        case "uploaded":
            return f"{upload['url']} (whole, since {upload['at'][:19].replace('T', ' ')})"
        case "failed":
            return f"{upload['url']} (not there: {upload['cause']}; it is tried again)"
        case state:
            return f"{upload['url']} ({state})"


def _marks(row: Mapping[str, Any]) -> str:
    words = [name for name in ("newest", "best") if row[f"is_{name}"]]
    return ", ".join([*words, *(["removed"] if row["is_kept"] is False else [])])


async def read_evaluations(client: Source, view: ExperimentView) -> dict[int, float]:
    """Read what held-out problems came to, by policy version: the mean reward of all scored answers."""
    return await _by_version(client, view, "evaluation/reward_mean")


async def read_evaluated_rows(client: Source, view: ExperimentView) -> dict[int, tuple[int, int]]:
    """Read of how many rows that is, by policy version: those with a grade, and all."""
    graded, asked = [
        await _by_version(client, view, name) for name in ("evaluation/num_graded_rows", "evaluation/num_rows")
    ]
    return {version: (int(graded[version]), int(asked[version])) for version in graded if version in asked}


async def _by_version(client: Source, view: ExperimentView, name: str) -> dict[int, float]:
    query = {"names": name, "limit": PAGE}
    answer = await client.call("GET", f"/v1/experiments/{view.id}/metrics", params=query, deadline_seconds=30)
    return {point.version: point.value for point in Page[MetricPoint].model_validate(answer).items}


def _held_out(row: Mapping[str, Any]) -> str:
    rows = row["held_out_rows"]
    return f"{number(row['held_out'])} {of_rows(None if rows is None else tuple(rows))}".rstrip()


def describe_checkpoints(
    found: Sequence[ListedCheckpoint],
    evaluations: Mapping[int, float],
    directory: Path,
    counts: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Say of each checkpoint what its version came to on held-out problems.

    Args:
        found: by step.
        evaluations: mean held-out reward by version.
        counts: rows with a grade, and all, by version.
        directory: the experiment's; where it is on this machine, a checkpoint that is not there was removed.

    Returns:
        By step: ``held_out`` and ``held_out_rows`` (None where that version was not evaluated), ``is_kept`` (None
        where this machine cannot know), ``is_newest`` and ``is_best`` (highest held-out reward, of several the first)
        among those kept.
    """
    is_here = directory.is_dir()
    rows: list[dict[str, Any]] = [
        each.model_dump(mode="json")
        | {
            "held_out": evaluations.get(each.version),
            "held_out_rows": counts.get(each.version),
            "is_kept": Path(each.path).is_dir() if is_here else None,
        }
        for each in found
    ]
    usable = [row for row in rows if row["is_kept"] is not False]
    scored = [row for row in usable if row["held_out"] is not None]
    best = max(scored, key=lambda row: row["held_out"], default=None)
    newest = usable[-1] if usable else None
    return [row | {"is_newest": row is newest, "is_best": row is best} for row in rows]
