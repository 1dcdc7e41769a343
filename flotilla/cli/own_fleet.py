"""What runs on a fleet of their own have in common: what the fleet needs, what is made first, and what is reported."""

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path

from rich.console import Console

from flotilla.cli.device_division import check_devices, wishes_of
from flotilla.cli.fleet import FleetOptions, log_bounds_of
from flotilla.cli.following import REFRESH_SECONDS
from flotilla.cli.gateway import ACT_SECONDS
from flotilla.cli.output import new_console, short_path
from flotilla.cli.plots import write_plot
from flotilla.cli.progress import Progress, duration
from flotilla.cli.right_and_wrong import read_last
from flotilla.cli.run_directory import FLEET, RunDirectory
from flotilla.cli.summary import show_summary, summarise, write_summary
from flotilla.client.asynchronous import AsyncClient
from flotilla.launch_file import LaunchFile, fetch_model, run_prepare
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.service.devices import machine_devices, own_devices

SETTLE_SECONDS = 10.0


@contextlib.asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncGenerator[None, None]:
    """Do ``work`` while the body continues, and leave when both are done.

    The first failure of either cancels the other, which is waited for, and is what is raised. Cancelling ends both.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(work)
            yield
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def fleet_options(arguments: argparse.Namespace, launch: LaunchFile, directory: RunDirectory) -> FleetOptions:
    """Return which fleet an experiment needs, where the command does not.

    Raises:
        InvalidSpec: it needs more devices than the machine has.
    """
    check_devices(launch.spec, len(own_devices(await asyncio.to_thread(machine_devices), os.environ)))
    resources, sampled = launch.spec.resources, launch.spec.samples_answers
    return FleetOptions(
        data=directory.path / FLEET,
        num_rollouts=arguments.rollouts or (resources.rollouts.min if launch.spec.needs_rollouts else 0),
        num_trainers=(arguments.trainers or launch.spec.parallelism.nodes) if launch.spec.trains else 0,
        num_rewards=arguments.rewards or (resources.rewards.min if sampled else 0),
        lends=resources.lending is not None,
        num_sandboxes=arguments.sandboxes or (resources.sandboxes.min if resources.sandboxes else int(sampled)),
        host="127.0.0.1",
        port=arguments.port,
        redis_url=arguments.redis_url,
        log_level=arguments.log_level,
        log_bounds=log_bounds_of(arguments),
        devices=wishes_of(launch.spec),
    )


async def prepare(launch: LaunchFile, console: Console, began: float, *, makes: bool) -> None:
    """Make or fetch what the spec names, on this machine, where all of the fleet is.

    Args:
        began: when the command did, on the monotonic clock.
        makes: whether the launch file's ``prepare`` is run, too.
    """
    if makes:
        await run_prepare(launch, lambda line: console.print(f"prepare    {line}", markup=False))
    await fetch_model(launch.spec, lambda line: console.print(f"model      {line}", markup=False))
    console.print(f"prepared   after {duration(time.monotonic() - began)}")


async def report(progress: Progress, client: AsyncClient, path: Path, wall_seconds: float, *, is_kept: bool) -> int:
    """Write and show what a run has come to; return the exit code.

    Args:
        is_kept: whether the directory is there afterwards, so that its files are worth naming.

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
        console.print("the evaluation has given no figure: see flotilla show and the logs")
        return 1
    return 0 if progress.view.state is ExperimentState.COMPLETED else 1


async def until_settled(progress: Progress, client: AsyncClient) -> None:
    """Wait until what was left of an experiment that failed is accounted for, so that the ledger shown is its last."""
    end = time.monotonic() + SETTLE_SECONDS
    while progress.ledger and progress.ledger.outstanding and time.monotonic() < end:
        await asyncio.sleep(REFRESH_SECONDS)
        await progress.refresh(client)
