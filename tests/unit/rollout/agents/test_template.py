"""What the template puts behind a reply, in four chat templates: the end of the reply is there once, as one token."""

import pytest

from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from tests.unit.rollout.chat_templates import FAMILIES, tokenizer_of

HISTORY = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}]
MORE = [*HISTORY, {"role": "user", "content": "b?"}]

# Qwen 3 shows thoughts in the last reply alone, so that nothing is put behind one: another branch begins.
NAMES = [name for name in FAMILIES if name != "qwen 3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_that_was_cut_within_what_looks_like_its_end_is_ended_by_the_whole_token(name: str) -> None:
    tokenizer, end = tokenizer_of(name), FAMILIES[name].end
    token = tokenizer.convert_tokens_to_ids(end)
    template = ChatTemplate(ChatRenderer(tokenizer, (token,)))
    beginnings = tokenizer(end[0], add_special_tokens=False)["input_ids"]

    added = template.continuation(HISTORY, MORE, (), beginnings[-1])

    assert added is not None
    assert token in added.token_ids[:2]
    assert added.text.startswith(end) and added.text == tokenizer.decode(added.token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_token_that_ended_a_reply_is_not_repeated(name: str) -> None:
    tokenizer, end = tokenizer_of(name), FAMILIES[name].end
    token = tokenizer.convert_tokens_to_ids(end)
    template = ChatTemplate(ChatRenderer(tokenizer, (token,)))

    ended = template.continuation(HISTORY, MORE, (), token)
    cut = template.continuation(HISTORY, MORE, (), tokenizer("yes", add_special_tokens=False)["input_ids"][-1])

    assert ended is not None and cut is not None
    assert (token, *ended.token_ids) == cut.token_ids
    assert end + ended.text == cut.text
