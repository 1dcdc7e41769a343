"""The process of an environment's agent: started again when it dies, named meanwhile, and ended with all that it began.

A script in the place of an interpreter stands for the agent: what it is given, it writes down.
"""

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla.services.rollout.agents.environment import MAX_DEATHS, Door, EnvironmentAgent
from flotilla.shared.children.processes import birth_of
from flotilla.shared.children.restarts import Restarts
from flotilla.shared.config.sections.agents import VerifiersConfig
from flotilla.shared.schemas.service import AGENTS

SECONDS = 30.0


class World:
    """An agent that is a script, and what is told of it."""

    def __init__(self, folder: Path, body: str, python: str | None = None) -> None:
        self.folder, self.completed, self.told = folder, 0, list[str | None]()
        script = folder / "python"
        written = f'echo "$@" >> {shlex.quote(str(folder))}/commands\nenv > {shlex.quote(str(folder))}/environment'
        script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(folder))}\n{written}\n{body}\n")
        script.chmod(0o755)
        config = VerifiersConfig(kind="verifiers", python=python or str(script), taskset="it")
        door = Door("http://gateway:1", "e-1", "the-token", ())
        restarts = Restarts(MAX_DEATHS, first_pause_seconds=0.01, longest_pause_seconds=0.02)
        self.agent = EnvironmentAgent(config, door, lambda: self.completed, restarts)
        self.agent.notify = lambda: self.told.append(self.cause)

    @property
    def cause(self) -> str | None:
        return None if self.agent.failure is None else self.agent.failure.cause

    @property
    def starts(self) -> list[str]:
        commands = self.folder / "commands"
        return commands.read_text().splitlines() if commands.exists() else []

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(world.agent.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_it_is_told_where_and_by_what_token_and_nothing_else_that_is_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "the-services-own")
    monkeypatch.setenv("FLOTILLA_REDIS_URL", "redis://secret")
    world = World(tmp_path, "sleep 600")

    async with running(world):
        await world.until(lambda: "FLOTILLA_GATEWAY_URL" in world.read("environment"))

    variables = dict(line.split("=", 1) for line in world.read("environment").splitlines() if "=" in line)
    assert variables["FLOTILLA_TOKEN"] == "the-token"
    assert variables["FLOTILLA_GATEWAY_URL"] == "http://gateway:1"
    assert "FLOTILLA_REDIS_URL" not in variables
    assert world.starts == ["-P -m flotilla.agents verifiers it e-1 --parallel=16 --options={}"]
    assert not Path(variables["PYTHONPATH"].partition(os.pathsep)[0]).exists(), "its folder goes with it"


async def test_its_end_takes_along_what_it_has_started(tmp_path: Path) -> None:
    world = World(tmp_path, "setsid sleep 600 & echo $! > child\nsleep 600")

    async with running(world):
        await world.until(lambda: world.read("child"))
        child = int(world.read("child"))
        assert birth_of(child) is not None

    await world.until(lambda: birth_of(child) is None)
    assert world.cause is None


async def test_one_that_dies_is_named_and_started_again_until_it_plays(tmp_path: Path) -> None:
    world = World(tmp_path, "test -e sound && sleep 600\necho no such taskset >&2\nexit 3")

    async with running(world):
        await world.until(lambda: len(world.starts) == 2)
        (tmp_path / "sound").touch()
        failure = world.agent.failure
        assert failure is not None and (failure.component, failure.fatal) == (AGENTS, False)
        assert failure.cause == (
            "the agent of rollout.agents.environment (verifiers) ended with code 3; its last lines: no such taskset"
        )
        starts = len(world.starts)
        await asyncio.sleep(0.1)
        world.completed += 1
        await world.until(lambda: world.cause is None)

    assert world.told[0] == failure.cause and world.told[-1] is None
    assert len(world.starts) in {starts, starts + 1}


async def test_one_that_keeps_dying_without_an_episode_ends_the_experiment(tmp_path: Path) -> None:
    world = World(tmp_path, "kill -9 $$")

    async with running(world) as task, asyncio.timeout(SECONDS):
        await task

    assert len(world.starts) == MAX_DEATHS
    assert world.agent.failure is not None and world.agent.failure.fatal
    assert "ended with code -9 (SIGKILL" in world.agent.failure.cause


async def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    world = World(tmp_path, "", python=str(tmp_path / "nowhere"))

    async with running(world):
        await world.until(lambda: world.cause)

    assert f"cannot be started by {tmp_path}/nowhere" in (world.cause or "")
    assert "No such file" in (world.cause or "")


async def test_one_that_finds_nothing_to_play_has_not_died(tmp_path: Path) -> None:
    world = World(tmp_path, "exit 0")

    async with running(world):
        await world.until(lambda: world.starts)
        await asyncio.sleep(0.3)

    assert (len(world.starts), world.told) == (1, [])
