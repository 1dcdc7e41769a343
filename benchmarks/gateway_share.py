"""How much of a core the gateway takes while the arithmetic example trains, against the trainer beside it.

The example runs as ``flotilla run`` starts it. Before and after the steps that are measured, behind the first few, each
service's processor time is read: the gateway's share of one core, and its part of what the trainer used meanwhile.
With ``--pages N`` the same run goes on with as many Chromium windows that show the page's Run view, and as many steps
are measured again: what the pages cost is the difference (needs Chromium with ChromeDriver).

``python -m benchmarks.gateway_share [--pages 0] [--steps 60] [--json FILE]``
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from flotilla.cli.run_directory import FLEET
from flotilla.connection import FleetInfo
from tests.browser import open_browser
from tests.fleet import FLOTILLA, ROOT

SPEC = ROOT / "examples" / "arithmetic" / "experiment.yaml"
NAME = "share"
BAR_PERCENT = 6.0
PAGES_BAR_PERCENT = 3.0
WAIT_SECONDS = 400.0
POLL_SECONDS = 1.0
FIRST_STEP = 5
SPARE_STEPS = 500
"""Behind those that are measured: when the run has ended, nobody is there to be asked."""
REDIS = re.compile(r"(?:redis|valkey)-server")
SERVICE = re.compile(r"flotilla\.services\.(\w+)")


@contextmanager
def example(directory: Path, steps: int) -> Iterator[psutil.Process]:
    """Run the example until the block ends, which must be before so many steps and the spare ones were trained."""
    words = (*FLOTILLA, "run", str(SPEC), "--runs", str(directory), "--name", NAME, "--plain")
    words += ("--set", f"optimisation.steps={FIRST_STEP + steps + SPARE_STEPS}")
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        try:
            yield psutil.Process(run.pid)
        finally:
            run.terminate()
            run.wait(60)


class Run:
    """The example's experiment, asked over REST."""

    def __init__(self, fleet: Path) -> None:
        info = FleetInfo.read(fleet)
        self.url, self.token = info.gateway_url, info.token
        self._client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"})

    def view(self) -> dict[str, Any]:
        """Read it; empty as long as there is none."""
        found: list[dict[str, Any]] = self._client.get("/v1/experiments").raise_for_status().json()["items"]
        return found[0] if found else {}


def until(found: Callable[[], Any], what: str) -> Any:
    """Look until something is there."""
    end = time.monotonic() + WAIT_SECONDS
    while not (answer := found()):
        if time.monotonic() > end:
            raise SystemExit(f"waited {WAIT_SECONDS:g} s for {what}")
        time.sleep(POLL_SECONDS)
    return answer


def seconds_of(owner: psutil.Process) -> dict[str, float]:
    """Sum the processor time of a fleet's processes by service."""
    sums: dict[str, float] = {}
    for child in owner.children(recursive=True):
        try:
            words, times = " ".join(child.cmdline()), child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found = SERVICE.search(words)
        name = found[1] if found else "redis" if REDIS.search(words) else "other"
        sums[name] = sums.get(name, 0.0) + times.user + times.system
    return sums


def measure(directory: Path, steps: int, pages: int) -> dict[str, Any]:
    """Run the example once and give the shares: without a page, and with so many."""
    fleet = directory / NAME / FLEET
    with example(directory, steps * (2 if pages else 1)) as owner, ExitStack() as windows:
        until((fleet / "fleet.json").is_file, "the fleet")
        run = Run(fleet)
        view = until(run.view, "the experiment")
        until(lambda: run.view()["step"] >= FIRST_STEP, "the first steps")
        found = {"alone": shares(owner, run, steps)}
        for number in range(pages):
            place = directory / f"window-{number}"
            place.mkdir()
            window = windows.enter_context(open_browser(place))
            window.open(f"{run.url}/#token={run.token}")
            window.wait("h1", "Experiments")
            window.script("location.hash = arguments[0]", f"#/run/{view['id']}")
            window.wait(".chart .uplot canvas")
        if pages:
            found[f"{pages} pages"] = shares(owner, run, steps)
    return found


def shares(owner: psutil.Process, run: Run, steps: int) -> dict[str, Any]:
    """Read what the processes use while so many steps are trained."""
    began, first, before = time.monotonic(), run.view()["step"], seconds_of(owner)
    until(lambda: run.view()["step"] >= first + steps, "the steps")
    seconds, last, after = time.monotonic() - began, run.view()["step"], seconds_of(owner)
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    return {
        "steps": last - first,
        "seconds": round(seconds, 1),
        "gateway_percent_of_a_core": round(100 * used["gateway"] / seconds, 2),
        "gateway_milliseconds_per_step": round(1e3 * used["gateway"] / (last - first), 1),
        "gateway_percent_of_trainer": round(100 * used["gateway"] / used["trainer"], 1),
        "processor_seconds": {name: round(each, 2) for name, each in sorted(used.items())},
    }


def said(share: float, bar: float) -> str:
    """Compare a share with what is wanted."""
    return f"{'below' if share < bar else 'above'} the {bar:g} % wanted"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="that are measured, at least 1")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    with tempfile.TemporaryDirectory(prefix="flotilla-share-") as folder:
        found = measure(Path(folder), arguments.steps, arguments.pages)
    print(json.dumps(found, indent=2))
    share, *with_pages = (each["gateway_percent_of_a_core"] for each in found.values())
    print(f"gateway: {share:g} % of a core ({said(share, BAR_PERCENT)})")
    for each in with_pages:
        cost = each - share
        print(f"{arguments.pages} pages: {cost:.2f} % of a core more ({said(cost, PAGES_BAR_PERCENT)})")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
