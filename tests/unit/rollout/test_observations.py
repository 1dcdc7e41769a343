"""What environments, tools and simulated users show: texts as before, and parts of which some are images."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from flotilla.services.rollout.environments.conversation import EnvironmentConversation
from flotilla.services.rollout.episodes.observations import content_of, message_of, plain, text_of
from flotilla.services.rollout.tools.conversation import ToolConversation
from flotilla.services.rollout.tools.opening import HttpTool
from flotilla.shared.config.sections.episodes import MemoryConfig, ToolEpisodesConfig
from flotilla.shared.errors import DataError, EpisodeFailed
from flotilla.shared.models.prompts import chat_of
from flotilla.shared.schemas.task import Message, with_images
from flotilla.shared.testing.builders import a_task
from tests.unit.rollout.test_tools import Given, call
from tests.vision_models import a_picture

RED, BLUE = a_picture("red"), a_picture("blue")


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(data: bytes = RED) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("a <image>", Message("user", "a <image>")),
        (7, Message("user", "7")),
        (["a", 1], Message("user", "['a', 1]")),
        ([text("no image")], Message("user", "[{'type': 'text', 'text': 'no image'}]")),
        ([picture()], Message("user", "<image>", (RED,))),
        (
            [text("a\ud83d"), picture(), {"type": "image", "image": BLUE}],
            Message("user", "a?<image><image>", (RED, BLUE)),
        ),
        (
            [text("a <image>"), picture(), text("b"), picture(), text("<image>")],
            Message("user", "a <image><image>b<image><image>", (RED, RED), (9, 17)),
        ),
    ],
)
def test_parts_become_a_message_with_marks_and_all_else_is_text(said: object, message: Message) -> None:
    assert message_of("user", said) == message
    assert message_of("user", json.loads(json.dumps(plain(said)))) == message


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([{"type": "image"}], "has no bytes here"),
        ([{"type": "image", "image": "/etc/passwd"}], "none is fetched"),
        ([{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}], "none is fetched"),
        ([{"type": "image", "image": b"GIF8 and no more"}], "no image that can be read"),
        ([picture(), {"type": "input_audio"}], "must be text, image or image_url"),
    ],
)
def test_what_is_no_part_or_no_image_is_an_error_of_the_episode(said: object, words: str) -> None:
    with pytest.raises(EpisodeFailed, match=words):
        message_of("user", said)


def test_an_image_of_a_library_cannot_leave_a_users_process() -> None:
    with pytest.raises(DataError, match="bytes or a data: URI, and this one is object"):
        plain([{"type": "image", "image": object()}])


def test_messages_have_the_images_of_their_marks() -> None:
    messages = [Message("system", "s"), Message("user", "<image> a <image>"), Message("user", "<image>")]

    found = with_images(messages, (RED, BLUE, RED))

    assert [each.images for each in found] == [(), (RED, BLUE), (RED,)]
    assert with_images(messages, ()) == tuple(messages), "marks are text"


def test_an_agent_is_handed_a_tasks_images_as_parts() -> None:
    assert content_of(Message("user", "a <image>")) == "a <image>"
    message = Message("user", "a <image> b<image>", (RED, BLUE))

    content = content_of(message)

    assert content == (text("a "), picture(RED), text(" b"), picture(BLUE))
    assert message_of("user", content) == message


class Window:
    """Shows a picture at first and in every turn."""

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        return [text("at first "), picture(RED)], {}

    def step(self, said: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return [picture(BLUE), text(f" after {said}")], 0.5, False, False, {}


def a_window(**options: Any) -> EnvironmentConversation:
    task = a_task(messages=(Message("user", "look <image>"),), images=(BLUE,))
    return EnvironmentConversation(Window, task, 5.0, is_quick=True, max_turns=3, **options)


async def test_an_observation_stands_behind_the_tasks_own_images() -> None:
    window = a_window(template="{observation} in turn {turn}")

    begun, reply = await window.begin(), await window.answer("this", is_cut=False)

    assert begun.messages == (Message("user", "look <image>\n\nat first <image> in turn 1", (BLUE, RED)),)
    assert reply.messages == (Message("user", "<image> after this in turn 2", (BLUE,)),)
    again = a_window(template="{observation} in turn {turn}")
    assert (await again.begin()).state == begun.state, "equal pictures are equal states"
    assert reply.state != begun.state


async def test_a_memory_has_the_words_of_earlier_turns_and_the_pictures_of_this_one() -> None:
    memory = MemoryConfig(turns=2, template="[{observation}]")
    window = a_window(template="{history} now: {observation}", memory=memory)

    await window.begin()
    reply = await window.answer("this", is_cut=False)

    assert reply.is_fresh
    assert reply.messages == (Message("user", "look <image>\n\n[at first ] now: <image> after this", (BLUE, BLUE)),)


async def test_what_a_policy_wrote_is_no_place_of_a_picture_where_it_is_remembered_or_repeated() -> None:
    memory = MemoryConfig(turns=2, template="[{action}]")
    window = a_window(template="{history} now: {observation}", memory=memory)

    await window.begin()
    (message,) = (await window.answer("<image>", is_cut=False)).messages

    assert message.texts == ["look ", "\n\n[<image>] now: ", " after <image>"]
    assert message.images == (BLUE, BLUE)
    assert [part.get("text", "picture") for part in content_of(message)] == [
        *("look ", "picture", "\n\n[<image>] now: ", "picture", " after <image>")
    ]
    assert [part.get("text", "picture") for part in chat_of([message])[0]["content"]] == [
        *("look ", "picture", "\n\n[<image>] now: ", "picture", " after <image>")
    ]


class Camera:
    """A tool."""

    schema: Mapping[str, Any] = {"function": {"name": "look"}}

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        return [text("w" * 5000), picture(RED)]


async def test_a_tools_pictures_stay_whole_where_its_words_are_cut() -> None:
    config = ToolEpisodesConfig.model_validate(
        {"kind": "tools", "max_result_characters": 100, "tools": [{"kind": "python", "path": "a.py:look"}]}
    )
    conversation = ToolConversation(Given(Camera()), a_task(), config)  # type: ignore[arg-type]
    await conversation.begin()

    (message,) = (await conversation.answer(call("look"), is_cut=False)).messages

    assert message.images == (RED,)
    assert message.content.endswith("<image>")
    assert len(message.content) < 200


async def test_a_tool_behind_a_url_may_answer_with_parts() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"result": [text("seen"), picture(BLUE)]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        found = await HttpTool("http://tools.example.org/look", {"function": {"name": "look"}}, client).call({})

    assert message_of("tool", found) == Message("tool", "seen<image>", (BLUE,))
    assert text_of(found) == "seen"
