"""``flotilla run SPEC``: a fleet of its own, one experiment, the result, and nothing left running.

Ctrl-C ends the fleet and nothing else: the experiment stays as it is, and ``--continue`` goes on with it, as after a
crash.
"""

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path

from rich.console import Console

from flotilla.cli.continuing import continue_command, go_on, overrides_of
from flotilla.cli.device_division import check_devices, wishes_of
from flotilla.cli.fleet import FleetOptions, LocalFleet, log_bounds_of
from flotilla.cli.following import REFRESH_SECONDS, follow
from flotilla.cli.gateway import ACT_SECONDS, READ_SECONDS, START_SECONDS
from flotilla.cli.output import new_console, short_path, telling
from flotilla.cli.plots import write_plot
from flotilla.cli.progress import Progress, duration
from flotilla.cli.right_and_wrong import read_last
from flotilla.cli.run_directory import FLEET, RunDirectory
from flotilla.cli.summary import show_summary, summarise, write_summary
from flotilla.client.asynchronous import AsyncClient
from flotilla.launch_file import LaunchFile, fetch_model, read_launch_file, run_prepare
from flotilla.packages import check_engine, check_packages, check_quantisation
from flotilla.server_arguments import ASKING_THE_ENGINE, check_options
from flotilla.shared.errors import Unavailable
from flotilla.shared.locations.allowed import grant_code
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.service.devices import machine_devices, own_devices


@contextlib.asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncGenerator[None, None]:
    """Do ``work`` while the body goes on, and leave when both are done.

    The first failure of either cancels the other, which is waited for, and is what is raised. Cancelling ends both.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(work)
            yield
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


SETTLE_SECONDS = 10.0
Companion = Callable[[str, str, str], Coroutine[None, None, None]]
"""Works on an experiment while it is followed, given gateway, token and experiment, such as an agent that plays it."""


async def run(arguments: argparse.Namespace, *, companion: Companion | None = None, is_kept: bool = True) -> int:
    """Run one experiment from nothing, or from where it ended, to its summary.

    Args:
        arguments: of the command.
        companion: works on the experiment while it is followed.
        is_kept: whether its directory is there afterwards, so that an interrupted run can go on.
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
    check_devices(launch.spec, len(own_devices(await asyncio.to_thread(machine_devices), os.environ)))
    resources, sampled = launch.spec.resources, launch.spec.samples_answers
    options = FleetOptions(
        data=directory.path / FLEET,
        num_rollouts=arguments.rollouts or (resources.rollouts.min if launch.spec.needs_rollouts else 0),
        num_trainers=(arguments.trainers or launch.spec.parallelism.nodes) if launch.spec.trains else 0,
        num_rewards=arguments.rewards or (resources.rewards.min if sampled else 0),
        num_sandboxes=arguments.sandboxes or (resources.sandboxes.min if resources.sandboxes else int(sampled)),
        host="127.0.0.1",
        port=arguments.port,
        redis_url=arguments.redis_url,
        log_level=arguments.log_level,
        log_bounds=log_bounds_of(arguments),
        devices=wishes_of(launch.spec),
    )
    makes = not (arguments.go_on and directory.holds_run)
    async with contextlib.AsyncExitStack() as held:
        # What takes a fleet to start and a model to be made is two cores' work, and neither needs the other.
        async with beside(_prepare(launch, console, started, makes=makes)):
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
            await _until_settled(progress, client)
            return await _report(progress, client, directory.path, time.monotonic() - started, is_kept=is_kept)


async def _prepare(launch: LaunchFile, console: Console, began: float, *, makes: bool) -> None:
    """Make or fetch what the spec names, on this machine, where all of the fleet is.

    Args:
        began: when the command did, on the monotonic clock.
        makes: whether the launch file's ``prepare`` is run, too.
    """
    if makes:
        await run_prepare(launch, lambda line: console.print(f"prepare    {line}", markup=False))
    await fetch_model(launch.spec, lambda line: console.print(f"model      {line}", markup=False))
    console.print(f"prepared   after {duration(time.monotonic() - began)}")


async def _train(
    fleet: LocalFleet,
    client: AsyncClient,
    launch: LaunchFile,
    directory: RunDirectory,
    arguments: argparse.Namespace,
    companion: Companion | None,
) -> Progress:
    """Create the experiment, or let it go on, and follow it to its end; what works beside that ends with it."""
    console, view = new_console(), None
    if arguments.go_on:
        view = await go_on(client, directory.experiment_id, launch.spec, console.print)
    if view is None:
        view = await client.with_deadline(START_SECONDS).create(launch.document, start=True)
    directory.record(view.id)
    progress = Progress(view)
    following = follow(progress, client, fleet, plain=arguments.plain)
    if companion is None:
        await following
    else:
        async with beside(companion(fleet.gateway_url, fleet.info.token, view.id)):
            await following
    return progress


async def _report(progress: Progress, client: AsyncClient, path: Path, wall_seconds: float, *, is_kept: bool) -> int:
    """Write and show what a run has come to; return the exit code.

    Raises:
        Unavailable: a file cannot be written.
    """
    checkpoints = await client.with_deadline(ACT_SECONDS).checkpoints(progress.view)
    unwritten = ""
    plot = path / "plot.png"
    try:
        has_plot = progress.view.total_steps > 0 and write_plot(progress, plot)
    except OSError as error:
        has_plot, unwritten = False, f"{plot} could not be written: {error.strerror}"
    made = plot if has_plot else None
    logs = path / FLEET / "logs"
    summary = summarise(
        progress,
        wall_seconds=wall_seconds,
        checkpoints=checkpoints,
        logs=logs,
        plot=made,
        samples=await read_last(client, progress),
        run=path,
    )
    console = new_console()
    show_summary(console, summary, took="this command took", names_files=is_kept)
    kind = "" if progress.view.total_steps else " --kind evaluation"
    if is_kept:
        console.print(f"samples    flotilla show {short_path(path)}{kind}", markup=False)
    try:
        write_summary(summary, path / "summary.json")
    except OSError as error:
        unwritten = f"{path / 'summary.json'} could not be written: {error.strerror}"
    if unwritten:
        raise Unavailable(unwritten)
    if not (progress.view.total_steps or progress.held_out.points):
        console.print("the evaluation has given no figure: flotilla show and the logs say what became of the answers")
        return 1
    return 0 if progress.view.state is ExperimentState.COMPLETED else 1


async def _until_settled(progress: Progress, client: AsyncClient) -> None:
    """Wait until what was left of an experiment that failed is accounted for, so that the ledger shown is its last."""
    end = time.monotonic() + SETTLE_SECONDS
    while progress.ledger and progress.ledger.outstanding and time.monotonic() < end:
        await asyncio.sleep(REFRESH_SECONDS)
        await progress.refresh(client)
