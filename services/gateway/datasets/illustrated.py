"""From the images of a row to those of its task: each stands where a message has ``IMAGE_MARK``.

Rows have them as verl, ROLL, EasyR1 and TRL write them (marks in the prompt, and a column), or as OpenAI's parts of
messages (``image_url`` with a ``data:`` URI). Nothing is fetched: a row that names a URL elsewhere is refused, since
the author of the rows would choose what this machine requests. A path leads to no file outside the data set's folder.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.services.gateway.datasets.columns import ABSENT, Row, structure_of, value_at
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import DataError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.task import IMAGE_MARK
from flotilla.shared.vision.files import check_file
from flotilla.shared.vision.parts import DATA_URI, Part, checked, data_of, marked


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
            return StoredImage(checked(value))
        if not isinstance(value, str):
            raise DataError(f"an image must be bytes, a path or a data: URI, and is {type(value).__name__}")
        if value.startswith(DATA_URI):
            return StoredImage(checked(data_of(value)))
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


def _image_of(part: Part, had: Iterator[StoredImage]) -> StoredImage:
    """Return the image of a part: its own, or the column's next.

    Raises:
        DataError: it is at a URL, or the column has no other.
    """
    if part.source is not None:
        return StoredImage(part.image())
    found = next(had, None)
    if found is None:
        raise DataError("it has more parts that are images than its column has images")
    return found


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
            found += [_image_of(part, had) for part in parts if part.text is None]
            content = marked(parts)
        messages.append({**message, "content": content} if isinstance(message, Mapping) else message)
    return messages, found


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
