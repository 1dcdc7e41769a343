"""Environments and tools of the user's run in a process that knows no secret, and fail their own episodes only."""

import os
import signal
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.environments.conversation import EnvironmentConversation, EnvironmentConversations
from flotilla.services.rollout.tools.base import ToolFailed
from flotilla.services.rollout.tools.conversation import ToolConversation
from flotilla.services.rollout.tools.opening import open_tools
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig, ToolEpisodesConfig
from flotilla.shared.errors import EpisodeFailed, InvalidSpec
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task
from tests.vision_models import a_picture

OWN = '''
import asyncio, os, sys
from base64 import b64decode
PNG = b64decode("PICTURE")
def photo(): return [{"type": "image", "image": PNG}]
class Maze:
    def __init__(self, size=3): self.size = size
    def reset(self, seed):
        print("chatter")
        self.seed = seed
        metrics = {f"m{n}" * 99: n for n in range(99)} | {"inf": float("inf"), "text": "x"}
        return f"seed {seed} size {self.size}", {"metrics": metrics, "instruction": "Go.", "state": (1, seed)}
    async def step(self, text):
        if text == "die": os._exit(7)
        if text == "raise": raise KeyError("x")
        if text == "wait": await asyncio.sleep(60)
        if text == "peek": open(f"/proc/{os.getppid()}/mem", "rb")
        if text == "shape": return "wrong"
        if text == "words": return "seen", "1.0", True, False, {}
        if text == "told": return "o", 0, False, False, {"action": 3, "is_valid": 0, "remembered": None}
        if text == "look": return [{"type": "text", "text": "l"}, {"type": "image", "image": PNG}], 0, False, False, {}
        if text == "pid": return str(os.getpid()), 0, False, False, {}
        token = os.environ.get("FLOTILLA_TOKEN", "no token")
        return f"{self.seed} {text} {token} \\ud83d", 1, False, True, {"metrics": {"speed": 2}}
class NoStep:
    def reset(self, seed): return ""
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b
def absent(name: str) -> str:
    raise ConnectionError("no route")
def secret() -> str:
    """Look around."""
    return os.environ.get("FLOTILLA_TOKEN", "nothing") + str(os.getpid())
'''.replace("PICTURE", b64encode(a_picture("red")).decode())


def maze(folder: Path, **options: Any) -> EnvironmentConfig:
    (folder / "own.py").write_text(OWN)
    return EnvironmentConfig(environment=f"{folder}/own.py:Maze", options=options)


@asynccontextmanager
async def a_process(config: EnvironmentConfig) -> AsyncIterator[EnvironmentConversations]:
    process = CustomProcess([config])
    await process.start()
    try:
        episodes = EnvironmentEpisodesConfig(kind="environment", environments=(config,), step_seconds=20.0)
        yield EnvironmentConversations(episodes, process)
    finally:
        await process.aclose()


async def begun(conversations: EnvironmentConversations, seed: int = 0) -> EnvironmentConversation:
    conversation = conversations(a_task(seed=seed), 0)
    assert isinstance(conversation, EnvironmentConversation)
    await conversation.begin()
    return conversation


async def test_an_environment_is_played_there_without_a_secret_and_its_failures_are_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")
    async with a_process(maze(tmp_path, size=5)) as conversations:
        first, second = await begun(conversations, 1), await begun(conversations, 2)
        reply = await first.begin()
        assert reply.messages[-1].content.endswith("seed 1 size 5")
        assert len(first.metrics) == 33 and max(map(len, first.metrics)) < 220
        for text, words in (
            ("raise", "Maze: KeyError: 'x'"),
            ("shape", "must return observation, reward"),
            ("words", "a reward is a finite number .*got the string '1.0'"),
            ("peek", "Maze: PermissionError"),
        ):
            with pytest.raises(EpisodeFailed, match=words):
                await first.answer(text, is_cut=False)
        first._step_seconds = 0.2
        with pytest.raises(EpisodeFailed, match=r"longer than 0\.2 s"):
            await first.answer("wait", is_cut=False)

        moved = await second.answer("left", is_cut=False)
        pid = int((await second.answer("pid", is_cut=False)).messages[0].content)
        await second.close()
        with pytest.raises(EpisodeFailed, match="the process in which it was has ended"):
            await second.answer("left", is_cut=False)

    assert moved.messages[0].content == "2 left no token ?"
    assert (moved.reward, moved.finish) == (1.0, FinishReason.TURNS)
    assert second.metrics["environment/speed"] == 2.0
    assert pid != os.getpid()


async def test_a_process_that_died_fails_its_episodes_and_the_next_one_starts_another(tmp_path: Path) -> None:
    async with a_process(maze(tmp_path)) as conversations:
        first, second = await begun(conversations), await begun(conversations)
        pid = int((await second.answer("pid", is_cut=False)).messages[0].content)
        with pytest.raises(EpisodeFailed, match="ended with code 7"):
            await first.answer("die", is_cut=False)
        with pytest.raises(EpisodeFailed, match="ended with code 7"):
            await second.answer("left", is_cut=False)

        third = await begun(conversations)
        again = int((await third.answer("pid", is_cut=False)).messages[0].content)
        assert again != pid
        with pytest.raises(EpisodeFailed, match="the process in which it was has ended"):
            await second.answer("left", is_cut=False)
    with pytest.raises(ProcessLookupError):
        os.kill(again, signal.SIGCONT)


async def test_functions_are_called_there_and_describe_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")
    (tmp_path / "own.py").write_text(OWN)
    tools = [{"kind": "python", "path": f"{tmp_path}/own.py:{name}"} for name in ("add", "absent", "secret")]
    box = await open_tools(ToolEpisodesConfig.model_validate({"kind": "tools", "tools": tools}))
    try:
        opened = await box.for_episode(a_task()).open()
        assert opened["add"].schema["function"]["description"] == "Add two numbers."
        assert await opened["add"].call({"a": 2}) == "3"
        with pytest.raises(ToolFailed, match="missing a required argument: 'a'"):
            await opened["add"].call({})
        with pytest.raises(EpisodeFailed, match="no route"):
            await opened["absent"].call({"name": "x"})
        seen = await opened["secret"].call({})
    finally:
        await box.aclose()

    assert seen.startswith("nothing") and seen != f"nothing{os.getpid()}"


async def test_what_cannot_be_loaded_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    process = CustomProcess([EnvironmentConfig(environment=f"{tmp_path}/own.py:NoStep")])

    with pytest.raises(InvalidSpec, match="no method step"):
        await process.start()
    await process.aclose()


async def test_what_an_environment_says_of_an_action_arrives(tmp_path: Path) -> None:
    config = maze(tmp_path)
    process = CustomProcess([config])
    await process.start()
    try:
        number = await process.make(config)
        await process.ask("reset", number, (1, {}))
        info = (await process.ask("step", number, "told"))[4]
    finally:
        await process.aclose()

    assert info == {"metrics": {}, "action": "3", "is_valid": False}


async def test_pictures_of_environments_and_functions_come_from_there(tmp_path: Path) -> None:
    async with a_process(maze(tmp_path)) as conversations:
        (message,) = (await (await begun(conversations)).answer("look", is_cut=False)).messages
    assert (message.content, message.images) == ("l<image>", (a_picture("red"),))
    tools = {"kind": "tools", "tools": [{"kind": "python", "path": f"{tmp_path}/own.py:photo"}]}
    config = ToolEpisodesConfig.model_validate(tools)
    box = await open_tools(config)
    try:
        conversation = ToolConversation(box.for_episode(a_task()), a_task(), config)
        await conversation.begin()
        call = '<tool_call>{"name": "photo", "arguments": {}}</tool_call>'
        (shown,) = (await conversation.answer(call, is_cut=False)).messages
    finally:
        await box.aclose()
    assert (shown.role, shown.content, shown.images) == ("tool", "<image>", (a_picture("red"),))
