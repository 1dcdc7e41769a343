"""``flotilla show``: what the model wrote, from a gateway, or from the files where no fleet runs.

The client is imported where a gateway is asked: files are shown in half of the time without it.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.cli.sample_files import READ_SECONDS, import_pyarrow_alone, read_files
from flotilla.shared.errors import InvalidRequest, NotFound, Unavailable
from flotilla.shared.samples.query import SampleOrder, SampleQuery
from flotilla.shared.schemas.sample_kinds import SampleKind

if TYPE_CHECKING:
    from flotilla.cli.sample_text import Sample

NOTHING_YET = (
    "no samples are kept yet: the first come with the first step, or with groups that are filtered or fail before it; "
    "`flotilla status` shows the experiment's progress"
)
NOTHING_LIKE_THAT = (
    "no sample is like that: --step, --kind, --problem, --group and --failed choose; without them any is shown"
)


async def show(arguments: argparse.Namespace) -> int:
    """Show samples of an experiment."""
    query = query_of(arguments)
    directory = experiment_directory(arguments)
    items, unread = await _find(arguments, directory, query)
    if not items and arguments.kind is None and query.kinds and not arguments.json:
        # Without a step, filtered or failed groups show why.
        items, unread = await _find(arguments, directory, replace(query, kinds=()))
        if items:
            print(
                f"nothing was trained {'that is like that' if _is_chosen(arguments) else 'yet'}; what else is kept:\n"
            )
    from flotilla.cli.output import new_console, write_json
    from flotilla.cli.sample_text import describe

    if arguments.html:
        return await asyncio.to_thread(_write_page, Path(arguments.html), directory, items)
    if arguments.json:
        write_json([_plain(item) for item in items])
        return 0
    console = new_console()
    for item in items:
        console.print(describe(item, is_whole=arguments.full))
    if not items:
        console.print(NOTHING_LIKE_THAT if _is_chosen(arguments) else NOTHING_YET)
    if unread:
        console.print(f"{unread} files are not in the index yet: ask again in a moment for what may be in them")
    return 0


def _write_page(path: Path, directory: Path | None, items: "Sequence[Sample]") -> int:
    """Write samples of files as a page of HTML.

    Raises:
        InvalidRequest: a gateway was asked, which does not hand images out, or the page cannot be written.
    """
    from flotilla.cli.sample_page import page_of
    from flotilla.shared.samples.reading import ReadSample, images_of

    if directory is None:
        raise InvalidRequest(
            "--html reads the files of a run: name its directory, such as runs/mine, in place of the fleet"
        )
    read = [item for item in items if isinstance(item, ReadSample)]
    try:
        path.write_text(page_of(items, images_of(directory / "samples", read)), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from error
    print(f"{len(items)} samples in {path}")
    return 0


def _plain(sample: "Sample") -> object:
    """Write a sample as JSON has it."""
    from flotilla.shared.samples.reading import ReadSample

    return vars(sample) if isinstance(sample, ReadSample) else sample.model_dump(mode="json")


def _is_chosen(arguments: argparse.Namespace) -> bool:
    """Whether only some samples are asked for."""
    chosen = (arguments.step, arguments.kind, arguments.problem, arguments.group, arguments.failed or None)
    return any(each is not None for each in chosen)


async def _find(
    arguments: argparse.Namespace, directory: Path | None, query: SampleQuery
) -> "tuple[Sequence[Sample], int]":
    if directory is not None:
        if arguments.owns_process:
            import_pyarrow_alone()
        read = partial(read_files, directory, query, arguments.limit, with_tokens=arguments.tokens)
        return await asyncio.to_thread(read)
    return await _from_gateway(arguments, query)


def query_of(arguments: argparse.Namespace) -> SampleQuery:
    """Translate the options; without any, trained samples are meant."""
    order = SampleOrder.WORST if arguments.worst else SampleOrder.BEST if arguments.best else SampleOrder.NEWEST
    kind = arguments.kind or (SampleKind.TRAINED if not arguments.failed and arguments.problem is None else None)
    return SampleQuery(
        step=arguments.step,
        kinds=() if kind is None else (SampleKind(kind),),
        row=arguments.problem,
        group=arguments.group,
        is_failure=arguments.failed,
        order=order,
    )


def experiment_directory(arguments: argparse.Namespace) -> Path | None:
    """Find the experiment's directory where files are to be read: a directory was named, or no fleet runs.

    Raises:
        NotFound: there is no such directory, or no experiment below it.
        Unavailable: no fleet runs, and there are no files either.
    """
    named = Path(arguments.experiment) if arguments.experiment else None
    if named is not None and named.is_dir():
        return newest_below(named, None)
    if named is not None and len(named.parts) > 1:  # No name of an experiment has a slash.
        raise NotFound(f"there is no directory {named}")
    if arguments.gateway:
        return None
    from flotilla.connection import open_client

    try:
        open_client(None, Path(arguments.data))
    except Unavailable:
        if not Path(arguments.data).is_dir():
            raise
        return newest_below(Path(arguments.data), arguments.experiment)
    return None


def newest_below(path: Path, reference: str | None) -> Path:
    """Find the newest experiment with samples in its own directory, a data directory or a run directory."""
    candidates = [path, *path.glob("experiments/*"), *path.glob("fleet/experiments/*")]
    found = [each for each in candidates if (each / "samples").is_dir()]
    if reference is not None:
        found = [each for each in found if each.name.startswith(reference)]
    if not found:
        what = "experiment" if reference is None else f"experiment {reference!r}"
        raise NotFound(f"no fleet runs, and there is no {what} with samples below {path}")
    return max(found, key=lambda each: (each / "samples").stat().st_mtime)


async def _from_gateway(arguments: argparse.Namespace, query: SampleQuery) -> "tuple[Sequence[Sample], int]":
    from flotilla.cli.gateway import open_gateway

    async with open_gateway(arguments) as client:
        view = await client.experiment(arguments.experiment)
        found = await client.with_deadline(READ_SECONDS).samples(
            view,
            step=query.step,
            kinds=query.kinds,
            row=query.row,
            group=query.group,
            failed=query.is_failure,
            order=query.order,
            tokens=arguments.tokens,
            limit=arguments.limit,
        )
        return found, found.num_unread
