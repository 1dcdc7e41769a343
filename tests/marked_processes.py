"""Finds processes by a variable in their environment, which all that they start inherits, whatever becomes of them."""

from pathlib import Path

import psutil

MARK = "STARTED_BY_TEST"


def marked(place: Path) -> list[int]:
    """List the processes that have not ended, and whose mark is this directory."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARK) == str(place)
            found += [process.pid] if is_ours and process.status() != psutil.STATUS_ZOMBIE else []
        except psutil.Error:
            continue
    return found
