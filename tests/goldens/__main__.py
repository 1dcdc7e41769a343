"""The command: ``python -m tests.goldens DIR [--json]``."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.goldens.case import read_folder
from tests.goldens.runner import Outcome, run, summary


def main(arguments: list[str] | None = None) -> int:
    """Run a folder and print what became of its cases; 1 if one failed, 2 if there was none."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of golden files")
    parser.add_argument("--json", action="store_true", help="print the whole summary as JSON")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    result = summary(run(read_folder(options.folder)))
    print(json.dumps(result, indent=2) if options.json else _table(result))
    if not result["totals"]:
        return 2
    return 1 if result["failed"] else 0


def _table(result: dict[str, Any]) -> str:
    columns = [outcome.value for outcome in Outcome]
    lines = [f"{'family':36}" + "".join(f"{column:>16}" for column in columns)]
    rows = [*result["families"].items(), ("total", result["totals"])]
    lines += [f"{name:36}" + "".join(f"{counts.get(column, 0):>16}" for column in columns) for name, counts in rows]
    if result["reasons"]:
        lines += ["", "not applicable, or handled:"]
        lines += [f"{count:>5}  {reason}" for reason, count in sorted(result["reasons"].items())]
    if result["failed"]:
        lines += ["", "failed:"]
        lines += [f"  {entry['family']} {entry['name']}: {entry['reason']}" for entry in result["failed"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
