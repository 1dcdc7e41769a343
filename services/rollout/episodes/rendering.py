"""From chat messages to token ids, once per turn; from then on only tokens travel."""

from collections.abc import Sequence
from typing import Any, Protocol

from services.rollout.episodes.special_tokens import SpecialTokens
from shared.prompts import PromptTemplate, load_tokenizer
from shared.schemas.task import Message


class Renderer(Protocol):
    """Turns a prompt into token ids and completions into text for people and graders."""

    stop_token_ids: tuple[int, ...]

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first."""

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode tokens for people and graders."""


class ChatRenderer:
    """Renders with the model's tokenizer, through its chat template or the input template that the spec gives."""

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...], template: PromptTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template or PromptTemplate()
        self.stop_token_ids = stop_token_ids

    @classmethod
    def from_directory(cls, path: str, template: PromptTemplate | None = None) -> "ChatRenderer":
        """Load the tokenizer of a model directory; takes seconds, so call it on a thread.

        Raises:
            ModelError: there is no tokenizer that can be loaded.
        """
        from transformers import GenerationConfig

        tokenizer = load_tokenizer(path)
        stops = {tokenizer.eos_token_id} - {None}
        try:
            configured = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        except (OSError, ValueError):
            configured = None
        stops |= set(configured if isinstance(configured, list) else [configured]) - {None}
        return cls(tokenizer, tuple(sorted(int(token) for token in stops)), template)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for who renders by other means."""
        return self._tokenizer

    def special_tokens(self) -> SpecialTokens:
        """Describe the tokenizer's special tokens."""
        return SpecialTokens.of(self._tokenizer, self.stop_token_ids)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a prompt so that the next token is the assistant's first."""
        return self._template.token_ids(self._tokenizer, messages)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Decode tokens for people and graders."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special_tokens))
