"""From whole conversations to token ids and which of them are learned.

The assistant's turns are tokenised apart from what is around them, as they are when they are sampled: prompts have
the ids that a rollout would give the engine, and answers those that it would append.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model reads it.

    Attributes:
        token_ids: of all of it.
        loss_mask: 1 where a token of the assistant's turns is learned, its end included.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def render(tokenizer: Any, template: PromptTemplate, messages: Sequence[Message], start: int) -> Rendered:
    """Render a conversation; the assistant's turns from the message numbered ``start`` on are learned.

    Raises:
        ValueError: nothing is left to learn, or the template cannot be cut into turns.
    """
    turns = [number for number, each in enumerate(messages) if each.role == ASSISTANT and number >= start]
    if not turns:
        raise ValueError("the conversation has no turn of the assistant to learn")
    if template.input_template is not None or not tokenizer.chat_template:
        return _plain(tokenizer, template, messages, turns)
    chat = [{"role": message.role, "content": message.content} for message in messages]

    def text(count: int, *, asks: bool) -> str:
        return template.render(tokenizer, chat[:count], opens=asks)

    whole, at = text(len(chat), asks=False), 0
    parts: list[tuple[str, bool]] = []
    for turn in turns:
        before = text(turn, asks=True)
        after = whole if turn == len(chat) - 1 else text(turn + 1, asks=False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= at):
            raise ValueError(
                f"the chat template writes message {turn} in another way once others follow, so that its turn cannot "
                "be told apart: learn the last turn only (job.train_on: last)"
            )
        parts += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
        at = len(after)
    return _joined(tokenizer, [*parts, (whole[at:], False)])


def _plain(tokenizer: Any, template: PromptTemplate, messages: Sequence[Message], turns: Sequence[int]) -> Rendered:
    """Without a chat template there is one prompt and one answer, which the end-of-sequence token ends."""
    if list(turns) != [len(messages) - 1] or any(each.role == ASSISTANT for each in messages[:-1]):
        raise ValueError("several turns need a chat template, and the tokenizer, or data.input_template, has none")
    prompt = template.token_ids(tokenizer, messages[:-1])
    answer = tuple(tokenizer(messages[-1].content, add_special_tokens=False)["input_ids"])
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    learned = answer + ends
    return Rendered(prompt + learned, (0,) * len(prompt) + (1,) * len(learned))


def _joined(tokenizer: Any, parts: Sequence[tuple[str, bool]]) -> Rendered:
    token_ids: list[int] = []
    mask: list[int] = []
    for text, is_learned in parts:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        token_ids += ids
        num_learned = _until_end(ids, tokenizer.eos_token_id) if is_learned else 0
        mask += [1] * num_learned + [0] * (len(ids) - num_learned)
    return Rendered(tuple(token_ids), tuple(mask))


def _until_end(ids: Sequence[int], end: int | None) -> int:
    """Count the tokens of a turn up to its end token; what a template writes after that is not sampled."""
    return len(ids) if end is None or end not in ids else len(ids) - list(reversed(ids)).index(end)
