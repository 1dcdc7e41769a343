"""The model's chat template as a conversation with an agent needs it: whole, or only what comes behind a reply."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.shared.errors import DataError, InvalidRequest, ModelError
from flotilla.shared.schemas.prompt_image import PromptImage, moved
from flotilla.shared.schemas.task import Message
from flotilla.shared.vision.processor import without_cuts

ChatMessage = Mapping[str, Any]


class Continuation(NamedTuple):
    """What follows a reply: the end of its message if it has none yet, new messages, the beginning of the next reply.

    Attributes:
        token_ids: of it.
        text: the same, for people.
        images: among the tokens.
    """

    token_ids: tuple[int, ...]
    text: str
    images: tuple[PromptImage, ...] = ()


class ChatTemplate:
    """The template of a model, by the renderer of the fleet's own episodes.

    It turns conversations into text, text into token ids, and tokens into text.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.stop_token_ids = renderer.stop_token_ids

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length divided by it."""
        return self._renderer.longest_token()

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation so that what comes next is the assistant's.

        Raises:
            InvalidRequest: the template does not take it.
        """
        if self._renderer.is_chat:
            return self._render(messages, tools, opens=True)
        if tools:
            raise InvalidRequest("the model has no chat template, so tools cannot be described to it")
        if any(not isinstance(each["content"], str) for each in messages):
            raise InvalidRequest("the model has no chat template, so it cannot be shown images")
        plain = [Message(each["role"], each["content"]) for each in messages]
        return self.text(self._renderer.prompt_ids(plain), with_special_tokens=True)

    def continuation(
        self,
        history: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        last_token: int,
        images: Sequence[bytes] = (),
    ) -> Continuation | None:
        """Render and tokenise what ``messages`` add behind ``history``, whose last message is a reply in tokens.

        Args:
            last_token: that the policy sampled of the reply.
            images: of what is added.

        Returns:
            None where the template renders ``history`` in another way once something follows it.
        """
        end = self._reply_end
        if end is None:
            return None
        before, after = self._render(history, tools, opens=False), self._render(messages, tools, opens=True)
        if not (before.endswith(end) and after.startswith(before)):
            return None
        return self._without(last_token, end + after[len(before) :], images)

    def _without(self, last_token: int, added: str, images: Sequence[bytes]) -> Continuation:
        """Tokenise what the template puts behind a reply, without the token that ends it where it was sampled.

        Tokens are compared, not texts: a reply that was cut after ``<`` does not have the beginning of ``<|im_end|>``.
        """
        token_ids, placed = self.illustrated(added, images)
        if last_token in self.stop_token_ids:
            # Some tokenizers put a mark of their own before every text.
            for place, token in enumerate(token_ids[:2]):
                if token == last_token:
                    ended = self.text([token], with_special_tokens=True)
                    rest = without_cuts(added.removeprefix(ended))
                    return Continuation(token_ids[place + 1 :], rest, moved(placed, -place - 1))
        return Continuation(token_ids, without_cuts(added), placed)

    def illustrated(self, text: str, images: Sequence[bytes]) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Tokenise a rendered text with a place for each image, and find these.

        Raises:
            InvalidRequest: the model takes none, or the text has not one place for each.
        """
        if not images:
            return self.token_ids(text), ()
        try:
            return self._renderer.tokenised(text, images)
        except (DataError, ModelError) as error:
            raise InvalidRequest(error.detail) from error

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise a text that special tokens may be in."""
        return self._renderer.token_ids(text)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode."""
        return self._renderer.text(token_ids, with_special_tokens=with_special_tokens)

    @functools.cached_property
    def _reply_end(self) -> str | None:
        """What the template puts behind a reply; None where there is no chat template."""
        if not self._renderer.is_chat:
            return None
        try:
            return self._renderer.behind_answer((), opens=False)
        except ModelError as error:
            raise InvalidRequest(error.detail) from error

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, opens: bool) -> str:
        try:
            return self._renderer.render(messages, tools, opens=opens)
        except Exception as error:
            # A template is a program of the model's maker: it may refuse messages with any error.
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}"[:500]) from error
