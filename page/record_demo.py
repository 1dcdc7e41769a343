"""Record the run that ``flotilla page --demo`` shows: ``python page/record_demo.py runs/arithmetic``.

Takes a finished run of ``examples/arithmetic/experiment.yaml`` and writes ``flotilla/cli/demo/arithmetic.zip``: its
database without what the page does not show, some of its samples, and the tokenizer. Paths of the machine and its name
are left out; where the demo is unpacked takes their place.
"""

import argparse
import json
import socket
import sqlite3
import sys
import tempfile
import zipfile
from contextlib import closing
from pathlib import Path

from flotilla.cli.demo.unpacking import ARCHIVE, PLACE
from flotilla.services.gateway.store.left_behind import DATABASE, EXPERIMENTS
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.samples.folder import SAMPLES, stored_files

EVERY_STEPS = 10
MOST_BYTES = 1_000_000


def main() -> None:
    """Record the run of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    fleet = parser.parse_args().run.absolute() / "fleet"
    (directory,) = (fleet / EXPERIMENTS).iterdir()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_LZMA) as archive:
        trim(fleet, Path(folder) / DATABASE)
        archive.write(Path(folder) / DATABASE, DATABASE)
        # As the newest checkpoint has it: the model that the run began with may be gone.
        archive.write(max((directory / CHECKPOINTS).glob("*/model/tokenizer.json")), "model/tokenizer.json")
        last = {"step": 0, "evaluation": 0}
        stored = sorted(stored_files(directory / SAMPLES), key=lambda each: each.name)
        for each in stored:
            last[each.family] = max(last.get(each.family, 0), each.number)
        for each in stored:
            is_taken = each.family == "step" and (each.number == 1 or each.number % EVERY_STEPS == 0)
            if is_taken or (each.family == "evaluation" and each.number == last["evaluation"]):
                archive.write(directory / SAMPLES / each.name, f"{EXPERIMENTS}/{directory.name}/{SAMPLES}/{each.name}")
    size = ARCHIVE.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{ARCHIVE} has {size} bytes, and may have {MOST_BYTES}")
    sys.stdout.write(f"{ARCHIVE}: {size} bytes\n")


def trim(fleet: Path, target: Path) -> None:
    """Copy the database without secrets, tensors and paths."""
    with closing(sqlite3.connect(fleet / DATABASE)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
        ((spec,),) = copy.execute("SELECT spec FROM experiments").fetchall()
        model = Path(json.loads(spec)["model"]["path"])
        copy.execute(
            "UPDATE publications SET manifest = json_set(manifest, '$.tensors', json('[]')), rendezvous = NULL"
        )
        for table in ("idempotency", "tokens", "services"):
            copy.execute(f"DELETE FROM {table}")  # The names are those above.
        replaced = {str(model): f"{PLACE}/model", str(model.parent): f"{PLACE}/data", str(fleet): PLACE}
        for table, column in (
            ("experiments", "spec"),
            ("experiments", "directory"),
            ("checkpoints", "path"),
            ("events", "data"),
        ):
            for old, new in replaced.items():
                copy.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))
        copy.commit()
        copy.execute("VACUUM")
    content = target.read_bytes()
    for left in (str(Path.home()), str(fleet), str(model.parent), f'"{socket.gethostname()}"'):
        if left.encode() in content:
            raise SystemExit(f"{left} is left in the database")


if __name__ == "__main__":
    main()
