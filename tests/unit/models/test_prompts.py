from typing import Any

import pytest

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.models.prompts import PromptLimit, PromptTemplate
from flotilla.shared.schemas.task import Message
from tests.unit.gateway.builders import a_spec

CHAT = [Message("system", "s"), Message("user", "u")]


class Characters:
    """A tokenizer whose tokens are characters, with 1 before them where special tokens are added."""

    def __init__(self, chat_template: str | None = "yes") -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*([1] if add_special_tokens else []), *map(ord, text)]}

    def apply_chat_template(self, chat: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in chat) + "".join(f"[{k}={v}]" for k, v in options.items())


def rendered(template: PromptTemplate, tokenizer: Characters, messages: list[Message]) -> str:
    return "".join(map(chr, template.token_ids(tokenizer, messages)))


def test_a_prompt_goes_through_the_chat_template_with_its_options() -> None:
    spec = a_spec(data={"path": "/a.jsonl", "chat_template_options": {"enable_thinking": False}})

    assert rendered(PromptTemplate(), Characters(), CHAT) == "<system>s<user>u"
    assert rendered(PromptTemplate.of(spec.data), Characters(), CHAT) == "<system>s<user>u[enable_thinking=False]"


def test_an_input_template_takes_the_place_of_the_chat_template() -> None:
    spec = a_spec(data={"path": "/a.jsonl", "input_template": "Q: {}\nA:"})
    asked = [Message("user", "what is {x}?")]

    assert rendered(PromptTemplate.of(spec.data), Characters(), asked) == "Q: what is {x}?\nA:"
    assert rendered(PromptTemplate("{}"), Characters(None), asked) == "what is {x}?", "as it is, nothing added"


def test_a_model_without_a_template_gets_plain_text() -> None:
    assert rendered(PromptTemplate(), Characters(None), CHAT) == "\x01s\n\nu"


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", (3, 4, 5, 6, 7)), ("right", (1, 2, 3, 4, 5)), ("middle", (1, 2, 5, 6, 7))],
)
def test_a_prompt_that_is_too_long_is_cut_where_the_spec_says(side: str, expected: tuple[int, ...]) -> None:
    data = {"path": "/a.jsonl", "max_prompt_tokens": 5, "overlong": {"kind": "truncate", "side": side}}
    limit = PromptLimit.of(a_spec(data=data))

    assert limit.fit((1, 2, 3, 4, 5, 6, 7)) == expected
    assert limit.fit((1, 2, 3, 4, 5)) == (1, 2, 3, 4, 5)


def test_a_prompt_of_one_token_is_cut_to_the_last_by_the_middle() -> None:
    assert PromptLimit(1, "middle").fit((1, 2, 3)) == (3,)


@pytest.mark.parametrize("overlong", [{"kind": "error"}, {"kind": "filter"}])
def test_without_a_side_it_is_refused_with_both_lengths(overlong: dict[str, Any]) -> None:
    limit = PromptLimit.of(a_spec(data={"path": "/a.jsonl", "max_prompt_tokens": 5, "overlong": overlong}))

    with pytest.raises(InvalidRequest, match="6 tokens is longer than the 5 allowed"):
        limit.fit((1,) * 6)


def test_without_a_limit_the_engines_context_is_the_limit() -> None:
    assert PromptLimit.of(a_spec()).fit((1,) * 9999) == (1,) * 9999
    cut = PromptLimit.of(a_spec(data={"path": "/a.jsonl", "overlong": {"kind": "truncate", "side": "left"}}))
    assert len(cut.fit((1,) * 9999)) == 2048 - 8
