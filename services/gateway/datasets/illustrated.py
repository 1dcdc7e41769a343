"""From the images of a row to those of its task: each stands where a message has ``IMAGE_MARK``.

Rows have them as verl, ROLL, EasyR1 and TRL write them (marks in the prompt, and a column), or as OpenAI's parts of
messages (``image_url`` with a ``data:`` URI). Nothing is fetched: a row that names a URL elsewhere is refused, since
whoever wrote the rows would choose what this machine asks for. A path leads to no file outside the data set's folder.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.services.gateway.datasets.columns import ABSENT, Row, structure_of, value_at
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import DataError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.task import IMAGE_MARK
from flotilla.shared.vision.files import MOST_BYTES, check_file, size_of

DATA_URI = "data:"
OWN_IMAGE = ("url", "bytes", "path", "base64")
"""Where a part of a message may have its image."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of a row: its bytes, or the file that has them.

    Attributes:
        data: None where it is in a file.
        path: absolute, in the data set's folder; None where there is none.
    """

    data: bytes | None = None
    path: Path | None = None

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            DataError: the file is not there any more.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"the image {self.path} cannot be read: {error}", path=str(self.path)) from error


class ImageFolder:
    """Finds the images of rows.

    Args:
        config: the spec's section.
        folder: of the rows' file; None where that is at a URL, or there is none.
        places: where files may be; None: anywhere.
    """

    def __init__(self, config: ImagesConfig, folder: Path | None, places: Places | None) -> None:
        named = config.folder
        if named is not None and places is not None:
            places.check_file(named)
        self._config = config
        self._folder = Path(named).resolve() if named is not None else None if folder is None else folder.resolve()

    def with_images(self, row: Row, number: int) -> Row:
        """Replace what a row has in its column of images by ``StoredImage``s.

        Raises:
            DataError: one is no image that may be read.
        """
        column = self._config.column
        found = row.get(column)
        if found is None:
            return {name: value for name, value in row.items() if name != column}
        listed = list(found) if isinstance(found, list | tuple) else [found]
        try:
            return {**row, column: tuple(self._stored(each) for each in listed if each is not None)}
        except DataError as error:
            raise DataError(f"row {number}, column {column!r}: {error.detail}", row=number) from error

    def _stored(self, value: Any) -> StoredImage:
        if isinstance(value, Mapping):
            value = next((value[name] for name in ("bytes", "path", "image") if value.get(name) is not None), None)
        if isinstance(value, bytes):
            return _checked(value)
        if not isinstance(value, str):
            raise DataError(f"an image must be bytes, a path or a data: URI, and is {type(value).__name__}")
        if value.startswith(DATA_URI):
            return _checked(data_of(value))
        return self._in_folder(value)

    def _in_folder(self, written: str) -> StoredImage:
        if "://" in written:
            raise DataError(
                f"the image {written[:80]!r} is at a URL, and none is fetched: write its bytes into the row"
            )
        if self._folder is None:
            raise DataError(
                f"the image {written[:80]!r} is a path, and there is no folder for it: set data.images.folder"
            )
        path = (self._folder / written).resolve()
        if not path.is_relative_to(self._folder):
            raise DataError(f"the image {written[:80]!r} is not in {self._folder}: set data.images.folder")
        check_file(path)
        return StoredImage(path=path)


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


def _checked(data: bytes) -> StoredImage:
    size_of(data)
    return StoredImage(data)


def illustrated(row: Row, config: DataConfig, images: ImagesConfig, number: int) -> Row:
    """Rewrite a row so that its prompt has a mark for each image, and its column the images in that order.

    Raises:
        DataError: prompt and images do not go together.
    """
    had = iter(row.get(images.column, ()))
    prompt = value_at(row, config.prompt_column)
    if isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
        prompt = structure_of(prompt) or prompt
    try:
        chat, found = _from_parts(prompt, had) if isinstance(prompt, list) else (prompt, [])
        found += had
        chat = _marked(chat, len(found))
    except DataError as error:
        raise DataError(f"the prompt of row {number}: {error.detail}", row=number) from error
    if len(found) > images.max_per_prompt:
        raise DataError(
            f"row {number} has {len(found)} images, and data.images.max_per_prompt is {images.max_per_prompt}",
            row=number,
        )
    if prompt is ABSENT:
        return row
    return {**row, config.prompt_column: chat, images.column: tuple(found)}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message.

    Attributes:
        text: None of an image.
        source: of an image; None where the row's column has it.
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
            text = str(fields.get("text") or "")
            if IMAGE_MARK in text:
                raise DataError(f"a text beside other parts has {IMAGE_MARK}: write the image as a part of its own")
            return cls(text)
        if kind not in {"image", "image_url"}:
            raise DataError(f"a part of a message must be text, image or image_url, and is {kind or written!r}"[:200])
        # Whatever names an image of its own is never taken for the column's next one.
        source = _first_of(fields, (kind, *OWN_IMAGE))
        return cls(None, _first_of(source, OWN_IMAGE) if isinstance(source, Mapping) else source)

    def image(self, had: Iterator[StoredImage]) -> StoredImage:
        """Return the image: its own, or the column's next.

        Raises:
            DataError: it is at a URL, or the column has no other.
        """
        if self.source is None:
            found = next(had, None)
            if found is None:
                raise DataError("it has more parts that are images than its column has images")
            return found
        if isinstance(self.source, bytes):
            return _checked(self.source)
        if not isinstance(self.source, str) or not self.source.startswith(DATA_URI):
            raise DataError(
                f"the image {str(self.source)[:80]!r} is not in the row, and none is fetched: write a data: URI"
            )
        return _checked(data_of(self.source))


def _from_parts(chat: list[Any], had: Iterator[StoredImage]) -> tuple[list[Any], list[StoredImage]]:
    """Write messages of parts as text with marks; images without content of their own are the column's, in order."""
    found: list[StoredImage] = []
    messages = []
    for message in chat:
        content = _content(message)
        if isinstance(content, str):
            # Its marks take the column's images in their turn.
            found += [image for _, image in zip(range(content.count(IMAGE_MARK)), had, strict=False)]
        elif isinstance(content, list):
            parts = [Part.of(each) for each in content]
            found += [part.image(had) for part in parts if part.text is None]
            content = "".join(IMAGE_MARK if part.text is None else part.text for part in parts)
        messages.append({**message, "content": content} if isinstance(message, Mapping) else message)
    return messages, found


def _first_of(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _content(message: Any) -> Any:
    return message.get("content") if isinstance(message, Mapping) else None


def _marked(chat: Any, num_images: int) -> Any:
    """Put marks before the first user message of a prompt that has none; check those that are there."""
    contents = [chat] if isinstance(chat, str) else list(map(_content, chat)) if isinstance(chat, list) else []
    num_marks = sum(content.count(IMAGE_MARK) for content in contents if isinstance(content, str))
    if num_marks == num_images:
        return chat
    if num_marks:
        raise DataError(f"it has {num_marks} places for images ({IMAGE_MARK}), and {num_images} images")
    marks = IMAGE_MARK * num_images
    if isinstance(chat, str):
        return marks + chat
    users = [at for at, content in enumerate(contents) if isinstance(content, str) and chat[at].get("role") == "user"]
    if not users:
        raise DataError("it has images, and no message of the user to show them in")
    first = users[0]
    return [*chat[:first], {**chat[first], "content": marks + contents[first]}, *chat[first + 1 :]]


def images_of(row: Row, config: DataConfig) -> tuple[bytes, ...]:
    """Read the images of a row that ``illustrated`` wrote, in order.

    Raises:
        DataError: a file is not there any more.
    """
    return () if config.images is None else tuple([image.read() for image in row.get(config.images.column, ())])
