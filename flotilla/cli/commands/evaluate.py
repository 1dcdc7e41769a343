"""``flotilla evaluate SPEC``: a fleet of its own answers the held-out problems of a spec, and nothing is trained."""

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path

from flotilla.cli.commands.run import run_on_own_fleet
from flotilla.cli.continuing import overrides_of
from flotilla.cli.output import new_console, short_path, telling
from flotilla.cli.run_directory import RunDirectory
from flotilla.evaluation_spec import evaluation_of, rollouts_of
from flotilla.launch_file import read_launch_file
from flotilla.packages import check_engine, check_packages
from flotilla.server_arguments import ASKING_THE_ENGINE, check_options
from flotilla.shared.errors import InvalidRequest


async def evaluate(arguments: argparse.Namespace) -> int:
    """Measure a model; what it wrote, the figures and the logs stay in a run directory."""
    check_packages()
    console = new_console()
    launch = read_launch_file(Path(arguments.spec), overrides_of(arguments), os.environ)
    model, rows = (None if given is None else Path(given) for given in (arguments.model, arguments.rows))
    suffix = "rollouts" if arguments.training_rows else "evaluation"
    if arguments.training_rows and (rows or arguments.answers):
        raise InvalidRequest("--training-rows answers the rows of the section data: leave --rows and --answers out")
    if arguments.training_rows:
        made = rollouts_of(launch.spec, model=model)
    else:
        made = evaluation_of(launch.spec, model=model, rows=rows, answers=arguments.answers)
    launch = replace(launch, spec=made)
    check_engine(launch.spec, os.environ)
    async with telling(ASKING_THE_ENGINE):
        await check_options(launch.spec)
    directory = RunDirectory(Path(arguments.runs), arguments.name or f"{launch.spec.name}-{suffix}")
    if arguments.training_rows:
        console.print(f"dump       {short_path(directory.path)}   (train it with --set data.dump=PATH)")
    has_earlier = directory.holds_run
    path = directory.take_fresh()
    if has_earlier:
        console.print(
            f"earlier    what was in {short_path(directory.path)} is in {short_path(path.parent / 'earlier')} now"
        )
    console.print(f"run        {short_path(path)}")
    try:
        return await run_on_own_fleet(arguments, launch, directory)
    except asyncio.CancelledError:
        console.print("ended before the evaluation: the same command begins again")
        raise
    finally:
        directory.release()
