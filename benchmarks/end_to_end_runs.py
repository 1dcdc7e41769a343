"""One run of each side of ``benchmarks.end_to_end``: our fleet, and TRL in an environment of its own."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.trainer import TRL_PYTHON
from flotilla.shared.checkpoints.folders import CHECKPOINTS, MODEL, complete
from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import running_fleet

CHILD = Path(__file__).with_name("trl_run.py")
POLL_SECONDS = 0.25
START_POLL_SECONDS = 0.02
START_SECONDS = 120.0
SHOWN_EVERY_SECONDS = 2.0
END_SECONDS = 30.0
PAGE = 1000
STEP_ENDS, MEAN_TOKENS, SAMPLES = "time/step_seconds", "completion_tokens/mean", "samples/in_step"
WAIT, COMPUTE = "time/wait_seconds", "time/compute_seconds"


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        started: when everything was loaded and the first task could be issued; seconds since the epoch.
        ends: when each step ended.
        tokens: sampled tokens of each step, without prompts.
        kept: weights by step: a model's directory.
        waited, computed: seconds of each step in which the trainer waited for groups, and computed; of ours alone.
    """

    started: float
    ends: Sequence[float]
    tokens: Sequence[float]
    kept: Mapping[int, Path] = field(default_factory=dict)
    waited: Sequence[float] = ()
    computed: Sequence[float] = ()

    def seconds_per_step(self, warmup: int) -> float:
        """Return the mean time of a step, without the first ones, and without the last, which ends with the run."""
        return (self.ends[-2] - self.ends[warmup - 1]) / (len(self.ends) - 1 - warmup)

    def tokens_per_step(self, warmup: int) -> float:
        """Return the mean of sampled tokens of the same steps."""
        return fmean(self.tokens[warmup:-1])

    def seconds_until(self, step: int) -> float:
        """Return the time from the start to the end of a step."""
        return self.ends[step - 1] - self.started


class Shown:
    """Says how far a run is, from time to time.

    Args:
        what: the run.
        steps: that it makes.
    """

    def __init__(self, what: str, steps: int) -> None:
        self._what, self._steps = what, steps
        self._next = 0.0

    def step(self, step: int) -> None:
        """Say how many steps are done, if nothing was said lately."""
        if time.monotonic() >= self._next or step == self._steps:
            self.line(f"step {step} of {self._steps}")

    def line(self, text: str) -> None:
        """Say something now."""
        print(f"  {self._what}: {text}", file=sys.stderr, flush=True)
        self._next = time.monotonic() + SHOWN_EVERY_SECONDS


def run_ours(spec: dict[str, Any], directory: Path, shown: Shown, **environment: str) -> Run:
    """Run an experiment on a fleet of its own.

    Raises:
        SystemExit: it failed.
    """
    shown.line("the fleet starts")
    with running_fleet(directory, **environment) as fleet:
        return asyncio.run(_followed(spec, fleet.client(), shown))


async def _followed(spec: dict[str, Any], client: GatewayClient, shown: Shown) -> Run:
    async with client:
        await _until_fleet(client)
        view = await client.call("POST", "/v1/experiments", body=spec, params={"start": "true"}, deadline_seconds=60)
        path = f"/v1/experiments/{view['id']}"
        while view["state"] in {"draft", "starting"}:
            await asyncio.sleep(START_POLL_SECONDS)
            view = await client.call("GET", path)
        started = time.time()
        while view["state"] not in {"completed", "stopped", "failed"}:
            await asyncio.sleep(POLL_SECONDS)
            view = await client.call("GET", path)
            shown.step(view["step"])
        if view["state"] != "completed":
            raise SystemExit(f"the experiment ended in state {view['state']}: {view['problem']}")
        series = await series_of(client, path, (STEP_ENDS, MEAN_TOKENS, SAMPLES, WAIT, COMPUTE))
        steps = range(1, view["step"] + 1)
        return Run(
            started,
            ends=[series[STEP_ENDS][step][1] for step in steps],
            tokens=[series[MEAN_TOKENS][step][0] * series[SAMPLES][step][0] for step in steps],
            kept={each.step: each.path / MODEL for each in complete(Path(view["directory"]) / CHECKPOINTS)},
            waited=[series[WAIT][step][0] for step in steps],
            computed=[series[COMPUTE][step][0] for step in steps],
        )


async def _until_fleet(client: GatewayClient) -> None:
    end = time.monotonic() + START_SECONDS
    while len((await client.call("GET", "/v1/services"))["items"]) < 3:
        if time.monotonic() > end:
            raise SystemExit(f"the fleet did not come up within {START_SECONDS:g} s")
        await asyncio.sleep(POLL_SECONDS)


async def series_of(
    client: GatewayClient, path: str, names: Sequence[str]
) -> dict[str, dict[int, tuple[float, float]]]:
    """Read series: name -> step -> value, and when the gateway was told of it."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    params: dict[str, Any] = {"limit": PAGE, "names": ",".join(names)}
    while True:
        page = await client.call("GET", f"{path}/metrics", params=params, deadline_seconds=60)
        for point in page["items"]:
            at = datetime.fromisoformat(point["at"]).timestamp()
            found.setdefault(point["name"], {})[point["step"]] = point["value"], at
        if page["next"] is None:
            return found
        params["after"] = page["next"]


def run_trl(given: dict[str, Any], directory: Path, shown: Shown) -> Run | None:
    """Run TRL's trainer; None where no interpreter is named.

    Raises:
        SystemExit: it failed.
    """
    python = os.environ.get(TRL_PYTHON)
    if python is None:
        return None
    shown.line("TRL starts")
    directory.mkdir(parents=True)
    given = given | {"output": str(directory / "output"), "kept": str(directory / "kept")}
    (directory / "given.json").write_text(json.dumps(given))
    started, ends, tokens = 0.0, [], []
    with _child([python, str(CHILD), str(directory / "given.json")], directory) as lines:
        for line in lines:
            told = json.loads(line)
            if told["step"]:
                ends.append(told["at"])
                tokens.append(told["sampled"])
            else:
                started = told["at"]
            shown.step(told["step"])
    kept = {step: directory / "kept" / str(step) for step in range(1, len(ends) + 1)}
    # What is generated at once for several steps is counted with the first of them.
    return Run(started, ends, [fmean(tokens)] * len(ends), {step: path for step, path in kept.items() if path.is_dir()})


@contextmanager
def _child(command: Sequence[str], directory: Path) -> Iterator[Iterator[str]]:
    """Run a process while the block lasts, and give the lines that it writes."""
    with (directory / "errors").open("w") as errors:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=directory, env=os.environ | offline
        )
        assert child.stdout is not None
        try:
            yield iter(child.stdout)
            code = child.wait(END_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
    if code:
        tail = (directory / "errors").read_text().splitlines()[-15:]
        raise SystemExit("\n".join([f"{command[0]} {CHILD.name} ended with code {code}:", *tail]))


@contextmanager
def saying(what: str, say: Callable[[str], None], every: float = SHOWN_EVERY_SECONDS) -> Iterator[None]:
    """Say every so often for how long something goes on that tells nothing itself."""
    begun, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(every):
            say(f"{what}, {time.monotonic() - begun:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
