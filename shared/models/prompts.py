"""From the messages of a prompt to its token ids, the same wherever tokens are made or counted.

Rollouts make them; the gateway counts them where rows that are too long are left out. Only ``load_tokenizer`` imports
transformers, of which tokenizers need no torch.

From whole conversations to token ids and which of them are learned.

The assistant's turns are tokenised apart from what is around them, as they are when they are sampled: prompts have
the ids that a rollout would give the engine, and answers those that it would append.
"""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flotilla.shared.config.sections.data import PLACE, DataConfig, ErrorOverlongConfig, TruncateOverlongConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError, PromptTooLong
from flotilla.shared.net.absence import absent_or
from flotilla.shared.schemas.task import Message
from flotilla.shared.vision.processor import ImageProcessor, token_ids_of


def keep_torch_out() -> None:
    """Let transformers find no torch in this process: it would import it, two seconds and 200 MB, for a tokenizer."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the advice is to install torch


USING_TRANSFORMERS = threading.RLock()
"""Held while something is loaded on a thread: transformers imports its parts as they are first used, and two threads
that do so at once find them half imported."""


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a model directory; takes seconds.

    Raises:
        ModelError: there is none that can be loaded.
    """
    if not Path(path).is_dir():
        raise ModelError(f"model.path {path} is not a directory")
    try:
        with USING_TRANSFORMERS:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise absent_or(error, ModelError(f"no tokenizer can be loaded from {path}: {error}")) from error


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """What is put around a prompt.

    Attributes:
        input_template: text with ``{}`` for the prompt; None is the model's chat template.
        options: variables of the chat template.
    """

    input_template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataConfig) -> "PromptTemplate":
        """Read it from a spec."""
        return cls(data.input_template, data.chat_template_options)

    def token_ids(self, tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first.

        A tokenizer without a chat template gets the messages' contents joined by blank lines: a base model's plain
        prompt.
        """
        if self.input_template is not None:
            text = self.input_template.replace(PLACE, messages[-1].content)
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not tokenizer.chat_template:
            text = "\n\n".join(message.content for message in messages)
            return tuple(tokenizer(text)["input_ids"])
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return tuple(tokenizer(self.render(tokenizer, chat), add_special_tokens=False)["input_ids"])

    def illustrated_ids(
        self, tokenizer: Any, messages: Sequence[Message], processor: ImageProcessor
    ) -> tuple[int, ...]:
        """Do what ``token_ids`` does for a prompt with images.

        Raises:
            DataError: an image cannot be read, or the prompt has not one place for each.
            ModelError: the template has no place for images.
        """
        if self.input_template is not None or not tokenizer.chat_template:
            raise ModelError("prompts with images need the model's chat template: leave data.input_template out")
        chat = [processor.as_text(each) for each in chat_of(messages)]
        text = processor.expand(self.render(tokenizer, chat), images_of(messages))
        return token_ids_of(tokenizer, text)

    def render(self, tokenizer: Any, chat: Sequence[Mapping[str, Any]], *, opens: bool = True, **options: Any) -> str:
        """Render messages by the model's chat template; raises whatever that program raises.

        Args:
            opens: end with the beginning of the assistant's next message.
            options: variables of the template, beside those of the spec.
        """
        variables = {**self.options, **options}
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=opens, **variables))


def images_of(messages: Sequence[Message]) -> list[bytes]:
    """List the images of messages, in order."""
    return [image for message in messages for image in message.images]


def chat_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Make messages as chat templates take them: one with images as parts, any other as text."""
    return [
        {"role": message.role, "content": _parts_of(message.texts) if message.images else message.content}
        for message in messages
    ]


def _parts_of(texts: Sequence[str]) -> list[dict[str, str]]:
    """Write the content of a message with an image between each two texts."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """What becomes of a prompt that is too long.

    Attributes:
        max_tokens: of a prompt; None leaves it to the engine to refuse what does not fit.
        side: where tokens are dropped; None refuses.
    """

    max_tokens: int | None = None
    side: Literal["left", "right", "middle"] | None = None

    @classmethod
    def of(cls, spec: ExperimentSpec) -> "PromptLimit":
        """Read it from a spec."""
        overlong = spec.data.overlong
        if isinstance(overlong, ErrorOverlongConfig):
            return cls(spec.data.max_prompt_tokens)
        return cls(spec.max_prompt_tokens, overlong.side if isinstance(overlong, TruncateOverlongConfig) else None)

    def fit(self, token_ids: tuple[int, ...], *, has_images: bool = False) -> tuple[int, ...]:
        """Cut a prompt to its limit L: left keeps the last L tokens, right the first, middle L // 2 and the rest last.

        One with images is never cut: the tokens of an image are whole, or mean nothing.

        Raises:
            PromptTooLong: it is too long, and is not to be cut.
        """
        limit, num_tokens = self.max_tokens, len(token_ids)
        if limit is None or num_tokens <= limit:
            return token_ids
        match None if has_images else self.side:
            case "left":
                return token_ids[num_tokens - limit :]
            case "right":
                return token_ids[:limit]
            case "middle":
                return token_ids[: limit // 2] + token_ids[num_tokens - (limit - limit // 2) :]
        raise PromptTooLong(
            f"a prompt of {num_tokens} tokens is longer than the {limit} allowed",
            errors=[{"field": "data.max_prompt_tokens", "value": num_tokens, "allowed": f"at most {limit}"}],
        )


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
