"""``flotilla stop | pause | resume | watch | ledger``: experiments on a running fleet, through REST."""

import argparse
from collections.abc import Callable, Coroutine
from typing import Any

from rich.table import Table

from flotilla.cli.following import follow, follow_as_json
from flotilla.cli.gateway import open_gateway
from flotilla.cli.health import finding_lines
from flotilla.cli.output import new_console, write_json
from flotilla.cli.progress import Progress
from flotilla.cli.reasons import first_words, histograms
from flotilla.connection import find_experiment
from flotilla.shared.schemas.experiment import DiagnosisView, ExperimentState, ExperimentView


def action(name: str) -> Callable[[argparse.Namespace], Coroutine[Any, Any, int]]:
    """Make the command for an action that takes an experiment."""

    async def act(arguments: argparse.Namespace) -> int:
        async with open_gateway(arguments) as client:
            view = await find_experiment(client, arguments.experiment)
            answer = await client.call("POST", f"/v1/experiments/{view.id}/{name}", deadline_seconds=30)
            if arguments.json:
                write_json(answer)
                return 0
            after = f"; `flotilla resume {view.id}` goes on from its last checkpoint" if name == "stop" else ""
            new_console().print(f"{view.id} ({view.name}) is {ExperimentView.model_validate(answer).state}{after}")
        return 0

    return act


pause, resume, stop = action("pause"), action("resume"), action("stop")


async def watch(arguments: argparse.Namespace) -> int:
    """Show an experiment until it ends; Ctrl-C ends the watching only."""
    async with open_gateway(arguments) as client:
        progress = Progress(await find_experiment(client, arguments.experiment))
        if arguments.json:
            await follow_as_json(progress, client)
        else:
            await follow(progress, client, None, plain=arguments.plain)
        return 0 if progress.view.state is not ExperimentState.FAILED else 1


async def diagnose(arguments: argparse.Namespace) -> int:
    """Return what bounds the speed of an experiment."""
    _, content = await _read(arguments, "diagnosis")
    if arguments.json:
        write_json(content)
        return 0
    found = DiagnosisView.model_validate(content)
    console = new_console()
    if found.problem is not None:
        console.print(f"problem    {found.problem.component}: {found.problem.cause}", markup=False)
    for failing in found.failing:
        cause = first_words(failing.cause)
        console.print(f"failing    {failing.service_id}: {failing.component}: {cause}", markup=False)
    for finding in found.health:
        for line in finding_lines(finding):
            console.print(f"health     {line}", markup=False)
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
    view, content = await _read(arguments, "ledger")
    if arguments.json:
        write_json(content)
        return 0
    table = Table("groups", *content, title=f"{view.name} ({view.id})", title_justify="left")
    rows: dict[str, dict[str, str]] = {}
    for lane, counts in content.items():
        for key, value in counts.items():
            if key == "lengths":
                for kind, reason, histogram in histograms(counts):
                    rows.setdefault(f"lengths: {kind} {reason}", {})[lane] = histogram
            elif isinstance(value, dict):
                for inner, count in value.items():
                    rows.setdefault(f"{key}: {inner}", {})[lane] = str(count)
            else:
                rows.setdefault(key, {})[lane] = str(value)
    for name, cells in rows.items():
        table.add_row(name, *(cells.get(lane, "0") for lane in content))
    new_console().print(table)
    return 0


async def _read(arguments: argparse.Namespace, what: str) -> tuple[ExperimentView, Any]:
    """Find the experiment that is meant, and read one thing of it."""
    async with open_gateway(arguments) as client:
        view = await find_experiment(client, arguments.experiment)
        return view, await client.call("GET", f"/v1/experiments/{view.id}/{what}")
