"""What environments, tools and simulated users say, as messages: texts, or parts of which some are images."""

from collections.abc import Sequence
from typing import Any

from flotilla.shared.errors import DataError, EpisodeFailed
from flotilla.shared.schemas.task import Message
from flotilla.shared.vision.parts import Part, are_parts, images_of, texts_of, uri_of


def shown(text: object) -> str:
    """Make an observation of a tool or an environment encodable: a lone surrogate is no text."""
    return str(text).encode("utf-8", "replace").decode()


def message_of(role: str, said: Any) -> Message:
    """Make a message of a text, or of parts.

    Raises:
        EpisodeFailed: they are no parts, or an image cannot be read.
    """
    if not are_parts(said):
        return Message(role, shown(said))
    try:
        parts = [Part.of(each) for each in said]
        return Message.of_texts(role, [shown(text) for text in texts_of(parts)], images_of(parts))
    except DataError as error:
        raise EpisodeFailed(error.detail) from error


def text_of(said: Any) -> str:
    """Write what was said without its images.

    Raises:
        EpisodeFailed: it has a part that is not known.
    """
    if not are_parts(said):
        return shown(said)
    try:
        return shown("".join(Part.of(each).text or "" for each in said))
    except DataError as error:
        raise EpisodeFailed(error.detail) from error


def plain(said: Any) -> str | list[Any]:
    """Make of what was said what JSON can carry.

    Raises:
        DataError: an image is neither bytes nor a text.
    """
    return [_plain_part(each) for each in said] if are_parts(said) else str(said)


def _plain_part(written: Any) -> dict[str, Any]:
    part = Part.of(written)
    if part.text is not None:
        return {"type": "text", "text": part.text}
    if not isinstance(part.source, bytes | str):
        raise DataError(f"an image is bytes or a data: URI, and this one is {type(part.source).__name__}")
    source = uri_of(part.source) if isinstance(part.source, bytes) else part.source
    if source is None:
        raise DataError("an image is in no format that is known: PNG, JPEG, WebP, GIF or BMP")
    return {"type": "image", "image": source}


def content_of(message: Message) -> str | tuple[dict[str, Any], ...]:
    """Write the content of a message: a text, or parts where it has images."""
    if not message.images:
        return message.content
    found: list[dict[str, Any]] = []
    for number, text in enumerate(message.texts):
        if number:
            found.append({"type": "image_url", "image_url": {"url": uri_of(message.images[number - 1])}})
        found += [{"type": "text", "text": text}] if text else []
    return tuple(found)


def with_observation(messages: tuple[Message, ...], observation: Message) -> tuple[Message, ...]:
    """Put an observation behind the task's messages: into the last one if that is the user's, since roles alternate."""
    if messages and messages[-1].role == "user":
        return (*messages[:-1], joined((messages[-1], observation)))
    return (*messages, observation)


def joined(messages: Sequence[Message]) -> Message:
    """Join messages of one role, those without a text left out."""
    texts: list[str] = []
    for each in messages:
        if each.content and not texts:
            texts = each.texts
        elif each.content:
            first, *others = each.texts
            texts = [*texts[:-1], f"{texts[-1]}\n\n{first}", *others]
    return Message.of_texts(messages[0].role, texts or [""], [image for each in messages for image in each.images])
