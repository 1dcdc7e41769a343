"""``flotilla ls | delete | checkpoints``: what a gateway keeps."""

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.gateway import ACT_SECONDS, COPY_SECONDS, START_SECONDS, open_gateway
from flotilla.cli.output import new_console, short_path, table_of, write_json
from flotilla.cli.progress import number, of_rows
from flotilla.cli.stored import Source, open_source
from flotilla.connection import is_active
from flotilla.shared.schemas.experiment import ExperimentView, ListedCheckpoint, UploadCheck, UploadView

COLUMNS = ("id", "name", "state", "step", "version", "created")


async def ls(arguments: argparse.Namespace) -> int:
    """List experiments: those that are active, then the others, newest first."""
    async with open_gateway(arguments) as client:
        views = await client.experiments()
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


def facts_of(view: ExperimentView) -> dict[str, JsonValue]:
    """What ``--json`` prints of an experiment: its view without the spec."""
    return view.model_dump(mode="json", exclude={"spec"}) | {"is_active": is_active(view)}


def row_of(view: ExperimentView) -> dict[str, str]:
    """What the table shows of an experiment."""
    return {
        "id": view.id,
        "name": view.name if view.groups_from is None else f"{view.name} (from {view.groups_from})",
        "state": str(view.state),
        "step": view.reached,
        "version": str(view.policy_version),
        "created": view.created_at[:19].replace("T", " "),
    }


async def delete(arguments: argparse.Namespace) -> int:
    """Delete an experiment and its series; its directory, with the checkpoints, stays unless ``--files``.

    Raises:
        Conflict: another experiment needs its files.
    """
    async with open_gateway(arguments) as client:
        view = await client.experiment(arguments.experiment, is_unique=True)
        deadline = COPY_SECONDS if arguments.files else ACT_SECONDS
        await client.with_deadline(deadline).delete(view, files=arguments.files)
    if arguments.json:
        write_json({"id": view.id, "name": view.name, "directory": view.directory, "files_deleted": arguments.files})
        return 0
    console = new_console()
    console.print(f"{view.id} is deleted, with its metrics and events", markup=False)
    what = "its directory is deleted, too" if arguments.files else "its directory stays (--files deletes it, too)"
    console.print(f"{what}: {short_path(view.directory)}", markup=False)
    return 0


class CheckpointRow(ListedCheckpoint):
    """A checkpoint, and what its version came to on held-out problems."""

    held_out: float | None
    """None where that version was not evaluated."""
    held_out_rows: tuple[int, int] | None
    """With a grade, and all."""
    is_kept: bool | None
    """None where this machine cannot know."""
    is_newest: bool
    """Among those kept."""
    is_best: bool
    """Among those kept; of several with the highest held-out reward the first."""
    copy_found: UploadCheck | None = None
    """What was found at ``checkpoint.upload_to`` now; None without --verify."""

    @property
    def may_be_there(self) -> bool:
        """Whether it was not removed, as far as this machine knows."""
        return self.is_kept is not False

    @property
    def copy_of(self) -> UploadView | None:
        """Its copy; None where there is none, or none any more."""
        return self.upload if self.upload is not None and self.upload.state != "removed" else None

    def document(self) -> dict[str, JsonValue]:
        """Write it as ``--json`` prints it."""
        written: dict[str, JsonValue] = self.model_dump(mode="json", exclude={"copy_found"})
        return written | ({"copy": self.copy_found.model_dump(mode="json")} if self.copy_found else {})


async def checkpoints(arguments: argparse.Namespace) -> int:
    """List the checkpoints of an experiment: where they are, and which is newest and best."""
    source, reference = open_source(arguments.gateway, Path(arguments.data), arguments.experiment)
    async with source:
        view = await source.experiment(reference)
        client = source.with_deadline(ACT_SECONDS)
        found = await client.checkpoints(view)
        evaluations = await read_evaluations(client, view)
        counts = await read_evaluated_rows(client, view)
        rows = describe_checkpoints(found, evaluations, Path(view.directory), counts)
        rows = await verify(client.with_deadline(START_SECONDS), view, rows) if arguments.verify else rows
    is_whole = all(row.copy_found is None or row.copy_found.is_whole for row in rows)
    if arguments.json:
        write_json([row.document() for row in rows])
    elif rows:
        _show(view, rows, [row for row in rows if arguments.all or row.may_be_there])
    else:
        new_console().print(f"{view.id} has no checkpoint yet", markup=False)
    return ExitCode.DONE if is_whole else ExitCode.FAILED


def _show(view: ExperimentView, rows: Sequence[CheckpointRow], shown: Sequence[CheckpointRow]) -> None:
    console = new_console()
    has_copies = any(row.upload for row in shown)
    columns = ["step", "version", "held-out", "made", *(["copy"] if has_copies else []), ""]
    cells = [
        [
            *(str(row.step), str(row.version), _held_out(row), row.at[:19].replace("T", " ")),
            *([row.upload.state if row.upload else ""] if has_copies else []),
            _marks(row),
        ]
        for row in shown
    ]
    console.print(table_of(columns, cells, title=f"{view.name} ({view.id})"))
    for row in shown:
        if row.may_be_there:
            console.print(f"step {row.step:<6} {short_path(row.path)}", markup=False)
        if row.copy_of is not None:
            console.print(f"            {_copy_in_words(row.copy_of, row.copy_found)}", markup=False)
    if len(shown) < len(rows):
        num_removed = len(rows) - len(shown)
        what = "1 older one was" if num_removed == 1 else f"{num_removed} older ones were"
        console.print(f"{what} removed (checkpoint.keep); --all lists {'it' if num_removed == 1 else 'them'}")


async def verify(client: Source, view: ExperimentView, rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    """Compare the checkpoints that are kept with their copies."""
    return [
        row.model_copy(update={"copy_found": await client.check_copy(view, row.step)})
        if row.copy_of is not None and row.may_be_there
        else row
        for row in rows
    ]


def _copy_in_words(upload: UploadView, checked: UploadCheck | None) -> str:
    """Return where the copy of a checkpoint is, and whether it is whole."""
    if checked is not None:
        return f"{upload.url} ({'whole' if checked.is_whole else 'lacks ' + ', '.join(checked.missing)})"
    if upload.state == "uploaded":
        return f"{upload.url} (whole, since {(upload.at or '')[:19].replace('T', ' ')})"
    if upload.state == "failed":
        return f"{upload.url} (not there: {upload.cause}; it is tried again)"
    return f"{upload.url} ({upload.state})"


def _marks(row: CheckpointRow) -> str:
    marks = {"newest": row.is_newest, "best": row.is_best, "removed": not row.may_be_there}
    return ", ".join(name for name, has_it in marks.items() if has_it)


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
    return {point.version: point.value for point in (await client.metric_page(view, [name])).items}


def _held_out(row: CheckpointRow) -> str:
    return f"{number(row.held_out)} {of_rows(row.held_out_rows)}".rstrip()


def describe_checkpoints(
    found: Sequence[ListedCheckpoint],
    evaluations: Mapping[int, float],
    directory: Path,
    counts: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> list[CheckpointRow]:
    """Return of each checkpoint what its version came to on held-out problems.

    Args:
        found: by step.
        evaluations: mean held-out reward by version.
        counts: rows with a grade, and all, by version.
        directory: the experiment's; where it is on this machine, a checkpoint that is not there was removed.
    """
    is_here = directory.is_dir()
    kept = {each.step: Path(each.path).is_dir() if is_here else None for each in found}
    usable = [each for each in found if kept[each.step] is not False]
    scored = [each for each in usable if each.version in evaluations]
    best = max(scored, key=lambda each: evaluations[each.version], default=None)
    newest = usable[-1] if usable else None
    return [
        CheckpointRow(
            **dict(each),
            held_out=evaluations.get(each.version),
            held_out_rows=counts.get(each.version),
            is_kept=kept[each.step],
            is_newest=each is newest,
            is_best=each is best,
        )
        for each in found
    ]
