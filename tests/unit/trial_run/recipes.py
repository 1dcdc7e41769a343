"""A launch file of each class of recipes, imported, and scaled down."""

import os
from pathlib import Path

from flotilla.importers.build import Imported, build
from flotilla.importers.systems import beside, read, read_launch_text, system_of
from flotilla.trial_run.scaling import Trial, scale_down

FOLDER = Path(__file__).with_name("files")
FILES = sorted(path.name for path in FOLDER.iterdir() if path.name != "verl_tools_config.yaml")
ROWS = 10_000


def imported(name: str, *overrides: str) -> Imported:
    """Import one of the files."""
    path = FOLDER / name
    system = name.partition("_")[0]
    around = beside(FOLDER, read_launch_text)
    given = read(system, read_launch_text(path), (), {"HOME": os.sep}, source=name, beside=around)
    return build(system_of(system, given), given, rows=ROWS, overrides=overrides)


def trial_of(name: str, base: Path, *overrides: str) -> Trial:
    """Scale one of the files down."""
    found = imported(name, *overrides)
    assert found.spec is not None, found.report.problems
    return scale_down(found.spec, found.files, base)
