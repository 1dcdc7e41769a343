"""The recorded run that the package has, unpacked into a folder."""

import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Final

from flotilla.services.gateway.store.left_behind import DATABASE

ARCHIVE: Final = Path(__file__).with_name("arithmetic.zip")
"""Of ``page/record_demo.py``."""
PLACE: Final = "/demo"
"""Placeholder in the record for the folder that it is unpacked into."""


def unpack(folder: Path) -> Path:
    """Unpack the recorded run, and let its record name the folder; gives that."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        for column in ("spec", "directory"):
            database.execute(f"UPDATE experiments SET {column} = replace({column}, ?, ?)", (PLACE, str(folder)))  # noqa: S608
        database.commit()
    return folder
