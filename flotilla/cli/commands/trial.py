"""``flotilla import FILE --try``: the imported spec, scaled down, trains two steps on a fleet of its own.

Its folder is a temporary one, which nothing of is left however it ends, unless the user names one to keep.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from flotilla.cli.commands.run import Companion, run
from flotilla.cli.output import new_console, short_path
from flotilla.shared.config.load.yaml_text import write_value
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.schemas.experiment import Problem
from flotilla.trial_run.agent import play_trial
from flotilla.trial_run.edits import Change
from flotilla.trial_run.scaling import MODEL, Trial

TRY_SECONDS = 600.0
RECIPE, SPEC, RUNS = "recipe.json", "spec.yaml", "runs"
MAKER = "flotilla.services.trainer.tiny_models"
HEADER = "# A trial of an imported spec: scaled down to two steps on this machine. Run it again with `flotilla run`.\n"


async def try_out(spec: ExperimentSpec, trial: Trial, *, keep: Path | None, agent: Path | None, plain: bool) -> int:
    """Run a trial and print its result; returns the exit code.

    Args:
        spec: that is tried, as it was imported.
        keep: folder that the trial's files stay in; None: a temporary one.
        agent: the user's file of an agent that plays the episodes; None: a made-up one, where agents do.
        plain: lines instead of a live view.

    Raises:
        InvalidRequest: the folder to keep has something in it.
        Unavailable: the trial did not end in time.
    """
    console = new_console()
    show_changes(console, trial.changes)
    with _folder(keep) as folder:
        write_trial(trial, folder)
        arguments = _arguments(folder, plain=plain)
        companion: Companion | None = partial(play_trial, file=agent) if spec.rollout.agents is not None else None
        try:
            async with asyncio.timeout(TRY_SECONDS):
                code = await run(arguments, companion=companion, is_kept=keep is not None)
        except TimeoutError:
            raise Unavailable(
                f"the trial did not end within {TRY_SECONDS:.0f} s: the lines above show its progress"
            ) from None
        found = Outcome.model_validate_json((folder / RUNS / spec.name / "summary.json").read_bytes())
        console.print(found.line(), markup=False)
        if keep is not None:
            console.print(f"kept       {short_path(folder / SPEC)}", markup=False)
    return code


def show_changes(console: Console, changes: Sequence[Change]) -> None:
    """Print what is different from the imported spec, and why."""
    table = Table("key", "from", "to", "why", title="scaled down for the trial; everything else is as imported")
    for each in changes:
        table.add_row(each.key, each.before, each.after, each.why)
    console.print(table)


class Outcome(BaseModel):
    """A trial's entry in the summary."""

    status: str
    steps: int
    total_steps: int
    reward: float | None
    loss: float | None
    tokens_trained: int | None
    problem: Problem | None

    def line(self) -> str:
        """Return what was trained, or why not."""
        found = [f"{self.steps} of {self.total_steps} steps" if self.total_steps else "an evaluation"]
        found += [f"{self.tokens_trained} tokens"] if self.tokens_trained else []
        found += [
            f"{name} {value:.4g}" for name, value in (("reward", self.reward), ("loss", self.loss)) if value is not None
        ]
        cause = f": {self.problem.component}: {self.problem.cause}" if self.problem is not None else ""
        word = "tried" if self.status == "completed" else self.status
        return f"{word:<10} {', '.join(found)}{cause}"


def write_trial(trial: Trial, folder: Path) -> None:
    """Write a trial's spec, recipe and files."""
    assert trial.recipe is not None
    command = ["python", "-P", "-m", MAKER, RECIPE]
    document = {**trial.document, "prepare": {"command": command, "output": MODEL}}
    texts = {SPEC: HEADER + write_value(document), RECIPE: trial.recipe.model_dump_json(), **trial.files}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Make the trial's folder; a temporary one is removed."""
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise InvalidRequest(f"--keep: {keep} is there already: name a folder that is not, or an empty one")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="flotilla-try-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _arguments(folder: Path, *, plain: bool) -> argparse.Namespace:
    """Make the arguments of ``flotilla run``."""
    # Here: the parser names this command, too.
    from flotilla.cli.command_line import build_parser

    words = ["run", str(folder / SPEC), "--runs", str(folder / RUNS), *(["--plain"] if plain else [])]
    return build_parser().parse_args(words)
