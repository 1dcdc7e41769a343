"""``flotilla run SPEC``: a fleet of its own, one experiment, the result, and nothing left running.

Ctrl-C ends the fleet and nothing else: the experiment stays as it is, and ``--continue`` continues with it, as after a
crash.
"""

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from flotilla.cli.commands.run_seeds import run_seeds
from flotilla.cli.continuing import continue_command, go_on, overrides_of
from flotilla.cli.fleet import LocalFleet
from flotilla.cli.following import follow
from flotilla.cli.gateway import READ_SECONDS, START_SECONDS
from flotilla.cli.output import new_console, short_path, telling
from flotilla.cli.own_fleet import beside, fleet_options, prepare, report, until_settled
from flotilla.cli.progress import FOLLOWED, Progress
from flotilla.cli.run_directory import RunDirectory
from flotilla.client.asynchronous import AsyncClient
from flotilla.launch_file import LaunchFile, read_launch_file
from flotilla.packages import check_engine, check_packages, check_quantisation
from flotilla.server_arguments import ASKING_THE_ENGINE, check_options
from flotilla.shared.locations.allowed import grant_code
from flotilla.sizing import available_here, size_up

Companion = Callable[[str, str, str], Coroutine[None, None, None]]
"""Works on an experiment while it is followed, given gateway, token and experiment, such as an agent that plays it."""


async def run(arguments: argparse.Namespace, *, companion: Companion | None = None, is_kept: bool = True) -> int:
    """Run one experiment from nothing, or from where it ended, to its summary.

    Args:
        arguments: of the command.
        companion: works on the experiment while it is followed.
        is_kept: whether its directory is there afterwards, so that an interrupted run can continue.
    """
    check_packages()
    console = new_console()
    launch = read_launch_file(Path(arguments.spec), overrides_of(arguments), os.environ)
    check_engine(launch.spec, os.environ)
    check_quantisation(launch.spec)
    async with telling(ASKING_THE_ENGINE):
        await check_options(launch.spec)
    directory = RunDirectory(Path(arguments.runs), launch.spec.name)
    path = directory.reopen() if arguments.go_on else directory.take_fresh() if arguments.fresh else directory.take()
    console.print(f"run        {short_path(path)}")
    try:
        if arguments.seeds is not None:
            return await run_seeds(arguments, launch, directory)
        return await run_on_own_fleet(arguments, launch, directory, companion, is_kept=is_kept)
    except asyncio.CancelledError:
        if not is_kept:
            console.print("ended before the trial was over: nothing of it is left (--keep DIR keeps it)")
        elif directory.experiment_id is None:
            console.print("ended before an experiment was created: the same command begins again")
        else:
            written = launch.spec.name if arguments.name is None else ""
            command = continue_command(arguments, name=path.name, default_name=written)
            console.print(f"stopped    after a checkpoint of step {directory.durable_step()}; go on with:")
            console.print(f"\n    {command}\n", markup=False)
        raise
    finally:
        directory.release()


async def run_on_own_fleet(
    arguments: argparse.Namespace,
    launch: LaunchFile,
    directory: RunDirectory,
    companion: Companion | None = None,
    *,
    is_kept: bool = True,
) -> int:
    """Prepare while a fleet starts, run the experiment to its end, and show what came of it; return the exit code.

    Args:
        is_kept: whether the directory is there afterwards, so that its files are worth naming.
    """
    console, started = new_console(), time.monotonic()
    options = await fleet_options(arguments, launch, directory)
    makes = not (arguments.go_on and directory.holds_run)
    async with contextlib.AsyncExitStack() as held:
        # What takes a fleet to start and a model to be made is two cores' work, and neither needs the other.
        async with beside(_prepared(launch, started, options.num_rollouts, makes=makes)):
            fleet = LocalFleet(options, lambda line: console.print(line, markup=False))
            await held.enter_async_context(fleet)
        console.print(f"gateway    {fleet.gateway_url}   (logs in {short_path(options.data / 'logs')})")
        async with AsyncClient(fleet.gateway_url, fleet.info.token, deadline_seconds=READ_SECONDS) as client:
            grant_code(options.data, launch.document)
            try:
                progress = await _train(fleet, client, launch, directory, arguments, companion)
            except asyncio.CancelledError:
                what = "the trainer writes a checkpoint; " if launch.spec.trains else ""
                console.print(f"stopping   {what}Ctrl-C again ends everything at once")
                raise
            await until_settled(progress, client)
            return await report(progress, client, directory.path, time.monotonic() - started, is_kept=is_kept)


async def _prepared(launch: LaunchFile, started: float, rollouts: int, *, makes: bool) -> None:
    """Prepare what the spec names, and print what will be used of this machine.

    Raises:
        InvalidSpec: it cannot fit.
    """
    console = new_console()
    await prepare(launch, console, started, makes=makes)
    sizing = await asyncio.to_thread(size_up, launch.spec, rollouts=rollouts)
    for line in sizing.lines(available_here(), is_brief=True):
        console.print(line, markup=False, highlight=False)
    sizing.check(available_here())


async def _train(
    fleet: LocalFleet,
    client: AsyncClient,
    launch: LaunchFile,
    directory: RunDirectory,
    arguments: argparse.Namespace,
    companion: Companion | None,
) -> Progress:
    """Create the experiment, or let it continue, and follow it to its end; what works beside that ends with it."""
    console, view = new_console(), None
    if arguments.go_on:
        view = await go_on(client, directory.experiment_id, launch.spec, console.print)
    if view is None:
        view = await client.with_deadline(START_SECONDS).create(launch.document, start=True)
    directory.record(view.id)
    progress = Progress(view, FOLLOWED)
    following = follow(progress, client, fleet, plain=arguments.plain)
    if companion is None:
        await following
    else:
        async with beside(companion(fleet.gateway_url, fleet.info.token, view.id)):
            await following
    return progress
