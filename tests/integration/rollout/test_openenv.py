"""Environments behind OpenEnv servers: over the wire with a server of the test, and with the real package."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from flotilla.services.rollout.environments.conversation import EnvironmentConversation, EnvironmentConversations
from flotilla.services.rollout.episodes.conversation import Conversation
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import EpisodeFailed
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task

Answer = Callable[[dict[str, Any]], Any]
VALIDATION = {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}


def seen(text: str, reward: float | None = None, *, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, "n": 1}, "reward": reward, "done": done}}


class Server:
    """Speaks OpenEnv's wire; one function answers each message of a session."""

    def __init__(self, answer: Answer, sessions: int = 8) -> None:
        self._answer, self._free = answer, sessions
        self.asked: list[dict[str, Any]] = []
        self.refused = 0
        self.closed = asyncio.Event()

    async def __call__(self, connection: ServerConnection) -> None:
        if not self._free:
            self.refused += 1
            await connection.send(
                json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            )
            return
        self._free -= 1
        try:
            async for text in connection:
                message = json.loads(text)
                self.asked.append(message)
                if message["type"] == "close":
                    self.closed.set()
                    return
                found = self._answer(message)
                reply = await found if isinstance(found, Awaitable) else found
                if reply is None:
                    connection.transport.abort()
                    return
                await connection.send(reply if isinstance(reply, str) else json.dumps(reply))
        finally:
            self._free += 1


@asynccontextmanager
async def a_server(answer: Answer, sessions: int = 8) -> AsyncIterator[tuple[Server, str]]:
    server = Server(answer, sessions)
    async with serve(server, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        yield server, f"http://127.0.0.1:{port}"


def a_conversation(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    step_seconds: float = 20.0,
    networks: tuple[IPNetwork, ...] = LOOPBACK,
) -> Conversation:
    environment = EnvironmentConfig(environment=f"openenv:{url}", options={"observation": "text", **(options or {})})
    config = EnvironmentEpisodesConfig(kind="environment", environments=(environment,), step_seconds=step_seconds)
    task = a_task(messages=(Message("user", "Go."),), metadata={"seed": 5})
    return EnvironmentConversations(config, networks=networks)(task, 0)


async def test_a_session_is_an_episode_with_the_rows_seed_and_the_policys_text_as_the_action() -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["type"] == "reset":
            return seen("begin")
        is_right = message["data"]["message"] == "up"
        return seen("moved", 1.0 if is_right else None, done=is_right)

    async with a_server(answer) as (server, url):
        episode = a_conversation(url, {"more": {"speed": 2}, "reset": {"level": 3}})
        begun = await episode.begin()
        first = await episode.answer("left", is_cut=False)
        last = await episode.answer("<think>?</think><answer>up</answer>", is_cut=False)
        await episode.close()
        await asyncio.wait_for(server.closed.wait(), 10)

    assert begun.messages == (Message("user", "Go.\n\nbegin"),)
    assert (first.reward, first.finish) == (0.0, None)
    assert (last.messages[0].content, last.reward, last.finish) == ("moved", 1.0, FinishReason.STOP)
    assert server.asked[0] == {"type": "reset", "data": {"seed": 5, "level": 3}}
    assert [each["data"] for each in server.asked[1:3]] == [
        {"message": "left", "speed": 2}, {"message": "up", "speed": 2},
    ]  # fmt: skip


async def test_a_text_that_is_the_action_may_be_none_and_costs_a_penalty() -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["type"] == "reset":
            return seen("begin")
        return VALIDATION if "x" not in message["data"] else seen("moved", 0.5, done=True)

    async with a_server(answer) as (server, url):
        episode = a_conversation(url, {"action": None, "format_penalty": -0.25})
        await episode.begin()
        replies = [await episode.answer(text, is_cut=False) for text in ("hm", "[1]", '{"y": 1}', '{"x": 1}')]
        await episode.close()

    assert [each.reward for each in replies] == [-0.25, -0.25, -0.25, 0.5]
    assert [each.messages[0].content for each in replies] == ["begin", "begin", "begin", "moved"]
    assert [each["type"] for each in server.asked] == ["reset", "step", "step", "close"]


def broken(reply: Any) -> Answer:
    return lambda message: seen("begin") if message["type"] == "reset" else reply


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (None, "the session was lost"),
        ("{", "is no JSON"),
        ("[]", "no JSON object"),
        ({"type": "state", "data": {}}, "no observation"),
        (
            {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}},
            r"answered 'boom' \(EXECUTION_ERROR\)",
        ),
        (VALIDATION, "VALIDATION_ERROR"),
        ({"type": "observation", "data": {"observation": {"a": 1}, "reward": 1}}, "no field 'text'; it has a"),
        (seen("x", "much"), "no finite number"),  # type: ignore[arg-type]
        (seen("over", None, done=True), "no step of it had a reward"),
    ],
)
async def test_what_goes_wrong_is_an_error_of_the_episode_and_no_reward(reply: Any, said: str) -> None:
    async with a_server(broken(reply)) as (_, url):
        episode = a_conversation(url)
        await episode.begin()
        with pytest.raises(EpisodeFailed, match=said):
            await episode.answer("up", is_cut=False)
        await episode.close()


async def test_a_server_that_is_full_is_waited_for_and_one_that_stays_full_ends_the_wait() -> None:
    async with a_server(broken(seen("moved", 1.0)), sessions=1) as (server, url):
        first, second, third = a_conversation(url), a_conversation(url), a_conversation(url, step_seconds=0.5)
        await first.begin()
        with pytest.raises(EpisodeFailed, match=r"took longer than 0.5 s"):
            await third.begin()
        waiting = asyncio.create_task(second.begin())
        while server.refused < 3:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await first.close()

        assert (await waiting).messages[0].content == "Go.\n\nbegin"
        await second.close()


async def test_a_step_without_end_and_a_server_that_is_not_there_are_errors() -> None:
    async def never(message: dict[str, Any]) -> Any:
        if message["type"] == "step":
            await asyncio.sleep(60)
        return seen("begin")

    async with a_server(lambda message: never(message)) as (_, url):
        episode = a_conversation(url, step_seconds=0.5)
        await episode.begin()
        with pytest.raises(EpisodeFailed, match="took longer"):
            await episode.answer("up", is_cut=False)
        await episode.close()
    with pytest.raises(EpisodeFailed, match="cannot be reached"):
        await a_conversation(url).begin()


async def test_an_address_that_the_operator_does_not_allow_is_not_asked() -> None:
    async with a_server(broken(seen("moved"))) as (server, url):
        episode = a_conversation(url, networks=())
        with pytest.raises(EpisodeFailed, match="not a public address, and in no network of the rollout"):
            await episode.begin()

    assert not server.asked


# The real package.

GAME = '''
"""Guess a number from 0 to 3: what OpenEnv's own server makes of an environment."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Said(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **given):
        self.secret, self.tries = (seed or 0) % 4, 0
        return Said(text="Guess a number from 0 to 3.")

    def step(self, action, timeout_s=None, **given):
        self.tries += 1
        is_right = action.number == self.secret
        text = "right" if is_right else "higher" if action.number < self.secret else "lower"
        return Said(text=text, reward=1.0 if is_right else -0.1, done=is_right)

    @property
    def state(self):
        return State(step_count=self.tries)


app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=2)
if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


def interpreter_with_openenv(folder: Path) -> str:
    """Find or make the interpreter that has the package."""
    if found := os.environ.get("FLOTILLA_OPENENV_PYTHON"):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=600)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "openenv==0.10.0"], capture_output=True, timeout=600)
    if done.returncode:
        pytest.skip(f"openenv cannot be installed: {done.stderr[-500:].decode(errors='replace')}")
    return python


@asynccontextmanager
async def a_real_server(folder: Path) -> AsyncIterator[str]:
    python = await asyncio.to_thread(interpreter_with_openenv, folder / "interpreter")
    (folder / "game.py").write_text(GAME)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "server.log").open("wb")
    server = await asyncio.create_subprocess_exec(python, folder / "game.py", str(port), stdout=log, stderr=log)
    try:
        async with asyncio.timeout(120):
            while True:
                assert server.returncode is None, (folder / "server.log").read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()
        log.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_real_package_serves_an_environment(tmp_path: Path) -> None:
    async with a_real_server(tmp_path) as url:
        named = {"action": "number"}
        written = {"action": None, "format_penalty": -1.0}
        episodes = [a_conversation(url, options) for options in (named, written, named)]
        begun = [await episode.begin() for episode in episodes[:2]]
        third = asyncio.create_task(episodes[2].begin())  # the server has room for two sessions

        replies = [await episodes[0].answer(text, is_cut=False) for text in ("3", "<answer>1</answer>")]
        spoken = [await episodes[1].answer(text, is_cut=False) for text in ('{"guess": 1}', '{"number": 0}')]
        assert not third.done()
        await episodes[0].close()
        await third
        with pytest.raises(EpisodeFailed, match="VALIDATION_ERROR"):
            await episodes[2].answer("a word", is_cut=False)
        for episode in episodes[1:]:
            await episode.close()

    assert {each.messages[0].content for each in begun} == {"Go.\n\nGuess a number from 0 to 3."}
    assert [(each.messages[0].content, each.reward, each.finish) for each in replies] == [
        ("lower", -0.1, None), ("right", 1.0, FinishReason.STOP),
    ]  # fmt: skip
    assert [each.reward for each in spoken] == [-1.0, -0.1], "what is no action costs a penalty, and is no step"
    assert isinstance(episodes[0], EnvironmentConversation)
