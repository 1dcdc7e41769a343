"""Users whom a model plays: over loopback, with a chat endpoint of the test."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.environments.conversation import EnvironmentConversations
from flotilla.services.rollout.episodes.conversation import Conversation
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig
from flotilla.shared.errors import EpisodeFailed, InvalidSpec
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task
from tests.vision_models import a_picture

Answer = Callable[[list[dict[str, Any]]], Any]


@asynccontextmanager
async def a_server(answer: Answer) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
    """Serve one chat endpoint; yields the bodies that were asked, and the base URL."""
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert head.startswith(b"POST /v1/chat/completions "), head
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                asked.append(json.loads(await reader.readexactly(length)))
                said = answer(asked[-1]["messages"])
                status, text = said if isinstance(said, tuple) else (200, said)
                body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield asked, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def a_conversation(
    url: str, *, step_seconds: float = 20.0, prompt: str = "My bill is wrong.", **options: Any
) -> Conversation:
    environment = EnvironmentConfig(environment=f"user:{url}", options={"model": "tiny", **options})
    config = EnvironmentEpisodesConfig(kind="environment", environments=(environment,), step_seconds=step_seconds)
    messages = (Message("system", "You help."), *((Message("user", prompt),) if prompt else ()))
    task = a_task(messages=messages, label="refund", metadata={"seed": 5, "goal": "a refund"})
    return EnvironmentConversations(config)(task, 0)


async def test_the_rows_prompt_is_the_users_first_message_and_a_mark_ends_the_episode() -> None:
    def answer(messages: list[dict[str, Any]]) -> str:
        return "It says 12, not 10." if len(messages) == 4 else "Thank you. ###STOP###"

    async with a_server(answer) as (asked, url):
        episode = a_conversation(url, instruction="You want {goal} ({label}). End with {stop}.", temperature=0.5)
        begun = await episode.begin()
        first = await episode.answer("<think>hm</think>What is wrong?", is_cut=False)
        last = await episode.answer("You get it back.", is_cut=False)
        await episode.close()

    assert begun.messages == (Message("system", "You help."), Message("user", "My bill is wrong."))
    assert (first.messages, first.reward, first.finish) == ((Message("user", "It says 12, not 10."),), 0.0, None)
    assert (last.messages[0].content, last.reward, last.finish) == ("Thank you.", 0.0, FinishReason.STOP)
    assert [(each["role"], each["content"]) for each in asked[1]["messages"]] == [
        ("system", "You want a refund (refund). End with ###STOP###."),
        ("user", "(The assistant is ready.)"),
        ("assistant", "My bill is wrong."),
        ("user", "What is wrong?"),
        ("assistant", "It says 12, not 10."),
        ("user", "You get it back."),
    ]
    assert {name: asked[0][name] for name in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "tiny", "temperature": 0.5, "max_tokens": 512, "seed": 5,
    }  # fmt: skip


async def test_a_user_may_begin_and_score_each_answer() -> None:
    def answer(messages: list[dict[str, Any]]) -> str:
        return "I want a refund." if len(messages) == 2 else "Better. SCORE: 0.2 Done. SCORE:-0.75 ###STOP### bye"

    async with a_server(answer) as (_, url):
        episode = a_conversation(url, prompt="", begins=True, score="SCORE:")
        begun = await episode.begin()
        last = await episode.answer("Here you are.", is_cut=False)
        await episode.close()

    assert begun.messages == (Message("system", "You help."), Message("user", "I want a refund."))
    assert (last.messages[0].content, last.reward, last.finish) == ("Better.  Done.", -0.75, FinishReason.STOP)
    assert not episode.is_replayable, "another sample of the user's words would be another episode"


async def test_a_busy_server_is_asked_again_and_one_that_refuses_is_an_error_of_the_episode() -> None:
    busy = iter([(503, ""), (429, "")])

    async with a_server(lambda _: next(busy, "Fine.")) as (asked, url):
        episode = a_conversation(url)
        await episode.begin()
        assert (await episode.answer("Hello.", is_cut=False)).messages[0].content == "Fine."
        assert len(asked) == 3
        await episode.close()

    async with a_server(lambda _: (400, "too long")) as (_, url):
        episode = a_conversation(url)
        await episode.begin()
        with pytest.raises(EpisodeFailed, match="answered 400"):
            await episode.answer("Hello.", is_cut=False)
        await episode.close()


async def test_a_server_that_is_not_there_ends_the_episode_within_its_bound() -> None:
    episode = a_conversation("http://127.0.0.1:9/v1", step_seconds=0.5)
    await episode.begin()
    with pytest.raises(EpisodeFailed, match=r"took longer than 0\.5 s"):
        await episode.answer("Hello.", is_cut=False)
    await episode.close()


async def test_what_the_row_lacks_is_named() -> None:
    async with a_server(lambda _: "Hi.") as (_, url):
        with pytest.raises(EpisodeFailed, match=r"\{name\}.*no such column; it has .*goal.*label"):
            await a_conversation(url, instruction="You are {name}.").begin()
        with pytest.raises(EpisodeFailed, match=r"no message of the user's: .* begins"):
            await a_conversation(url, prompt="").begin()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score": ""}, "score must be a text"),
        ({"instruction": 5}, "instruction must be a text"),
        ({"begins": "yes"}, "true or false"),
        ({"max_tokens": "x"}, "max_tokens must be a number from 1"),
        ({"temperature": -1}, "temperature must be a number from 0"),
        ({"warmth": 1}, "no option warmth"),
        ({"stop": ""}, "stop must be a text"),
        ({"networks": []}, "networks"),
    ],
)
def test_options_are_checked_before_anything_is_asked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        a_conversation("http://127.0.0.1:9/v1", **options)


def test_an_address_that_is_not_public_is_refused_where_no_network_is_named() -> None:
    environment = EnvironmentConfig(environment="user:http://127.0.0.1:9/v1", options={"model": "tiny"})
    config = EnvironmentEpisodesConfig(kind="environment", environments=(environment,))
    task = a_task(messages=(Message("user", "Hi."),))

    async def play() -> None:
        episode = EnvironmentConversations(config, networks=())(task, 0)
        await episode.begin()
        await episode.answer("Hello.", is_cut=False)

    with pytest.raises(EpisodeFailed, match="neither public nor in a network"):
        asyncio.run(play())


async def test_an_environment_in_a_file_is_given_the_row_if_its_reset_takes_one(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "class Told:\n"
        "    def reset(self, seed, row): return f\"{row['goal']} {row['label']} {row['prompt']} {seed}\", {}\n"
        '    def step(self, text): return "", 1.0, True, False, {}\n'
    )
    environment = EnvironmentConfig(environment=f"{tmp_path}/env.py:Told")
    config = EnvironmentEpisodesConfig(kind="environment", environments=(environment,))
    process = CustomProcess(environments=[environment])
    await process.start()
    try:
        task = a_task(messages=(Message("user", "Hi."),), label="x", metadata={"seed": 5, "goal": "win"})
        episode = EnvironmentConversations(config, process)(task, 0)
        assert (await episode.begin()).messages == (Message("user", "Hi.\n\nwin x Hi. 5"),)
        await episode.close()
    finally:
        await process.aclose()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("<think>I will say ###STOP### SCORE: 1", "said nothing: .* max_tokens"),
        (" ", "said nothing"),
        ("###STOP###", "ended the conversation before it began"),
    ],
)
async def test_a_thought_that_is_cut_or_an_end_at_once_is_no_first_message(said: str, words: str) -> None:
    async with a_server(lambda _: said) as (_, url):
        episode = a_conversation(url, prompt="", begins=True, score="SCORE:")
        with pytest.raises(EpisodeFailed, match=words):
            await episode.begin()
        await episode.close()


async def test_a_user_may_show_pictures() -> None:
    uri = f"data:image/png;base64,{b64encode(a_picture('red')).decode()}"

    def answer(messages: list[dict[str, Any]]) -> Any:
        if len(messages) > 4:
            return "###STOP###"
        return [{"type": "text", "text": "This one. SCORE: 0.5"}, {"type": "image_url", "image_url": {"url": uri}}]

    async with a_server(answer) as (asked, url):
        episode = a_conversation(url, score="SCORE:")
        await episode.begin()
        first = await episode.answer("Which?", is_cut=False)
        await episode.answer("Red.", is_cut=False)
        await episode.close()

    assert first.reward == 0.5
    assert first.messages == (Message("user", "This one.<image>", (a_picture("red"),)),)
    assert asked[1]["messages"][-2] == {"role": "assistant", "content": "This one. SCORE: 0.5"}
