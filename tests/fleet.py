"""Whole fleets for tests: a tiny random model, an experiment on it, and `flotilla up` in a process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from flotilla.shared.net.client.client import GatewayClient
from tests.suite.run_folder import made_once

ROOT = Path(__file__).parents[1]
FLOTILLA = (sys.executable, "-m", "flotilla")
UP_SECONDS = 120.0
DOWN_SECONDS = 60.0
RESTART_SECONDS = 60.0
LEFT_SECONDS = 10.0
"""Whoever ends last is told by nobody: the kernel takes a moment on a busy machine."""

GRADER = '''
"""Half of all answers are right, the same ones in every process."""
import zlib


def score(sample):
    return float(zlib.crc32((sample.id + sample.response).encode()) % 2)
'''

HOLDING_GRADER = '''
"""The same, but groups from a certain one on wait for their grades while there is a file that names it."""
import asyncio
import zlib
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


async def score(sample):
    while int(sample.id.partition("/")[0]) >= held_from():
        await asyncio.sleep(0.05)
    return float(zlib.crc32((sample.id + sample.response).encode()) % 2)


def held_from():
    try:
        return float(HOLD.read_text())
    except FileNotFoundError:
        return float("inf")
'''


def make_model(directory: Path) -> Path:
    """Make a tiny Qwen3 with random weights and the arithmetic example's tokenizer."""
    from examples.arithmetic.model import build_model
    from examples.arithmetic.problems import training_set, worked_solution
    from examples.arithmetic.settings import settings_of
    from examples.arithmetic.tokenizer import build_tokenizer

    settings = settings_of("standard", 0)
    problems = training_set(200, settings.problems, Random(0))
    tokenizer = build_tokenizer([p.prompt + worked_solution(p) for p in problems], settings.model.vocab_size)
    model = build_model(settings.model, tokenizer, seed=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def tiny_model() -> Path:
    """Find the model, which takes seconds to make and is the same each time; nobody writes to it."""
    return made_once("model", make_model)


def make_experiment(directory: Path, **sections: Any) -> dict[str, Any]:
    """Write model, data and grader into ``directory``, and give a spec that uses them."""
    model = directory / "model"
    if not model.exists():
        shutil.copytree(tiny_model(), model)
    rows = [{"prompt": f"Ana has {n} pens, buys {n % 7}.", "answer": str(n + n % 7)} for n in range(200)]
    for name in ("train", "heldout"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "grade.py").write_text(GRADER)
    spec: dict[str, Any] = {
        "name": "trial",
        "seed": 7,
        "model": {"path": str(model)},
        "data": {"path": str(directory / "train.jsonl"), "label_column": "answer"},
        "rollout": {
            "group_size": 4,
            "sampling": {"max_new_tokens": 24},
            # One thread: what is compared to the last bit may not depend on what else computes.
            "engine": {"slots": 16, "context_tokens": 128, "threads": 1},
        },
        "reward": {"components": [{"kind": "custom", "path": f"{directory / 'grade.py'}:score"}]},
        "optimisation": {"steps": 12, "groups_per_mini_batch": 4, "learning_rate": 1e-4},
        "asynchrony": {
            "staleness_threshold": 0.5,
            "on_weight_update": "interrupt",
            # What all have on one machine.
            "publication": {"transport": "shared_memory"},
        },
        "checkpoint": {"every_steps": 4},
        "parallelism": {"threads": 1},
    }
    for name, section in sections.items():
        spec[name] = (
            {**spec[name], **section} if isinstance(section, dict) and isinstance(spec.get(name), dict) else section
        )
    return spec


def hold_back(spec: dict[str, Any], directory: Path, *, after_step: int) -> Path:
    """Let an experiment make so many steps and no further while a file is there; gives the file.

    So whatever is done to the experiment meets it under way, however fast the machine is and however slow the test.
    """
    hold = directory / "hold"
    hold.write_text(str(after_step * spec["optimisation"]["groups_per_mini_batch"]))
    (directory / "hold.py").write_text(HOLDING_GRADER)
    spec["reward"] = {
        "components": [{"kind": "custom", "path": f"{directory / 'hold.py'}:score", "timeout_seconds": 600}]
    }
    return hold


class RunningFleet:
    """A fleet that ``flotilla up`` runs in a process of its own."""

    def __init__(self, data: Path, process: "subprocess.Popen[bytes]") -> None:
        self.data = data
        self.process = process
        content = json.loads((data / "fleet.json").read_text())
        self.url: str = content["gateway_url"]
        self.token: str = content["token"]

    def client(self) -> GatewayClient:
        """Make a client of its gateway."""
        return GatewayClient(self.url, self.token)

    def pids(self, name: str) -> list[int]:
        """Find the fleet's processes that run a module, such as ``flotilla.services.rollout``, or a program."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = child.cmdline()
                # A module stands alone among the arguments; a server's name ends its path or begins its title.
                is_named = name in words or (words and Path(words[0].split(" ")[0]).name == name)
                if is_named and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, name: str) -> int:
        """Kill -9 the first process that runs a module; one that just died gets the time to be started again."""

        def killed() -> int | None:
            for pid in self.pids(name):
                with suppress(ProcessLookupError):  # it has ended since it was found
                    os.kill(pid, signal.SIGKILL)
                    return pid
            return None

        found: int = until(killed, RESTART_SECONDS, f"{name} to run")
        return found


@contextmanager
def running_fleet(
    data: Path,
    *,
    rollouts: int = 1,
    trainers: int = 1,
    rewards: int = 1,
    experiments: int = 1,
    sandbox: bool = False,
    tinker: Path | None = None,
    **environment: str,
) -> Iterator[RunningFleet]:
    """Run ``flotilla up`` while the block lasts; afterwards nothing of it may be left.

    Each of its processes serves so many ``experiments`` at a time. With ``tinker``, the directory of a model, it serves
    the Tinker API, and none.
    """
    log_path = data.parent / f"{data.name}.log"
    counts = ["--rollouts", str(rollouts), "--trainers", str(trainers), "--rewards", str(rewards)]
    counts += ["--experiments", str(experiments)]
    if tinker is not None:
        counts = ["--tinker", "--model", str(tinker)]
    command = [*FLOTILLA, "up", "--data", str(data), "--port", "0", *counts, *([] if sandbox else ["--no-sandbox"])]
    # Specs come over REST here: their graders are in the test's own folder.
    allowed = {"FLOTILLA_CODE_FOLDERS": str(data.parent)}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "FLOTILLA_REDIS_URL": "", "FLOTILLA_LEASE_SECONDS": "4", **allowed, **environment},
        )
    try:
        until(lambda: (data / "fleet.json").exists() or process.poll() is not None, UP_SECONDS, "the fleet to come up")
        assert process.poll() is None, log_path.read_text()
        yield RunningFleet(data, process)
    finally:
        family = [process.pid] if process.poll() is None else []
        if family:
            family += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        try:
            process.wait(DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("the fleet did not end") from None
        until(lambda: not any(map(is_running, family)), LEFT_SECONDS, f"the end of all of {family}")


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], Any], seconds: float, what: str, *, pause_seconds: float = 0.05) -> Any:
    """Wait for a state, with a deadline; looks again after each pause."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(pause_seconds)
