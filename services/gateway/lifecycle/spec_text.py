"""Parses a client's document: in a process that can be killed, unless it is too small for that.

YAML is read at some 100 KB a second, on the event loop if here, and a document may be made to take long. As a program
it answers what a text in YAML means, or why it means nothing.
"""

import asyncio
import json
import resource
from typing import Any, Final

from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module, unheard
from flotilla.shared.children.serving import serve
from flotilla.shared.config.load.spec_text import parse_document
from flotilla.shared.errors import FlotillaError, InvalidSpec

SOURCE: Final = "the request body"
MAX_CHARACTERS: Final = 256 * 1024
INLINE_CHARACTERS: Final = 8 * 1024
"""What is read here: some 50 ms at most."""
PARSE_SECONDS: Final = 20.0
MEMORY_BYTES: Final = 1024**3


async def read_document(text: str, *, seconds: float = PARSE_SECONDS) -> dict[str, Any]:
    """Read a mapping from YAML or JSON.

    Args:
        text: of the request.
        seconds: longest time.

    Raises:
        InvalidSpec: it does not parse, is no mapping, is too large or takes too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidSpec(f"{SOURCE} has {len(text)} characters: {MAX_CHARACTERS} at most")
    if len(text) <= INLINE_CHARACTERS:
        return parse_document(text, source=SOURCE)
    process = CallProcess(python_module(__name__), None, SOURCE, environment={}, on_line=unheard)
    try:
        async with asyncio.timeout(seconds):
            await process.start()
            document: dict[str, Any] = await process.call(text)
            return document
    except TimeoutError:
        raise InvalidSpec(f"{SOURCE} could not be read within {seconds:g} s: write it without anchors") from None
    except FlotillaError as error:
        if isinstance(error, InvalidSpec) or error.retryable:
            raise
        raise InvalidSpec(f"{SOURCE} could not be read: it takes too much time or memory") from error
    finally:
        await process.aclose()


class _Reader:
    about = None

    def __init__(self, _: None) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (round(PARSE_SECONDS), round(PARSE_SECONDS)))

    def handle(self, text: str) -> dict[str, Any]:
        """Read a document, whose values JSON knows."""
        document = parse_document(text, source=SOURCE)
        try:
            json.dumps(document)
        except TypeError:
            raise InvalidSpec(f"{SOURCE} holds a value that JSON does not know, such as a date: quote it") from None
        return document


if __name__ == "__main__":
    serve(_Reader)
