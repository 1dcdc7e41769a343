"""The text of single tokens, read from a model's ``tokenizer.json`` without the library that made it."""

import codecs
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from pydantic import BaseModel

FILE: Final = "tokenizer.json"
MOST_BYTES: Final = 128 * 2**20
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_MARK: Final = "▁"
VOCABULARIES_KEPT: Final = 2


class TokenTexts:
    """Knows what each token of a vocabulary stands for.

    Args:
        pieces: bytes by token id.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces

    def of(self, ids: Sequence[int]) -> list[str]:
        """Give the text of each token: as long as ``ids``, and in a row the text of all.

        A letter that several tokens make stands with the last of them. An id that is not known has no text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self._pieces.get(token, b"")) for token in ids]


def token_texts(model: Path) -> TokenTexts | None:
    """Read the vocabulary of a model's directory; None where it has none that can be read so.

    The last ones are kept: reading one of 150,000 tokens takes half a second.
    """
    path = model / FILE
    try:
        return _read(str(path), path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return None


class _Added(BaseModel):
    id: int
    content: str


class _Decoder(BaseModel):
    type: str
    decoders: tuple["_Decoder", ...] = ()

    @property
    def is_byte_level(self) -> bool:
        return self.type == "ByteLevel" or any(each.is_byte_level for each in self.decoders)


class _Vocabulary(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Ids by text; of a unigram model texts and scores in the order of ids."""


class _TokenizerFile(BaseModel):
    """The parts of the file that are read."""

    model: _Vocabulary
    decoder: _Decoder | None = None
    added_tokens: tuple[_Added, ...] = ()


@lru_cache(VOCABULARIES_KEPT)
def _read(path: str, _mtime_ns: int) -> TokenTexts | None:
    text = _text_of(path)
    try:
        file = _TokenizerFile.model_validate_json(text) if text is not None else None
    except ValueError:
        file = None
    if file is None:
        return None
    of_bytes = _byte_letters() if file.decoder is not None and file.decoder.is_byte_level else None
    vocab = file.model.vocab
    numbered = vocab if isinstance(vocab, dict) else {text: number for number, (text, _) in enumerate(vocab)}
    pieces = {number: _bytes_of(text, of_bytes) for text, number in numbered.items()}
    return TokenTexts(pieces | {each.id: each.content.encode() for each in file.added_tokens})


def _text_of(path: str) -> bytes | None:
    """Read a plain file that is not too long; a pipe or a device is not waited for."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        text = file.read(MOST_BYTES + 1)
    return text if len(text) <= MOST_BYTES else None


def _bytes_of(text: str, of_bytes: Mapping[str, int] | None) -> bytes:
    if of_bytes is not None:
        return bytes(of_bytes[letter] for letter in text) if all(each in of_bytes for each in text) else text.encode()
    if found := BYTE_TOKEN.fullmatch(text):
        return bytes([int(found[1], 16)])
    return text.replace(WORD_MARK, " ").encode()


def _byte_letters() -> dict[str, int]:
    """Map letters to bytes as GPT-2 does: printable bytes stand for themselves, the others follow from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
