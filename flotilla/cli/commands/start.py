"""``flotilla start | prepare``: what a launch file becomes on a running fleet, or over REST."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flotilla.cli.commands.continuing import absolute_reference, fork_of
from flotilla.cli.gateway import COPY_SECONDS, START_SECONDS, open_gateway
from flotilla.cli.output import new_console, write_json
from flotilla.launch_file import LaunchFile, read_launch_file, run_prepare
from flotilla.shared.errors import InvalidRequest


def _launch_file(arguments: argparse.Namespace, overrides: Sequence[str] = ()) -> LaunchFile:
    seed = [] if arguments.seed is None else [f"seed={arguments.seed}"]
    return read_launch_file(Path(arguments.spec), [*(arguments.set or []), *seed, *overrides], os.environ)


async def prepare(arguments: argparse.Namespace) -> int:
    """Make what a launch file needs; print the spec that ``POST /v1/experiments`` takes, and nothing else."""
    launch = _launch_file(arguments)
    await run_prepare(launch, lambda line: print(f"prepare    {line}", file=sys.stderr))
    write_json(launch.document)
    return 0


async def start(arguments: argparse.Namespace) -> int:
    """Create and start an experiment from a spec file, from another's checkpoint, or from both.

    Raises:
        InvalidRequest: neither is named.
    """
    if arguments.spec is None and arguments.origin is None:
        raise InvalidRequest("name an experiment file to start, or --from EXPERIMENT[@STEP] to begin from a checkpoint")
    async with open_gateway(arguments) as client:
        if arguments.spec is None:
            view = await fork_of(client, arguments)
        else:
            origin = [] if arguments.origin is None else [await absolute_reference(client, arguments.origin)]
            launch = _launch_file(arguments, [f"checkpoint.resume_from={json.dumps(each)}" for each in origin])
            await run_prepare(launch, lambda line: print(f"prepare    {line}", file=sys.stderr))
            seconds = COPY_SECONDS if launch.spec.checkpoint.resume_from else START_SECONDS
            view = await client.with_deadline(seconds).create(launch.document, start=True)
    if arguments.json:
        write_json(view.model_dump(mode="json"))
    else:
        begins = "" if view.origin is None else f" from step {view.origin.step} of {view.origin.experiment_id}"
        begins += "" if view.groups_from is None else f" on the groups of {view.groups_from}"
        new_console().print(f"{view.id} ({view.name}) starts{begins}; `flotilla watch {view.id}` follows it")
    return 0
