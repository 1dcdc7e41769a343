"""What of a request is refused before anything is made of it."""

import json
from weakref import ref

import pytest

from flotilla.services.rollout.agents.requests import SentImages, read_chat, read_text
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.vision.parts import uri_of
from tests.vision_models import a_picture

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("token", [-1, 2**31, 2**40, 10**30])
def test_a_token_id_that_no_model_has_is_refused(token: int) -> None:
    assert read_text(b'{"prompt": [1, 2]}', SamplingConfig()).prompt == (1, 2)

    with pytest.raises(InvalidRequest, match="prompt"):
        read_text(json.dumps({"prompt": [1, token]}).encode(), SamplingConfig())


def test_of_a_million_wrong_token_ids_the_first_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_text(json.dumps({"prompt": [-1] * 100_000}).encode(), SamplingConfig())

    assert len(caught.value.errors) <= 3


def test_a_name_of_a_model_is_short_for_it_is_given_back() -> None:
    assert read_chat(json.dumps(CHAT | {"model": "m" * 256}).encode(), SamplingConfig()).model == "m" * 256

    with pytest.raises(InvalidRequest, match="model: String should have at most 256 characters"):
        read_chat(json.dumps(CHAT | {"model": "m" * 1_000_000}).encode(), SamplingConfig())


def test_an_image_is_there_once_and_as_long_as_a_message_has_it() -> None:
    images, part = SentImages(), {"type": "image_url", "image_url": {"url": uri_of(a_picture("red"))}}
    first = images.read(0, part)
    assert images.read(1, dict(part)) is first
    kept = ref(first)

    del first

    assert kept() is None
