"""``flotilla stop | pause | resume | watch | ledger``: experiments on a running fleet, through REST."""

import argparse
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rich.table import Table

from flotilla.cli.following import follow, follow_as_json
from flotilla.cli.gateway import ACT_SECONDS, open_gateway
from flotilla.cli.health import finding_lines, rule_lines
from flotilla.cli.output import new_console, write_json
from flotilla.cli.progress import FOLLOWED, Progress
from flotilla.cli.reasons import first_words, histograms
from flotilla.client.asynchronous import AsyncClient, Reference
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView


def action(
    act: Callable[[AsyncClient, Reference], Awaitable[ExperimentView]], after: str = ""
) -> Callable[[argparse.Namespace], Coroutine[Any, Any, int]]:
    """Make the command for an action that takes an experiment; ``after`` is said behind its state."""

    async def command(arguments: argparse.Namespace) -> int:
        async with open_gateway(arguments) as client:
            view = await act(client.with_deadline(ACT_SECONDS), await client.experiment(arguments.experiment))
        if arguments.json:
            write_json(view.model_dump(mode="json"))
        else:
            new_console().print(f"{view.id} ({view.name}) is {view.state}{after.format(view.id)}")
        return 0

    return command


pause, resume = action(AsyncClient.pause), action(AsyncClient.resume)
stop = action(AsyncClient.stop, "; `flotilla resume {}` goes on from its last checkpoint")


async def watch(arguments: argparse.Namespace) -> int:
    """Show an experiment until it ends; Ctrl-C ends the watching only."""
    async with open_gateway(arguments) as client:
        progress = Progress(await client.experiment(arguments.experiment), FOLLOWED)
        if arguments.json:
            await follow_as_json(progress, client)
        else:
            await follow(progress, client, None, plain=arguments.plain)
        return 0 if progress.view.state is not ExperimentState.FAILED else 1


async def diagnose(arguments: argparse.Namespace) -> int:
    """Return what bounds the speed of an experiment."""
    async with open_gateway(arguments) as client:
        found = await client.diagnosis(await client.experiment(arguments.experiment))
    if arguments.json:
        write_json(found.model_dump(mode="json"))
        return 0
    console = new_console()
    if found.problem is not None:
        console.print(f"problem    {found.problem.component}: {found.problem.cause}", markup=False)
    for failing in found.failing:
        cause = first_words(failing.cause)
        console.print(f"failing    {failing.service_id}: {failing.component}: {cause}", markup=False)
    for finding in found.health:
        for line in finding_lines(finding):
            console.print(f"health     {line}", markup=False)
    for rule in found.rules:
        for line in rule_lines(rule):
            console.print(f"rule       {line}", markup=False)
    if found.lending is not None:
        console.print(f"lending    {found.lending}", markup=False)
    console.print(f"bottleneck {found.component}: {found.cause}", markup=False)
    if found.advice:
        console.print(f"advice     {found.advice}", markup=False)
    if found.window_seconds == 0:
        console.print("evidence   none: figures are those of the last minute at work", markup=False)
        return 0
    table = Table("evidence", f"last {found.window_seconds:.0f} s", title_justify="left")
    for name, value in sorted(found.evidence.items()):
        table.add_row(name, f"{value:.3g}")
    console.print(table)
    return 0


async def ledger(arguments: argparse.Namespace) -> int:
    """Show where every issued group is."""
    async with open_gateway(arguments) as client:
        view = await client.experiment(arguments.experiment)
        lanes = (await client.ledger(view))._asdict()
    if arguments.json:
        write_json({lane: counts.model_dump(mode="json") for lane, counts in lanes.items()})
        return 0
    table = Table("groups", *lanes, title=f"{view.name} ({view.id})", title_justify="left")
    rows: dict[str, dict[str, str]] = {}
    for lane, counts in lanes.items():
        for key, value in counts.model_dump(exclude={"lengths"}).items():
            if isinstance(value, dict):
                for inner, count in value.items():
                    rows.setdefault(f"{key}: {inner}", {})[lane] = str(count)
            else:
                rows.setdefault(key, {})[lane] = str(value)
        for kind, reason, histogram in histograms(counts):
            rows.setdefault(f"lengths: {kind} {reason}", {})[lane] = histogram
    for name, cells in rows.items():
        table.add_row(name, *(cells.get(lane, "0") for lane in lanes))
    new_console().print(table)
    return 0
