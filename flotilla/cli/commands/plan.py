"""``flotilla plan``: what a run would do with more rollouts, other bounds on lag, other lengths or a slower grader."""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from flotilla.cli.commands.replay import directory_of
from flotilla.cli.commands.show import experiment_directory
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.output import new_console, table_of, telling, write_json
from flotilla.cli.recorded_run import read_run
from flotilla.planning.prediction import Change, Figures, Prediction, predict
from flotilla.planning.recorded import RecordedRun
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.errors import InvalidRequest, Unavailable

ROWS = (
    ("step", "step_seconds", "{:.3f} s"),
    ("tokens trained", "tokens_per_second", "{:.0f}/s"),
    ("lag", "lag", "{:.2f}"),
    ("trainer waits", "waits", "{:.0%}"),
    ("rollouts idle", "rollouts_idle", "{:.0%}"),
    ("what binds", "binds", "{}"),
)


async def plan(arguments: argparse.Namespace) -> int:
    """Predict, and print measured and predicted figures side by side."""
    is_file = arguments.experiment is not None and await asyncio.to_thread(Path(arguments.experiment).is_file)
    if is_file != (arguments.probe is not None):
        raise InvalidRequest(
            "an experiment file has no records, and anything else needs no probe: flotilla plan SPEC --probe runs two "
            "steps of SPEC first, flotilla plan RUN reads a run"
        )
    run = await _probed(arguments) if is_file else await _recorded(arguments)
    cores = float(arguments.had_cores or len(os.sched_getaffinity(0)))
    async with telling("simulating"):
        try:
            change = change_of(arguments)
            found = await on_daemon_thread(lambda: predict(run, change, cores), "simulation")
        except (ValueError, ArithmeticError) as error:
            raise InvalidRequest(f"this cannot run: {error}") from error
    if arguments.json:
        write_json(found.document())
    else:
        _print(found)
    return ExitCode.DONE


def change_of(arguments: argparse.Namespace) -> Change:
    """Read the change from the command line."""
    return Change(
        rollouts=arguments.rollouts,
        staleness=arguments.staleness,
        group_size=arguments.group_size,
        groups=arguments.groups,
        steps_per_version=arguments.steps_per_version,
        slots=arguments.slots,
        lengths=arguments.lengths,
        max_new_tokens=arguments.max_new_tokens,
        grading=arguments.grading,
        cores=arguments.cores,
    )


async def _recorded(arguments: argparse.Namespace) -> RecordedRun:
    directory = experiment_directory(arguments) or await directory_of(arguments, "plan it where its records are")
    async with telling("reading the run"):
        return await read_run(directory)


async def _probed(arguments: argparse.Namespace) -> RecordedRun:
    """Run a few steps of a spec in a folder that is removed again, and read what they recorded.

    Raises:
        Unavailable: it failed; its output has the reason.
    """
    changed = [f"optimisation.steps={arguments.probe}", "evaluation=null", "samples={}"]
    options = [option for each in changed for option in ("--set", each)]
    with tempfile.TemporaryDirectory(prefix="flotilla-probe-") as runs:
        command = [
            "-m",
            "flotilla",
            "run",
            arguments.experiment,
            "--plain",
            "--runs",
            runs,
            "--name",
            "probe",
            *options,
        ]
        child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=sys.stderr)
        try:
            code = await child.wait()
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise
        if code:
            raise Unavailable(f"the probe of {arguments.experiment} ended with code {code}")
        return await read_run(Path(runs) / "probe")


def _print(found: Prediction) -> None:
    console = new_console()
    columns = ("", "measured", "simulated", "with the change", "")
    rows = [
        (name, *(_cell(figures, key, form) for figures in _figures(found)), _ratio(found, key))
        for name, key, form in ROWS
    ]
    console.print(table_of(columns, rows))
    console.print(f"then {found.cause}", markup=False)
    console.print(f"next {found.advice}", markup=False)


def _figures(found: Prediction) -> tuple[Figures, Figures, Figures]:
    return found.measured, found.simulated, found.predicted


def _cell(figures: Figures, key: str, form: str) -> str:
    value = getattr(figures, key)
    return "" if value is None else form.format(value)


def _ratio(found: Prediction, key: str) -> str:
    if key not in {"step_seconds", "tokens_per_second"}:
        return ""
    return f"{getattr(found.predicted, key) / getattr(found.measured, key) - 1:+.0%}"
