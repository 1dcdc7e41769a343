"""A tokenizer whose tokens are characters: what was tokenised, and how often, can be read."""

from collections.abc import Mapping, Sequence
from typing import Any

END = 3
"""Token that ends a turn."""


class CharacterTokenizer:
    """Has of a Hugging Face tokenizer what chats need; its template is one line per message.

    Args:
        hides_thoughts: leave ``(...)`` out of earlier replies, as templates of thinking models do.
    """

    chat_template: str | None = "lines"

    def __init__(self, *, hides_thoughts: bool = False) -> None:
        self._hides_thoughts = hides_thoughts
        self.tokenised: list[str] = []

    def __call__(self, text: str, **_options: Any) -> Mapping[str, list[int]]:
        """Tokenise."""
        self.tokenised.append(text)
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode."""
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token == END))

    def get_vocab(self) -> Mapping[str, int]:
        """List the tokens, or one of each length."""
        return {chr(END): END}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **_options: Any,
    ) -> str:
        """Render: each message is ``<role>content``, the end token and a line feed; tools come first."""
        if messages[0]["role"] == "refused":
            raise ValueError("there is no such role")
        text = f"<tools>{[tool['function']['name'] for tool in tools]}{chr(END)}\n" if tools else ""
        for number, message in enumerate(messages):
            content = message["content"]
            if self._hides_thoughts and number < len(messages) - 1 and message["role"] == "assistant":
                content = content.partition(")")[2]
            for call in message.get("tool_calls", ()):
                content += f"<tool_call>{call['function']['name']}</tool_call>"
            text += f"<{message['role']}>{content}{chr(END)}\n"
        return text + "<assistant>" * add_generation_prompt
