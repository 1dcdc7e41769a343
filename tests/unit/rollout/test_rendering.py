"""A turn follows another in five chat templates, and no token that was sampled is ever made again."""

import random

import numpy as np
import pytest

from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.trajectory_builder import RenderTally, TrajectoryBuilder
from flotilla.shared.errors import ModelError
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.turns import FinishReason
from tests.unit.rollout.chat_templates import CORPUS, FAMILIES, tokenizer_of

WORDS = sorted({word for line in CORPUS for word in line.split()} | {"Größe", "日本", "🙂", "  two", "a\tb"})
TURNS_OF_ONE = 10


def renderer_of(name: str, template: PromptTemplate | None = None) -> ChatRenderer:
    tokenizer = tokenizer_of(name)
    stops = {tokenizer.convert_tokens_to_ids(FAMILIES[name].end)}
    if name == "qwen 3":
        stops.add(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    return ChatRenderer(tokenizer, tuple(sorted(stops)), template)


def words(rng: random.Random, most: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def answer(name: str, rng: random.Random) -> tuple[list[int], str, bool]:
    """Sample an answer: in the usual tokens, in other tokens of the same text, in any tokens, or cut.

    Returns:
        Token ids, the text, and whether a tokenizer would make the same tokens.
    """
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    end = tokenizer.convert_tokens_to_ids(family.end)
    text = family.lead + words(rng)
    if name == "qwen 3" and rng.random() < 0.5:
        text = f"<think>\n{words(rng)}\n</think>\n\n{text}"
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    kind = rng.random()
    if kind < 0.5:
        return [*ids, end], text, True
    if kind < 0.7:  # in pieces: a policy may sample what no tokenizer would make
        ids = [token for word in text.split(" ") for token in tokenizer(word, add_special_tokens=False)["input_ids"]]
        return [*ids, end], tokenizer.decode(ids), False
    if kind < 0.85:
        ids = [rng.randrange(256, len(tokenizer) - 8) for _ in range(rng.randint(1, 9))]
        return [*ids, end], tokenizer.decode(ids), False
    return ids, text, True  # it reached the most tokens of a turn


def simulate(name: str, num_turns: int, seed: int) -> tuple[int, int]:
    """Play episodes; returns how often a full re-rendering would have changed recorded tokens, and turns played."""
    rng, family, tokenizer = random.Random(seed), FAMILIES[name], tokenizer_of(name)
    renderer, tally = renderer_of(name), RenderTally()
    end = tokenizer.convert_tokens_to_ids(family.end)
    changed = played = 0
    while played < num_turns:
        builder, chat = TrajectoryBuilder(tally), [Message("user", words(rng))]
        builder.show(renderer.prompt_ids(chat))
        is_usual = True
        for number in range(TURNS_OF_ONE):
            ids, text, is_canonical = answer(name, rng)
            is_usual &= is_canonical and ids[-1] == end and "<think>" not in text
            before = builder.token_ids
            builder.sample(np.array(ids, np.int32), np.zeros(len(ids), np.float32), ((0, 0),), FinishReason.STOP, text)
            shown = words(rng)
            following = renderer.continuation_ids([Message("user", shown)], ids[-1])
            builder.show(following, shown)
            played += 1
            chat += [Message("assistant", text.removeprefix(family.lead)), Message("user", shown)]
            assert builder.token_ids == (*before, *ids, *following)
            closing = "" if ids[-1] == end else family.end
            assert tokenizer.decode(following) == closing + family.between(shown)
            whole = renderer.prompt_ids(chat)
            if is_usual and all(each.content == each.content.strip() for each in chat):
                assert builder.token_ids == whole, f"{name}: turn {number} is not what the template makes of it all"
            changed += whole[: len(before) + len(ids)] != (*before, *ids)
    assert tally.refused == 0
    return changed, played


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_follow_each_other_without_a_token_made_twice(name: str) -> None:
    changed, played = simulate(name, 300, seed=1)

    assert changed > played // 10, "rendering it all again would change what was sampled: the test can tell"


@pytest.mark.long
@pytest.mark.timeout(580)
@pytest.mark.parametrize("name", FAMILIES)
def test_ten_thousand_turns_follow_each_other_without_a_token_made_twice(name: str) -> None:
    changed, played = simulate(name, 10_000, seed=2)

    assert played >= 10_000
    assert changed > played // 10


def test_tool_results_follow_an_answer_as_one_message() -> None:
    renderer, tokenizer = renderer_of("qwen 3"), tokenizer_of("qwen 3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    found = renderer.continuation_ids([Message("tool", "5"), Message("tool", "7")], end)

    assert tokenizer.decode(found) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_options_of_the_template_hold_in_every_turn() -> None:
    renderer = renderer_of("qwen 3", PromptTemplate(options={"enable_thinking": False}))
    end = tokenizer_of("qwen 3").convert_tokens_to_ids("<|im_end|>")

    assert renderer.text(renderer.continuation_ids([Message("user", "go")], end)).endswith("<think>\n\n</think>\n\n")


def test_an_answer_that_ended_otherwise_is_closed_for_the_template() -> None:
    renderer, tokenizer = renderer_of("qwen 3"), tokenizer_of("qwen 3")
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    found = renderer.continuation_ids([Message("user", "go")], other)

    assert tokenizer.decode(found).startswith("<|im_end|>\n<|im_start|>user\ngo")


def test_a_template_that_leaves_answers_out_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    only_users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    known, tokenizer.chat_template = tokenizer.chat_template, only_users
    try:
        with pytest.raises(ModelError, match="leaves the assistant's earlier answers out"):
            ChatRenderer(tokenizer, (0,)).check_continuation()
    finally:
        tokenizer.chat_template = known
    with pytest.raises(ModelError, match="none of the model's end tokens"):
        ChatRenderer(tokenizer, ()).check_continuation()
