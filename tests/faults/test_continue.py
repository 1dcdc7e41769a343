"""Experiments go on after any end: the commands of docs/continue.md, and a run that is ended at ten moments.

On-policy with ``rollout.engine.batch_invariant`` a loss is a function of the seed and the groups before it, so whatever
ends a run in between, its losses are those of a run that nothing ends.
"""

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from flotilla.connection import FleetInfo
from flotilla.shared.errors import Unavailable
from tests.fleet import is_running, make_experiment, until
from tests.unit.cli.test_commands_of_pages import PAGE, commands_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

PATIENCE_SECONDS = 240.0
COMPARED = ("loss/total", "grad_norm", "reward/mean", "completion_tokens/mean")
TOLERANCE = 1e-6
GROUPS = 4
STEPS, MORE_STEPS, FORKED_STEP = 20, 24, 8
INTERRUPTED, REFUSED = 130, 5
IN_THE_TEST = (
    ("examples/arithmetic/experiment.yaml", "experiment.yaml"),
    ("arithmetic@40", f"trial@{FORKED_STEP}"),
    ("arithmetic", "trial"),
    ("80", str(MORE_STEPS)),
    ("up --detach", "up --detach --port 0 --no-sandbox"),
)
"""What the page's commands name, and what stands for it here."""
MOMENTS = (
    ("ctrl-c", 1),
    ("kill", 4),
    ("down", 8),
    ("ctrl-c twice", 13),
    ("kill", 17),
    ("ctrl-c", 20),
    ("down", 25),
    ("kill", 28),
    ("ctrl-c twice", 34),
    ("ctrl-c", 37),
)
LONG_STEPS = 40
Curve = dict[int, dict[str, float]]
"""What was measured of each step."""


def write_spec(directory: Path, steps: int) -> None:
    spec = make_experiment(
        directory,
        rollout={"engine": {"slots": 16, "context_tokens": 128, "batch_invariant": True}},
        optimisation={"steps": steps, "learning_rate": 1e-3, "groups_per_mini_batch": GROUPS},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
        checkpoint={"every_steps": 2, "keep": 50},
    )
    (directory / "experiment.yaml").write_text(yaml.safe_dump(spec))


class Terminal:
    """Where commands are typed: a directory, and a mark by which their processes are known."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
        settings = {"FLOTILLA_REDIS_URL": "", "FLOTILLA_LEASE_SECONDS": "4", "FLOTILLA_TEST_MARK": self.mark}
        self.environment = {**os.environ, **settings}
        self.number = 0

    def start(self, *words: str) -> "Command":
        """Type a command, and do not wait for its end."""
        self.number += 1
        return Command(self, words, self.directory / f"output-{self.number}")

    def type(self, *words: str, code: int = 0) -> str:
        """Type a command, and return what it said in the end."""
        command = self.start(*words)
        assert command.process.wait(PATIENCE_SECONDS) == code, command.said()
        return command.said()

    def family(self) -> list[int]:
        """Find every process that was started from here and lives."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FLOTILLA_TEST_MARK") == self.mark and is_running(process.pid):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def until_all_ended(self) -> None:
        until(lambda: not self.family(), 30, "every process to end")


class Command:
    """One command under way."""

    def __init__(self, terminal: Terminal, words: tuple[str, ...], output: Path) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flotilla", *words],
                cwd=terminal.directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=terminal.environment,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")


class Fleet:
    """The gateway of a data directory, and its database."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def get(self, path: str) -> Any:
        """Read below ``/v1``; None while nobody answers."""
        try:
            info = FleetInfo.read(self.data)
            answer = httpx.get(
                f"{info.gateway_url}/v1{path}", headers={"Authorization": f"Bearer {info.token}"}, timeout=5
            )
        except (Unavailable, httpx.HTTPError):
            return None
        return answer.json() if answer.is_success else None

    def view(self, name: str) -> Any:
        """Find the newest experiment of a name."""
        listed = self.get("/experiments")
        return next((view for view in reversed(listed["items"]) if view["name"] == name), None) if listed else None

    def until_step(self, step: int, name: str = "trial") -> Any:
        return until(lambda: (v := self.view(name)) and v["step"] >= step and v, PATIENCE_SECONDS, f"step {step}")

    def until_state(self, state: str, name: str = "trial") -> Any:
        return until(lambda: (v := self.view(name)) and v["state"] == state and v, PATIENCE_SECONDS, state)

    def curve(self, experiment_id: str) -> Curve:
        """Read what was measured of each step."""
        found: Curve = {}
        with closing(sqlite3.connect(self.data / "gateway.sqlite")) as database:
            marks = ",".join("?" * len(COMPARED))
            query = f"SELECT step, name, value FROM metrics WHERE experiment_id = ? AND name IN ({marks})"
            for step, name, value in database.execute(query, (experiment_id, *COMPARED)):
                found.setdefault(step, {})[name] = value
        return found


def check_equal(found: Curve, expected: Curve, steps: range) -> None:
    for step in steps:
        assert found[step] == pytest.approx(expected[step], abs=TOLERANCE, rel=TOLERANCE), step
    # Two curves that stand still would be equal, too.
    assert len({expected[step]["loss/total"] for step in steps}) > len(steps) // 2


def summary_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((directory / "runs" / "trial" / "summary.json").read_text())
    return content


def page_commands() -> Iterator[list[str]]:
    """List the page's commands in order, without those that need a store of the reader's own."""
    for words in commands_of(PAGE):
        text = shlex.join(words)
        if "s3://" in text:
            continue
        for on_page, here in IN_THE_TEST:
            text = text.replace(on_page, here)
        yield shlex.split(text)


@contextmanager
def a_terminal(directory: Path) -> Iterator[Terminal]:
    """Open a terminal; afterwards nothing that was started from it may live."""
    found = Terminal(directory)
    try:
        yield found
    finally:
        left = found.family()
        for pid in left:
            os.kill(pid, signal.SIGTERM)
        found.until_all_ended()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with a_terminal(tmp_path) as found:
        yield found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_does_what_the_page_says(terminal: Terminal) -> None:
    directory = terminal.directory
    write_spec(directory, STEPS)
    commands = page_commands()
    run, fleet = Fleet(directory / "runs" / "trial" / "fleet"), Fleet(directory / ".flotilla")

    begun = terminal.start(*next(commands))
    run.until_step(3)
    begun.process.send_signal(signal.SIGINT)
    assert begun.process.wait(60) == INTERRUPTED, begun.said()
    assert terminal.family() == []
    printed = re.search(r"^ +flotilla (run .*)$", begun.said(), re.MULTILINE)
    assert printed is not None, begun.said()
    assert "already: add --continue" in terminal.type("run", "experiment.yaml", code=REFUSED)

    again = next(commands)
    assert shlex.split(printed[1]) == again
    killed = terminal.start(*again)
    run.until_step(FORKED_STEP + 1)
    assert "in use: another process" in terminal.type(*again, code=REFUSED)
    killed.process.kill()
    killed.process.wait()
    terminal.until_all_ended()
    terminal.type(*again)
    first = summary_of(directory)
    assert (first["status"], first["steps"]) == ("completed", STEPS)
    terminal.type(*next(commands))
    longer = summary_of(directory)
    assert (longer["steps"], longer["experiment_id"]) == (MORE_STEPS, first["experiment_id"])
    ledger = longer["ledger"]
    assert ledger["balanced"] and ledger["issued"] == ledger["trained"] == MORE_STEPS * GROUPS
    expected = run.curve(first["experiment_id"])

    terminal.type(*next(commands))
    terminal.type(*next(commands))
    fleet.until_step(FORKED_STEP + 1)
    terminal.type(*next(commands))
    terminal.until_all_ended()
    terminal.type(*next(commands))
    at_stop = fleet.until_step(FORKED_STEP + 3)
    assert at_stop["id"] in terminal.type(*next(commands))
    terminal.type(*next(commands))
    stopped = fleet.until_state("stopped")
    terminal.type(*next(commands))
    extended = terminal.type(*next(commands))
    assert f"trains to step {MORE_STEPS}; before, {STEPS}" in extended
    completed = fleet.until_state("completed")
    assert (completed["id"], completed["step"]) == (stopped["id"], MORE_STEPS)
    assert fleet.get(f"/experiments/{completed['id']}/ledger")["train"]["balanced"]
    check_equal(fleet.curve(completed["id"]), expected, range(1, at_stop["step"] + 1))

    assert f"from step {FORKED_STEP} of {completed['id']}" in terminal.type(
        "fork", f"trial@{FORKED_STEP}", "--name", "equal"
    )
    equal = fleet.until_state("completed", "equal")
    check_equal(fleet.curve(equal["id"]), expected, range(FORKED_STEP + 1, MORE_STEPS + 1))
    own = fleet.get(f"/experiments/{equal['id']}/ledger")["train"]
    assert own["balanced"] and own["issued"] == own["trained"] == (MORE_STEPS - FORKED_STEP) * GROUPS
    assert equal["origin"]["experiment_id"] == completed["id"] and equal["origin"]["step"] == FORKED_STEP

    terminal.type(*next(commands))
    other = fleet.until_step(FORKED_STEP + 2, "slower")
    assert other["spec"]["optimisation"]["learning_rate"] == 2e-4
    terminal.type("stop", "slower")
    terminal.type(*next(commands))
    assert f"{completed['id']}@{FORKED_STEP}" in terminal.type("status")
    assert fleet.view("trial")["spec"]["seed"] == 2
    terminal.type(*next(commands))
    assert fleet.view("trial")["origin"]["step"] >= FORKED_STEP
    for view in fleet.get("/experiments")["items"]:
        if view["state"] in ("starting", "running"):
            terminal.type("stop", view["id"])
    compared = terminal.type(*next(commands))
    assert "optimisation.learning_rate" in compared, compared
    assert next(commands, None) is None
    terminal.type("down")


def end(how: str, command: Command, terminal: Terminal) -> None:
    """End a run, and check that nothing of it lives on."""
    if how == "kill its owner":
        command.process.kill()
    elif how == "kill":
        for pid in terminal.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    elif how == "down":
        terminal.type("down", "--data", "runs/trial/fleet")
    else:
        command.process.send_signal(signal.SIGINT)
        if how == "ctrl-c twice":
            time.sleep(0.2)
            command.process.send_signal(signal.SIGINT)
    code, is_killed = command.process.wait(60), how.startswith("kill")
    assert code == (-signal.SIGKILL if is_killed else INTERRUPTED), command.said()
    assert is_killed or "\n    flotilla run experiment.yaml --continue\n" in command.said()
    terminal.until_all_ended()


def end_at(moments: Sequence[tuple[str, int]], terminal: Terminal, steps: int, quiet: Curve | None = None) -> None:
    """End a run at some moments, go on to its end, and compare it with one that nothing ends.

    Args:
        quiet: what was measured of that one; None to run it, too.
    """
    directory = terminal.directory
    write_spec(directory, steps)
    run = Fleet(directory / "runs" / "trial" / "fleet")
    for number, (how, step) in enumerate(moments):
        command = terminal.start("run", "experiment.yaml", *(["--continue"] if number else []))
        run.until_step(step)
        end(how, command, terminal)
    terminal.type("run", "experiment.yaml", "--continue")

    summary = summary_of(directory)
    ledger = summary["ledger"]
    assert (summary["status"], summary["steps"]) == ("completed", steps)
    assert ledger["balanced"] and ledger["issued"] == ledger["trained"] == steps * GROUPS
    if quiet is None:
        terminal.type("run", "experiment.yaml", "--name", "quiet")
        other = Fleet(directory / "runs" / "quiet" / "fleet")
        (experiment_id,) = [path.name for path in (other.data / "experiments").iterdir()]
        quiet = other.curve(experiment_id)
    check_equal(run.curve(summary["experiment_id"]), quiet, range(1, steps + 1))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_that_is_ended_at_ten_moments_has_the_losses_of_one_that_nothing_ends(terminal: Terminal) -> None:
    end_at(MOMENTS, terminal, LONG_STEPS)
