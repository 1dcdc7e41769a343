"""``python -m tests.launch_files DIR``: what the importer makes of every launch file of a folder."""

import argparse
import json
import sys
from pathlib import Path

from flotilla.importers.systems import SYSTEMS
from tests.launch_files.files import launch_files
from tests.launch_files.outcome import Outcome
from tests.launch_files.reading import Reading
from tests.launch_files.summary import summary
from tests.launch_files.tried import tried


def main() -> int:
    """Try the files; fails where one is read differently, or the importer is at fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.launch_files", description=__doc__)
    parser.add_argument("directory", type=Path, help="verl.json and others with lists, or scripts and YAML")
    parser.add_argument("--json", action="store_true", help="a list of what became of each file")
    parser.add_argument("--system", choices=sorted(SYSTEMS), help="only files of this system, and all plain files")
    arguments = parser.parse_args()
    try:
        files = launch_files(arguments.directory, arguments.system)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    found = list(tried(files))
    if arguments.json:
        sys.stdout.write(json.dumps([each.as_dict() for each in found], indent=1) + "\n")
    else:
        sys.stdout.write(summary(found))
    wrong = [
        each
        for each in found
        if each.reading is Reading.DIFFERENT or (each.outcome is Outcome.FAILED and each.is_wrong)
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
