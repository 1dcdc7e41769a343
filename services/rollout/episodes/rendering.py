"""From chat messages to token ids, once per turn; from then on only tokens travel."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.requests import condensed
from flotilla.services.rollout.episodes.special_tokens import SpecialTokens
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import ModelError
from flotilla.shared.models.prompts import USING_TRANSFORMERS, PromptTemplate, chat_of, images_of, load_tokenizer
from flotilla.shared.schemas.prompt_image import within
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import Trajectory
from flotilla.shared.vision.processor import ImageProcessor, processor_of, token_ids_of

ANY_MESSAGE = Message("user", ".")
Illustrated = tuple[tuple[int, ...], tuple[PromptImage, ...]]
"""Token ids, and the images among them."""


class Renderer(Protocol):
    """Turns a prompt into token ids and completions into text for people and graders."""

    stop_token_ids: tuple[int, ...]

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first."""

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode tokens for people and graders."""


class IllustratedRenderer(Renderer, Protocol):
    """A renderer of messages with images."""

    def illustrated(self, messages: Sequence[Message]) -> Illustrated:
        """Render a prompt with images, each where its message has ``IMAGE_MARK``: token ids, and where the images are.

        Raises:
            DataError: an image cannot be read, or the prompt has not one place for each.
            ModelError: the model takes no images.
        """

    def illustrated_continuation(self, messages: Sequence[Message], last: int) -> Illustrated:
        """Render what follows a completion, as ``TurnRenderer.continuation_ids``, with images; raises as both."""

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PromptImage, ...]:
        """Find images in a prompt that ``illustrated`` rendered."""

    def check_row(self, task: Task) -> None:
        """Check that the texts of a row with images leave their places to its marks.

        Raises:
            DataError: one has an image's token as a word.
        """


class TurnRenderer(Renderer, Protocol):
    """A renderer that also continues behind a completion."""

    def continuation_ids(self, messages: Sequence[Message], last: int) -> tuple[int, ...]:
        """Render what follows a completion: the end of its message, new messages, the beginning of the next answer.

        Args:
            messages: that are new.
            last: the completion's last token; where it ends the message itself, the end is not repeated.

        Raises:
            ModelError: the chat template does not allow it.
        """

    def check_continuation(self, message: Message = ANY_MESSAGE) -> None:
        """See whether a turn can follow another at all, by a message of this role.

        Raises:
            ModelError: it cannot.
        """


MARK = "Answer-4f1c"
"""Placeholder for what the policy sampled while the template renders what comes behind it."""


class ChatRenderer:
    """Renders with the model's tokenizer, through its chat template or the input template that the spec gives."""

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        template: PromptTemplate | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._template = template or PromptTemplate()
        self.stop_token_ids = stop_token_ids

    @classmethod
    def from_directory(
        cls, path: str, template: PromptTemplate | None = None, images: ImagesConfig | None = None
    ) -> "ChatRenderer":
        """Load the tokenizer of a model directory, and its image processor where prompts have images.

        It takes seconds, so call it on a thread.

        Raises:
            ModelError: there is none that can be loaded.
        """
        with USING_TRANSFORMERS:
            from transformers import GenerationConfig

            tokenizer = load_tokenizer(path)
            stops = {tokenizer.eos_token_id} - {None}
            try:
                configured = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
            except (OSError, ValueError):
                configured = None
            processor = None if images is None else processor_of(path, images)
        stops |= set(configured if isinstance(configured, list) else [configured]) - {None}
        return cls(tokenizer, tuple(sorted(int(token) for token in stops)), template, processor)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are rendered by a chat template."""
        return bool(self._tokenizer.chat_template) and self._template.input_template is None

    def special_tokens(self) -> SpecialTokens:
        """Describe the tokenizer's special tokens."""
        return SpecialTokens.of(self._tokenizer, self.stop_token_ids)

    def longest_token(self) -> int:
        """Count the characters of the longest token. A byte token counts as a character."""
        return max(map(len, self._tokenizer.get_vocab()))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first."""
        return self._template.token_ids(self._tokenizer, messages)

    def illustrated(self, messages: Sequence[Message]) -> Illustrated:
        """Render a prompt with images; see ``IllustratedRenderer``."""
        token_ids = self._template.illustrated_ids(self._tokenizer, messages, self._seeing())
        return token_ids, self.placed(token_ids, images_of(messages))

    def illustrated_continuation(self, messages: Sequence[Message], last: int) -> Illustrated:
        """Render what follows a completion, with images; see ``IllustratedRenderer``."""
        images = images_of(messages)
        token_ids = self._behind(self._seeing().expand(self.behind_answer(messages), images), last)
        return token_ids, self.placed(token_ids, images)

    def tokenised(self, text: str, images: Sequence[bytes]) -> Illustrated:
        """Tokenise a rendered text that has a place for each image; raises as ``illustrated``."""
        token_ids = self.token_ids(self._seeing().expand(text, images))
        return token_ids, self.placed(token_ids, images)

    def _seeing(self) -> ImageProcessor:
        if self._processor is None:
            raise ModelError("there are images to be shown, and data.images is not set")
        return self._processor

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PromptImage, ...]:
        """Find images in a prompt; see ``IllustratedRenderer``."""
        if self._processor is None:
            return ()
        spans = self._processor.spans(np.asarray(token_ids), images)
        return tuple(PromptImage(s.start, s.num_tokens, image) for s, image in zip(spans, images, strict=True))

    def continuation_ids(self, messages: Sequence[Message], last: int) -> tuple[int, ...]:
        """Render what follows a completion; see ``TurnRenderer``.

        The template never sees what was sampled: it renders a mark in its place, and only what is behind the mark is
        made tokens. That begins with the special token that ends a message, where no tokenizer joins two texts.
        """
        return self._behind(self.behind_answer(messages), last)

    def _behind(self, tail: str, last: int) -> tuple[int, ...]:
        closing = self._closing
        if closing is None:
            return self.token_ids(tail)
        token, text = closing
        at = tail.find(text)
        ids = self.token_ids(tail[at:]) if at >= 0 else ()
        # Some tokenizers put a mark of their own before every text.
        start = next((place for place, each in enumerate(ids[:2]) if each == token), None)
        if start is None:
            raise ModelError("the chat template ends messages in different ways, so that a turn cannot follow another")
        return ids[start + 1 :] if last == token else ids[start:]

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> "ChatRenderer":
        """Make one that shows these tools in the first prompt."""
        template = replace(self._template, options={**self._template.options, "tools": list(schemas)})
        return ChatRenderer(self._tokenizer, self.stop_token_ids, template, self._processor)

    def check_continuation(self, message: Message = ANY_MESSAGE) -> None:
        """See whether a turn can follow another; see ``TurnRenderer``."""
        if self._template.input_template is not None:
            raise ModelError("data.input_template has no messages, so that a turn cannot follow another: remove it")
        self.continuation_ids([message], -1)

    def render(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, opens: bool = True
    ) -> str:
        """Render messages of any kind by the chat template, with no other tools than these; see ``PromptTemplate``.

        The text is for ``token_ids``; for people there is ``without_cuts``.
        """
        said = chat if self._processor is None else self._processor.as_text(list(chat))
        return self._template.render(self._tokenizer, said, opens=opens, tools=list(tools) or None)

    def behind_answer(self, messages: Sequence[Message], *, opens: bool = True) -> str:
        """Render what the template puts behind an answer: its end, and then these messages.

        Raises:
            ModelError: the template does not take it, or does not show earlier answers.
        """
        if not self._tokenizer.chat_template:
            return "".join(f"\n\n{each.content}" for each in messages)
        chat: list[dict[str, Any]] = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        chat += chat_of(messages)
        try:
            text = self.render(chat, opens=opens)
        except Exception as error:  # whatever a template raises: it is the model's own code
            raise ModelError(f"the chat template cannot go on behind an answer: {error}") from error
        _, mark, tail = text.partition(MARK)
        if not mark:
            raise ModelError("the chat template leaves the assistant's earlier answers out")
        return tail

    @cached_property
    def _closing(self) -> tuple[int, str] | None:
        """The token that ends the assistant's message in the template, and its text; None without a template."""
        if not self._tokenizer.chat_template:
            return None
        tail = self.behind_answer([Message("user", ".")])
        found = []
        for token in self.stop_token_ids:
            text = str(self._tokenizer.decode([token]))
            if text and (at := tail.find(text)) >= 0:
                found.append((at, token, text))
        if not found:
            raise ModelError("the chat template ends the assistant's message with none of the model's end tokens")
        _, token, text = min(found)
        return token, text

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise a text that special tokens may be in."""
        return token_ids_of(self._tokenizer, text)

    def check_row(self, task: Task) -> None:
        """Check the texts of a row with images; see ``IllustratedRenderer``."""
        if self._processor is not None:
            self._processor.check_row(task.messages)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode tokens for people and graders."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special_tokens))


def rendered(renderer: Renderer, messages: Sequence[Message]) -> Illustrated:
    """Render a prompt.

    Raises:
        DataError, ModelError: its images cannot be shown; see ``IllustratedRenderer``.
    """
    if not any(each.images for each in messages):
        return renderer.prompt_ids(messages), ()
    return cast("IllustratedRenderer", renderer).illustrated(messages)


def opened(renderer: Renderer, task: Task, messages: Sequence[Message]) -> Illustrated:
    """Render the prompt of a task, which has its images and no others.

    Raises:
        DataError, ModelError: as ``rendered``, and where the row's text has an image's token as a word.
    """
    if task.images:
        cast("IllustratedRenderer", renderer).check_row(task)
    return rendered(renderer, messages)


def continued(renderer: TurnRenderer, messages: Sequence[Message], last: int) -> Illustrated:
    """Render what follows a completion; raises as ``rendered``, and as ``TurnRenderer.continuation_ids``."""
    if not any(each.images for each in messages):
        return renderer.continuation_ids(messages, last), ()
    return cast("IllustratedRenderer", renderer).illustrated_continuation(messages, last)


def first_prompt(renderer: Renderer, trajectory: Trajectory, task: Task) -> tuple[int, ...]:
    """Return the tokens that a trajectory begins with, one of each image."""
    end = trajectory.turns[0].sampled if trajectory.turns else len(trajectory.token_ids)
    token_ids, images = trajectory.token_ids[:end].tolist(), within(trajectory.images, 0, end)
    if task.images and not images:
        images = cast("IllustratedRenderer", renderer).placed(token_ids, task.images)
    return condensed(token_ids, images)
