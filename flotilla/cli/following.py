"""An experiment followed until it ends: a live view, or lines where nothing can be redrawn."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from pydantic import JsonValue
from rich.live import Live

from flotilla.cli.output import new_console, write_json_line
from flotilla.cli.progress import Pace, Progress, live_line, live_view
from flotilla.cli.right_and_wrong import lines_of_answers
from flotilla.cli.stored import Source
from flotilla.client.asynchronous import AsyncClient
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView

if TYPE_CHECKING:
    from flotilla.cli.fleet import LocalFleet

REFRESH_SECONDS = 0.5
"""Between two looks while anything may come: before the first step, and before the end."""
DRAWN_SECONDS = 1.0
LINE_SECONDS = 2.0
NEAR_SECONDS = 5.0
UNAVAILABLE_BACKOFF_SECONDS = 60.0


@contextlib.asynccontextmanager
async def _display(plain: bool) -> AsyncIterator[Live | None]:
    console = new_console()
    if plain or not console.is_terminal:
        yield None
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield live


def has_ended(view: ExperimentView) -> bool:
    """Whether nothing more happens to an experiment by itself."""
    return view.state.is_final


def is_paused(view: ExperimentView) -> bool:
    """Whether it continues only after a resume."""
    return view.state is ExperimentState.PAUSED


def paused_line(view: ExperimentView) -> str:
    """Return what ends a pause."""
    return (
        f"paused     {view.name}: `flotilla resume {view.id}` lets it go on, `flotilla stop {view.id}` ends it; this "
        "command waits for that"
    )


async def follow(
    progress: Progress,
    client: AsyncClient,
    fleet: "LocalFleet | None",
    *,
    plain: bool,
    leaves: Callable[[ExperimentView], bool] = has_ended,
) -> None:
    """Show an experiment until it ends; a gateway that is unavailable for a while is waited for.

    Args:
        leaves: whether to stop following, by the last reading.

    Raises:
        WorkerDied: a process of the fleet failed for good.
        Unavailable: the gateway stayed away.
    """
    console = new_console()
    started = time.monotonic()
    pace = Pace(progress.view.step)
    last_line = last_seen = started
    told = progress.answers
    was_paused = False
    async with _display(plain) as live:
        while True:
            if fleet is not None:
                fleet.check()
            now = time.monotonic()
            last_seen = await _in_time(_read_on(progress, client), now, last_seen)
            left = pace.seconds_left(progress.view, now)
            is_over = leaves(progress.view) and not progress.has_unread_evaluation
            if progress.answers is not told:
                told = progress.answers
                for name, line in lines_of_answers(told):
                    (live.console if live is not None else console).print(f"  {name:<6} {line}", markup=False)
            if is_paused(progress.view) and not was_paused and not is_over:
                (live.console if live is not None else console).print(paused_line(progress.view), markup=False)
            was_paused = is_paused(progress.view)
            if live is not None:
                live.update(live_view(progress, now - started, left))
            elif now - last_line >= LINE_SECONDS or is_over:
                console.print(live_line(progress, now - started, left), markup=False)
                last_line = now
            if is_over:
                return
            await asyncio.sleep(pause_before_the_next(left, LINE_SECONDS if live is None else DRAWN_SECONDS))


def pause_before_the_next(left: float | None, shown_seconds: float) -> float:
    """Return how long not to ask, in seconds: each look costs the gateway as much as several reports of a step do.

    Args:
        left: seconds until the end; None while no step was seen.
        shown_seconds: how often what was read is shown.
    """
    return REFRESH_SECONDS if left is None else max(REFRESH_SECONDS, min(shown_seconds, left - NEAR_SECONDS))


async def follow_as_json(progress: Progress, client: Source) -> None:
    """Write one JSON document per line, whenever something has changed, until the experiment ends.

    Raises:
        Unavailable: the gateway stayed away.
    """
    last_seen = time.monotonic()
    written: dict[str, JsonValue] = {}
    while True:
        last_seen = await _in_time(progress.refresh(client), time.monotonic(), last_seen)
        facts = facts_of(progress)
        if facts != written:
            written = facts
            write_json_line(facts)
        if progress.view.state.is_final:
            return
        await asyncio.sleep(REFRESH_SECONDS)


def facts_of(progress: Progress) -> dict[str, JsonValue]:
    """Collect what a line of ``watch --json`` says; figures that are not there yet are None."""
    return {
        **progress.view.model_dump(
            mode="json", include={"id", "name", "state", "step", "total_steps", "policy_version", "problem"}
        ),
        "reward": progress.last("reward/mean"),
        "held_out": progress.held_out.newest,
        "lag": progress.last("lag/mean"),
        "completion_tokens": progress.last("completion_tokens/mean"),
    }


async def _read_on(progress: Progress, client: AsyncClient) -> None:
    await progress.refresh(client)
    await progress.read_evaluations(client)


async def _in_time(reading: Awaitable[None], now: float, last_seen: float) -> float:
    """Read on; return when the gateway answered last."""
    try:
        await reading
    except FlotillaError as error:
        if now - last_seen > UNAVAILABLE_BACKOFF_SECONDS or not error.retryable:
            raise
        return last_seen
    return now
