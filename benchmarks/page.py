"""How soon a long run is on the screen: the page's Run view of 10,000 steps, against that of the recorded demo.

The folder of the long run is made of the recorded one of ``flotilla page --demo``: its series go on for so many steps,
as many of them as the points allow, the page's own first. Chromium opens both by ``flotilla page``, and the long run
from its database too, as a gateway at work reads it. A view is there once all of its charts are drawn; seconds are the
browser's own, from the beginning of the navigation. The first in a new window has loaded nothing before.

``python -m benchmarks.page [--steps 10000] [--points 100000] [--rounds 5] [--json FILE]``
"""

import argparse
import asyncio
import json
import math
import random
import re
import secrets
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flotilla.cli.demo.unpacking import unpack
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.left_behind import DATABASE
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.shared.clock import SystemClock
from flotilla.shared.net.server.serving import address_of, bind, serve_here
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.browser import Browser, open_browser
from tests.fleet import FLOTILLA, ROOT

BAR_SECONDS = 1.0
SECONDS_PER_STEP = 3
ON_SCREEN = r"^(reward/|time/|lag/|groups/flat|ratio/|correction/(kl|weight|effective)|loss/|entropy|grad_norm|tokens/)"
"""Series that charts are drawn of; others are stored and not asked for."""
WATCH = """
window.drawnAt = new Promise((resolve) => {
  const look = () => {
    const charts = document.querySelectorAll('.chart');
    const drawn = document.querySelectorAll('.chart .uplot canvas');
    if (charts.length >= WANTED && drawn.length >= charts.length) {
      requestAnimationFrame(() => resolve(performance.now() / 1000));
    } else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
});
"""


def long_run(folder: Path, steps: int, points: int) -> str:
    """Let the recorded run go on for so many steps, of so many values; gives the experiment's id."""
    unpack(folder)
    chance = random.Random(1)
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        ((experiment,),) = database.execute("SELECT id FROM experiments").fetchall()
        known = [name for (name,) in database.execute("SELECT name FROM metrics GROUP BY name HAVING count(*) > 30")]
        chosen = sorted(known, key=lambda name: (re.match(ON_SCREEN, name) is None, name))[: points // steps]
        scales = dict(database.execute("SELECT name, max(abs(value)) FROM metrics GROUP BY name"))
        database.execute("DELETE FROM metrics")
        began = datetime(2026, 1, 1, tzinfo=UTC)
        rows = (
            (experiment, name, step, step, scales[name] * value(chance, step / steps), at)
            for step in range(1, steps + 1)
            for at in [(began + timedelta(seconds=SECONDS_PER_STEP * step)).isoformat()]
            for name in chosen
        )
        database.executemany(
            "INSERT INTO metrics (experiment_id, name, step, version, value, at) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
        database.execute("UPDATE experiments SET step = ?, policy_version = ?", (steps, steps))
        database.commit()
    return str(experiment)


def value(chance: random.Random, share: float) -> float:
    """Rise and level off, with noise."""
    return 1 - math.exp(-4 * share) + chance.gauss(0, 0.1)


@contextmanager
def shown(*words: str) -> Iterator[str]:
    """Run what serves the page; gives its address with the token."""
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            lines = iter(serving.stdout.readline, "")
            yield next(found[0] for line in lines if (found := re.search(r"http://\S+#token=\S+", line)))
        finally:
            serving.terminate()
            serving.wait(60)


def seconds_to(browser: Browser, url: str) -> float:
    """Load the page anew, and wait until all charts are drawn."""
    browser.open("about:blank")
    browser.open(url)
    return float(browser.script("return window.drawnAt"))


def measure(url: str, experiment: str, rounds: int) -> dict[str, Any]:
    """Open a Run view in a new window, and then again."""
    address, _, token = url.partition("#token=")
    with tempfile.TemporaryDirectory(prefix="flotilla-page-") as folder, open_browser(Path(folder)) as browser:
        browser.open(url)
        browser.wait("h1", "Experiments")
        browser.script("location.hash = arguments[0]", f"#/run/{experiment}")
        browser.wait(".chart .uplot canvas")
        charts = len(browser.texts(".chart"))
    with tempfile.TemporaryDirectory(prefix="flotilla-page-") as folder, open_browser(Path(folder)) as browser:
        # The token of a tab is kept by its origin: another page of it is opened first, which loads none of the files.
        browser.open(f"{address}healthz")
        browser.script("sessionStorage.setItem('flotilla-token', arguments[0])", token)
        browser.before_scripts(WATCH.replace("WANTED", str(charts)))
        found = [seconds_to(browser, f"{address}#/run/{experiment}") for _ in range(rounds + 1)]
        sent = browser.script(
            "return performance.getEntriesByType('resource').filter((each) => each.name.includes('/series'))"
            ".reduce((sum, each) => sum + each.encodedBodySize, 0)"
        )
    return {
        "charts": charts,
        "first_seconds": round(found[0], 3),
        "median_seconds": round(statistics.median(found[1:]), 3),
        "slowest_seconds": round(max(found[1:]), 3),
        "series_kilobytes": round(sent / 1000),
    }


def _open_nothing(experiment_id: str, lane: Lane, *, lease_seconds: float | None = None) -> MemoryDataPlane:
    return MemoryDataPlane(lane)


async def _ping_nothing() -> None:
    """There is no data plane."""


@asynccontextmanager
async def stored_state(settings: GatewaySettings) -> AsyncIterator[GatewayState]:
    """Answer from a database, as a gateway at work does, and let nothing work on it."""
    store = await SqlStore.open(settings.resolved_database_url)
    state = GatewayState(settings, store, _open_nothing, _ping_nothing, SystemClock())
    await state.load()
    try:
        yield state
    finally:
        await store.close()


async def serve_database(folder: Path) -> None:
    """Serve the page on a database until the process is ended."""
    settings = GatewaySettings(token=secrets.token_urlsafe(32), redis_url="", data=folder)
    with bind("127.0.0.1", 0) as listening:
        print(f"{address_of(listening)}/#token={settings.token}", flush=True)
        await serve_here(create_app(settings, open_state=stored_state), listening)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=100_000, help="at least one for each step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve_database(arguments.serve))
        return
    if not 1 <= arguments.steps <= arguments.points:
        parser.error("--points must be at least --steps")
    with tempfile.TemporaryDirectory(prefix="flotilla-page-") as place:
        folder = Path(place)
        experiment = long_run(folder, arguments.steps, arguments.points)
        page = (*FLOTILLA, "page", "--no-browser")
        served = {
            "demo": (*page, "--demo"),
            "long run, from its folder": (*page, str(folder)),
            "long run, from its database": (sys.executable, "-m", "benchmarks.page", "--serve", str(folder)),
        }
        found = {}
        for name, words in served.items():
            with shown(*words) as url:
                found[name] = measure(url, experiment, arguments.rounds)
    print(json.dumps(found, indent=2))
    reference = found["demo"]["first_seconds"]
    for name, each in found.items():
        first = each["first_seconds"]
        said = "below" if first < BAR_SECONDS else "above"
        print(f"{name}: first view {first:g} s, {first / reference:.2f} of the demo's, {said} {BAR_SECONDS:g} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
