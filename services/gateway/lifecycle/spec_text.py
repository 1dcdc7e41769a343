"""Reading a document that somebody sent: in a process that can be ended, unless it is too small to be worth one.

YAML is read at some 100 KB a second, on the event loop if here, and a document may be made to take long. As a program
it reads YAML from standard input, and writes as JSON what it means or why it means nothing.
"""

import asyncio
import contextlib
import json
import resource
import sys
from typing import Any, Final

from flotilla.shared.children.processes import python_module
from flotilla.shared.config.load.spec_text import parse_document
from flotilla.shared.errors import InvalidSpec

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
    process = await asyncio.create_subprocess_exec(
        *python_module(__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(seconds):
            written, _ = await process.communicate(text.encode("utf-8", "replace"))
    except TimeoutError:
        raise InvalidSpec(f"{SOURCE} could not be read within {seconds:g} s: write it without anchors") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InvalidSpec(f"{SOURCE} could not be read: it takes too much time or memory")
    answer = json.loads(written)
    if "refused" in answer:
        raise InvalidSpec(answer["refused"])
    document: dict[str, Any] = answer["document"]
    return document


def main() -> int:
    """Read standard input, write standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (round(PARSE_SECONDS), round(PARSE_SECONDS)))
    text = sys.stdin.buffer.read().decode()
    try:
        answer = json.dumps({"document": parse_document(text, source=SOURCE)})
    except InvalidSpec as error:
        answer = json.dumps({"refused": error.detail})
    except TypeError:
        answer = json.dumps({"refused": f"{SOURCE} holds a value that JSON does not know, such as a date: quote it"})
    sys.stdout.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
