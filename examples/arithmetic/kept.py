"""Takes a model that was made before: that of the demonstration is kept in this folder, as ``building`` has made it.

It is taken where its settings are those that are asked for; ``prepare.py --make`` makes it all the same.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from .rows import write_problems
from .settings import Settings

KEPT = Path(__file__).parent / "kept"
OF_THE_MAKING = ("fingerprint", "settings", "wall_seconds", "cpu_seconds")


def has(settings: Settings) -> bool:
    """Return whether what these settings make is kept."""
    folder = _folder(settings)
    return folder.is_dir() and _summary(folder)["fingerprint"] == settings.fingerprint()


def build(
    directory: Path, settings: Settings, say: Callable[[str], None], report: Callable[[str], None]
) -> dict[str, object]:
    """Fill ``directory`` as ``building.build`` does, and return what that had measured; imports no torch."""
    write_problems(directory, settings, say)
    folder = _folder(settings)
    summary = _summary(folder)
    shutil.copytree(folder / "model", directory / "model")
    say(f"model of {summary['num_parameters']} parameters, kept in {folder}; --make makes it again")
    return {name: value for name, value in summary.items() if name not in OF_THE_MAKING}


def _folder(settings: Settings) -> Path:
    return KEPT / f"{settings.preset}-{settings.seed}"


def _summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "prepared.json").read_text())
    return found
