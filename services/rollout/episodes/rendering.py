"""From chat messages to token ids, once per turn; from then on only tokens travel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ModelError
from shared.schemas.task import Message


class Renderer(Protocol):
    """Turns a prompt into token ids and completions into text for people and graders."""

    stop_token_ids: tuple[int, ...]

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first."""

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode tokens for people and graders."""


class ChatRenderer:
    """Renders through the chat template that comes with the model.

    A tokenizer without a template gets the messages' contents joined by blank lines: a base model's plain prompt.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids

    @classmethod
    def from_directory(cls, path: str) -> "ChatRenderer":
        """Load the tokenizer of a model directory; takes seconds, so call it on a thread.

        Raises:
            ModelError: there is no tokenizer that can be loaded.
        """
        from transformers import AutoTokenizer, GenerationConfig

        if not Path(path).is_dir():
            raise ModelError(f"model.path {path} is not a directory")
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"no tokenizer can be loaded from {path}: {error}") from error
        stops = {tokenizer.eos_token_id} - {None}
        try:
            configured = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        except (OSError, ValueError):
            configured = None
        stops |= set(configured if isinstance(configured, list) else [configured]) - {None}
        return cls(tokenizer, tuple(sorted(int(token) for token in stops)))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first."""
        if not self._tokenizer.chat_template:
            text = "\n\n".join(message.content for message in messages)
            return tuple(self._tokenizer(text)["input_ids"])
        chat = [{"role": message.role, "content": message.content} for message in messages]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode tokens for people and graders."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special_tokens))
