"""``flotilla start | prepare``: what a launch file becomes on a running fleet, or over REST."""

import argparse
import os
import sys
from pathlib import Path

from flotilla.cli.output import new_console, write_json
from flotilla.connection import open_client
from flotilla.launch_file import LaunchFile, read_launch_file, run_prepare
from shared.schemas.experiment import ExperimentView


def _launch_file(arguments: argparse.Namespace) -> LaunchFile:
    overrides = [*(arguments.set or []), *([f"seed={arguments.seed}"] if arguments.seed is not None else [])]
    return read_launch_file(Path(arguments.spec), overrides, os.environ)


async def prepare(arguments: argparse.Namespace) -> int:
    """Make what a launch file needs; print the spec that ``POST /v1/experiments`` takes, and nothing else."""
    launch = _launch_file(arguments)
    await run_prepare(launch, lambda line: print(f"prepare    {line}", file=sys.stderr))
    write_json(launch.document)
    return 0


async def start(arguments: argparse.Namespace) -> int:
    """Create and start an experiment from a spec file."""
    console = new_console()
    launch = _launch_file(arguments)
    async with open_client(arguments.gateway, Path(arguments.data)) as client:
        await run_prepare(launch, lambda line: console.print(f"prepare    {line}", markup=False))
        view = ExperimentView.model_validate(
            await client.call("POST", "/v1/experiments", body=launch.document, deadline_seconds=30)
        )
        await client.call("POST", f"/v1/experiments/{view.id}/start", deadline_seconds=30)
        console.print(f"{view.id} ({view.name}) starts; `flotilla watch {view.id}` follows it")
    return 0
