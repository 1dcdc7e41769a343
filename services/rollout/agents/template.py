"""The model's chat template as a conversation with an agent needs it: whole, or only what comes behind a reply."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from shared.errors import InvalidRequest
from shared.prompts import PromptTemplate
from shared.schemas.task import Message

MARK: Final = "flotilla-reply"
ChatMessage = Mapping[str, Any]


class Template(Protocol):
    """Turns conversations into text, text into token ids, and tokens into text."""

    stop_token_ids: tuple[int, ...]

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation so that what comes next is the assistant's.

        Raises:
            InvalidRequest: the template does not take it.
        """

    def continuation(
        self,
        history: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        last_token: int,
    ) -> str | None:
        """Render what ``messages`` add behind ``history``, whose last message is a reply that is there as tokens.

        Args:
            last_token: that the policy sampled of the reply.

        Returns:
            None where the template renders ``history`` in another way once something follows it.
        """

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise a text that special tokens may be in."""

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode."""


class ChatTemplate:
    """The template of a Hugging Face tokenizer."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: tuple[int, ...] = (), template: PromptTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._template = template or PromptTemplate()
        self._is_chat = bool(tokenizer.chat_template) and self._template.input_template is None

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
        """See ``Template.prompt``."""
        if self._is_chat:
            return self._render(messages, tools, opens=True)
        if tools:
            raise InvalidRequest("the model has no chat template, so it cannot be told of tools")
        plain = [Message(each["role"], each["content"]) for each in messages]
        return self.text(self._template.token_ids(self._tokenizer, plain), with_special_tokens=True)

    def continuation(
        self,
        history: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        last_token: int,
    ) -> str | None:
        """See ``Template.continuation``."""
        end = self._reply_end
        if end is None:
            return None
        before, after = self._render(history, tools, opens=False), self._render(messages, tools, opens=True)
        if not (before.endswith(end) and after.startswith(before)):
            return None
        last = self.text([last_token], with_special_tokens=True)
        # The token that ended the reply is the beginning of what the template puts behind replies; it is there already.
        missing = end[len(last) :] if last and end.startswith(last) else end
        return missing + after[len(before) :]

    def token_ids(self, text: str) -> tuple[int, ...]:
        """See ``Template.token_ids``."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """See ``Template.text``."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special_tokens))

    @functools.cached_property
    def _reply_end(self) -> str | None:
        """What the template puts behind a reply; None where there is no chat template."""
        if not self._is_chat:
            return None
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        return self._render(exchange, (), opens=False).rpartition(MARK)[2]

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, opens: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens,
                **self._template.options,
            )
        except Exception as error:
            # A template is a program of the model's maker: it says by any error what it does not take.
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}"[:500]) from error
        return str(rendered)
