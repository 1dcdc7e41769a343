"""``flotilla logs``: what the processes of a local fleet write, from its files; the fleet need not run."""

import argparse
import asyncio
import json
import sys
from functools import partial
from pathlib import Path

from flotilla.cli.log_lines import LEVELS, LogLine, Tail, choose_files, last_lines, merge, parse, plain
from flotilla.cli.log_rotation import older_logs
from flotilla.cli.parsing import meant
from flotilla.shared.errors import NotFound

POLL_SECONDS = 0.2


async def logs(arguments: argparse.Namespace) -> int:
    """Print the last lines of each process in the order of time, and with ``--follow`` what comes.

    Raises:
        NotFound: no fleet has run there, or no process is called like that.
    """
    directory = Path(arguments.data) / "logs"
    files = choose_files(directory, arguments.service)
    if not files:
        raise NotFound(_why_none(directory, arguments.service))
    least = LEVELS.index(arguments.level)
    tails: dict[Path, Tail] = {}
    lines: list[LogLine] = []
    for path in files:
        is_wanted = partial(_is_severe, path.stem, least)
        texts, offset = last_lines(path, arguments.tail, is_wanted)
        for older in older_logs(path):
            if len(texts) >= arguments.tail:
                break
            texts = last_lines(older, arguments.tail - len(texts), is_wanted)[0] + texts
        tails[path] = Tail(path, offset)
        lines += [parse(path.stem, text) for text in texts]
    _write(merge(lines), least, as_json=arguments.json)
    while arguments.follow:
        await asyncio.sleep(POLL_SECONDS)
        for path in choose_files(directory, arguments.service):
            tails.setdefault(path, Tail(path))
        _write(merge([line for tail in tails.values() for line in tail.more()]), least, as_json=arguments.json)
    return 0


def _is_severe(process: str, least: int, text: str) -> bool:
    return parse(process, text).severity >= least


def _write(lines: list[LogLine], least: int, *, as_json: bool) -> None:
    for line in lines:
        if line.severity >= least:
            sys.stdout.write((_json(line) if as_json else plain(line)) + "\n")
    sys.stdout.flush()


def _json(line: LogLine) -> str:
    return json.dumps({"process": line.process, **(line.record or {"message": line.text})})


def _why_none(directory: Path, service: str | None) -> str:
    known = [path.stem for path in choose_files(directory, None)]
    if service is None or not known:
        return f"there are no logs in {directory}: --data names a fleet's directory (of a run: runs/NAME/fleet)"
    hint = meant(service, known) or f": there are {', '.join(known)}"
    return f"no process is called {service!r}{hint}"
