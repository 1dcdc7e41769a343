"""What surely does not fit an engine's context is refused before it is rendered and tokenised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.shared.errors import InvalidRequest


class ContextTooLong(InvalidRequest):
    """The conversation leaves no room for a reply."""

    code, title, status = "context_length_exceeded", "The conversation is too long", 400


@dataclass(frozen=True, slots=True)
class ContextBound:
    """How much an engine's context may hold.

    Attributes:
        tokens: of the context, the reply's included.
        longest: characters of the longest token.
    """

    tokens: int
    longest: int

    def check_text(self, num_characters: int) -> None:
        """Check that a text may fit.

        Raises:
            ContextTooLong: it cannot, even in the longest tokens.
        """
        most = self.tokens * self.longest
        if num_characters > most:
            raise ContextTooLong(
                f"the conversation has {num_characters} characters, and {self.tokens} tokens, all that the engine's "
                f"context holds with the reply, have {most} at most (rollout.engine.context_tokens)"
            )

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Check that the texts of plain messages may fit; a template may leave out what the assistant said.

        Raises:
            ContextTooLong: they cannot.
        """
        self.check_text(sum(len(each["content"]) for each in messages if each.get("role") != "assistant"))

    def check_tokens(self, num_tokens: int) -> None:
        """Check that a prompt leaves room for a reply.

        Raises:
            ContextTooLong: it does not.
        """
        if num_tokens >= self.tokens:
            raise ContextTooLong(
                f"the conversation has {num_tokens} tokens, and the engine's context holds {self.tokens} with the "
                "reply (rollout.engine.context_tokens)"
            )
