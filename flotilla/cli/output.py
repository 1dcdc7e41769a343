"""What commands print: tables and sentences for people, JSON for programs.

In a pipe nothing is coloured, wrapped or shortened. In a terminal a column that must be typed or copied is never
shortened, and paths are printed outside of tables.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 100_000
"""Wider than any line."""
LONGEST_WORD = 20
"""That a cell holds in one piece, however narrow the terminal; a path is broken."""
SILENT_SECONDS = 2.0
AGAIN_SECONDS = 10.0
"""A wait is announced after the first, and again after each of the second."""


def new_console(*, to_stderr: bool = False) -> Console:
    """A console that writes to standard output, or to standard error, without markup surprises."""
    width = None if (sys.stderr if to_stderr else sys.stdout).isatty() else PIPE_COLUMNS
    return Console(highlight=False, soft_wrap=True, width=width, stderr=to_stderr)


@contextlib.asynccontextmanager
async def telling(what: str) -> AsyncGenerator[None, None]:
    """Print on standard error what is waited for, if the block takes long."""
    teller = asyncio.create_task(_tell(what), name=f"tell: {what}")
    try:
        yield
    finally:
        teller.cancel()
        await asyncio.gather(teller, return_exceptions=True)


async def _tell(what: str) -> None:
    began = time.monotonic()
    await asyncio.sleep(SILENT_SECONDS)
    while True:
        sys.stderr.write(f"{what} ({time.monotonic() - began:.0f} s)\n")
        sys.stderr.flush()
        await asyncio.sleep(AGAIN_SECONDS)


def short_path(path: str | Path) -> str:
    """Write a path as it can be typed here: below the working directory without what leads to it, else whole."""
    whole = Path(path).absolute()
    here = Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) and whole != here else str(whole)


def write_json(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def write_json_line(value: Any) -> None:
    """Print one line of a stream of JSON documents."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def table_of(
    columns: Sequence[str],
    rows: Iterable[Mapping[str, str] | Sequence[str]],
    *,
    whole: Sequence[str] = (),
    title: str = "",
) -> Table:
    """Make a table.

    Args:
        columns: their names.
        rows: cells by column's name, or in the order of the columns.
        whole: columns that are never shortened, such as ids: the table grows wider than the terminal instead.
        title: above it.
    """
    cells = [[row.get(name, "") for name in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    table = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        if name in whole:
            widest = max((len(row[index]) for row in cells), default=0)
            table.add_column(name, no_wrap=True, min_width=max(widest, len(name)))
        else:
            longest = max((len(word) for row in cells for word in row[index].split()), default=0)
            table.add_column(name, overflow="fold", min_width=max(len(name), min(longest, LONGEST_WORD)))
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def fitting(console: Console, draw: Callable[[Sequence[str]], Table], may_be_left_out: Sequence[str]) -> Table:
    """Draw a table without as many columns, first ones first, as it takes to fit into a terminal."""
    for number in range(len(may_be_left_out)):
        table = draw(may_be_left_out[:number])
        if Measurement.get(console, console.options.update(width=PIPE_COLUMNS), table).minimum <= console.width:
            return table
    return draw(may_be_left_out)
