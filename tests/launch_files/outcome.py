"""What ``flotilla import`` makes of a launch file: a spec that passes ``flotilla spec check``, or which refusals."""

import contextlib
import io
import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flotilla.cli.__main__ import main
from flotilla.cli.exit_codes import ExitCode
from tests.launch_files.files import LaunchFile

ROWS = 100_000
"""Rows that the training data is said to have, where passes over it must become steps."""


class Outcome(StrEnum):
    """How an import ends."""

    TRANSLATED = "translated"
    REFUSED = "refused"
    """Nothing is made, and the report says of which parameters it is the fault."""
    FAILED = "failed"
    """It cannot be read, or the program is at fault: a traceback, a wrong exit code, a spec that is none."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the import of one file ended.

    Attributes:
        outcome: the end.
        refused: names of the parameters that are refused.
        reasons: why, by name.
        problems: what else keeps a spec from being made; faults of the program begin with ``wrong:``.
    """

    outcome: Outcome
    refused: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def import_into(file: LaunchFile, folder: Path, *, rows: int = ROWS) -> Ended:
    """Import a file by the command into an empty folder, and check the spec that it writes."""
    path = file.path if file.path is not None else _laid(file, folder / "files")
    spec = folder / "spec.yaml"
    options = ["--rows", str(rows), "--output", str(spec), "--json"]
    code, out, errors = _run(["import", file.system, str(path), *options], file.environment)
    if code is None:
        return Ended(Outcome.FAILED, problems=(f"wrong: {errors}",))
    report: dict[str, Any] = json.loads(out) if out.strip() else {"entries": [], "problems": [errors.strip()]}
    lies = f"{path.parent}/"
    refused = [each for each in report["entries"] if each["verdict"] == "refused"]
    reasons = {each["name"]: each["detail"].replace(lies, "") for each in refused}
    problems = tuple(each.replace(lies, "") for each in report["problems"])
    hinders = bool(reasons or problems)
    if (code, spec.exists()) not in {(ExitCode.DONE, True), (ExitCode.FAILED, False)} or hinders == (code == 0):
        return Ended(Outcome.FAILED, tuple(reasons), reasons, (*problems, f"wrong: exit code {code}"))
    if code == ExitCode.DONE:
        code, said, errors = _run(["spec", "check", str(spec)], file.environment)
        good = code == ExitCode.DONE
        wrong = () if good else (f"wrong: the spec does not pass its check: {(errors or said).strip()}",)
        return Ended(Outcome.TRANSLATED if good else Outcome.FAILED, problems=wrong)
    return Ended(Outcome.REFUSED if out.strip() else Outcome.FAILED, tuple(reasons), reasons, problems)


def _laid(file: LaunchFile, folder: Path) -> Path:
    """Write a file of a list, and those beside it, where the one leads to the others: in a repository, as they were."""
    (folder / ".git").mkdir(parents=True)
    folder = folder.joinpath(*(["below"] * max((place.count("../") for place in file.beside), default=0)))
    for place, text in file.beside.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file.name
    path.write_text(file.text, encoding="utf-8")
    return path


def _run(words: list[str], environment: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Run a command here, with a file's variables; no code where it ends by an exception."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), patch.dict(os.environ, environment):
        try:
            return main(words), out.getvalue(), errors.getvalue()
        except SystemExit as end:
            return None, out.getvalue(), f"exit code {end.code}: {errors.getvalue().strip()}"
        except Exception:
            return None, out.getvalue(), traceback.format_exc()
