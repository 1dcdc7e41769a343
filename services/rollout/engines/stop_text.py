"""Stop strings: found in the decoded tail of a completion, token by token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flotilla.shared.errors import InvalidRequest

# A tail starts some tokens early: decoders treat the first token of a text differently, and a character may be split.
LEAD_TOKENS = 8
OTHER_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


class TextDecoder(Protocol):
    """Turns token ids into text, special tokens included."""

    def decode(self, token_ids: Sequence[int], /) -> str: ...


class StopText:
    """Finds any of some strings at the end of a growing completion.

    Args:
        decoder: of the model's tokens.
        strings: what ends a completion, none empty.
    """

    def __init__(self, decoder: TextDecoder, strings: Sequence[str]) -> None:
        self._decoder = decoder
        self._strings = tuple(strings)
        # Every token is at least one byte, so no more tokens than bytes can hold the string.
        self._tail = LEAD_TOKENS + max(len(string.encode()) for string in self._strings)

    def ends(self, token_ids: npt.NDArray[np.int32]) -> bool:
        """Return whether the last token completes one of the strings."""
        text = self._decoder.decode(token_ids[-self._tail :].tolist())
        return any(string in text for string in self._strings)


class _FastDecoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], /) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def load_text_decoder(directory: Path) -> TextDecoder:
    """Load the tokenizer of a model directory.

    Raises:
        InvalidRequest: the directory has no tokenizer, so stop strings cannot be honoured.
    """
    file = directory / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        return _FastDecoder(Tokenizer.from_file(str(file)))
    if not any((directory / name).is_file() for name in OTHER_TOKENIZER_FILES):
        raise InvalidRequest(f"stop strings need a tokenizer, and {directory} has none")
    from transformers import AutoTokenizer

    try:
        return _FastDecoder(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the tokenizer of {directory} cannot be loaded: {error}") from error
