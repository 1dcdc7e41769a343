"""Parts of messages as OpenAI writes them: texts, and images with a ``data:`` URI.

Nothing is fetched: the author of the parts would choose what this machine requests.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flotilla.shared.errors import DataError
from flotilla.shared.schemas.task import IMAGE_MARK
from flotilla.shared.vision.files import MOST_BYTES, size_of

DATA_URI: Final = "data:"
KINDS: Final = ("image", "image_url")
FORMATS: Final = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
"""By the first bytes of an image."""
OWN_IMAGE: Final = ("url", "bytes", "path", "base64")
"""Where a part of a message may have its image."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message.

    Attributes:
        text: None of an image.
        source: of an image; None where it has none of its own.
    """

    text: str | None
    source: Any = None

    @classmethod
    def of(cls, written: Any) -> "Part":
        """Read one.

        Raises:
            DataError: it is no part that is known.
        """
        fields = written if isinstance(written, Mapping) else {}
        kind = fields.get("type", "text" if fields.get("text") is not None else None)
        if kind == "text":
            return cls(str(fields.get("text") or ""))
        if kind not in KINDS:
            raise DataError(f"a part of a message must be text, image or image_url, and is {kind or written!r}"[:200])
        # An entry that names its own image is never matched to another one.
        source = _first_of(fields, (kind, *OWN_IMAGE))
        return cls(None, _first_of(source, OWN_IMAGE) if isinstance(source, Mapping) else source)

    def image(self) -> bytes:
        """Return the image that it has of its own.

        Raises:
            DataError: it is at a URL, or is no image that can be read.
        """
        if isinstance(self.source, bytes):
            return checked(self.source)
        if not isinstance(self.source, str) or not self.source.startswith(DATA_URI):
            raise DataError(
                f"the image {str(self.source)[:80]!r} has no bytes here, and none is fetched: write a data: URI"
            )
        return checked(data_of(self.source))


def texts_of(parts: Sequence[Part]) -> list[str]:
    """Join the texts of parts as far as no image is between them."""
    found = [""]
    for part in parts:
        if part.text is None:
            found.append("")
        else:
            found[-1] += part.text
    return found


def images_of(parts: Sequence[Part]) -> list[bytes]:
    """List the images of parts.

    Raises:
        DataError: as ``Part.image``.
    """
    return [part.image() for part in parts if part.text is None]


def marked(parts: Sequence[Part]) -> str:
    """Write parts of a row as a text with a mark for each image.

    Raises:
        DataError: a text has a mark.
    """
    texts = texts_of(parts)
    if any(IMAGE_MARK in text for text in texts):
        raise DataError(f"a text beside other parts has {IMAGE_MARK}: write the image as a part of its own")
    return IMAGE_MARK.join(texts)


def checked(data: bytes) -> bytes:
    """Return an encoded image whose header has been read.

    Raises:
        DataError: it is no image, or it is too large.
    """
    size_of(data)
    return data


def data_of(uri: str) -> bytes:
    """Decode a ``data:`` URI.

    Raises:
        DataError: it is none of an image, in base64, of at most ``MOST_BYTES``.
    """
    head, _, body = uri.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise DataError(f"a data: URI of an image begins with data:image/TYPE;base64, got {head[:60]!r}")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise DataError(f"an image has more than {MOST_BYTES} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DataError(f"a data: URI is no base64: {error}") from error


def uri_of(data: bytes) -> str | None:
    """Write an image as a ``data:`` URI; None where its format is none that is known."""
    kind = next((kind for beginning, kind in FORMATS.items() if data.startswith(beginning)), None)
    return None if kind is None else f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def are_parts(said: object) -> bool:
    """Return whether something is a list of content parts with an image among them."""
    return isinstance(said, list | tuple) and any(_kind(each) in KINDS for each in said)


def _kind(part: object) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _first_of(fields: Mapping[str, object], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)
