"""What a spec names: its strings, and the experiments in whose directories its paths lie."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

RESUME_FROM: Final = "checkpoint.resume_from"
"""Key of a checkpoint that an experiment begins from."""


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Go through all strings of a document, with their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each, key)


def named_in(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Go through all that a spec names, with the keys: of a checkpoint, ``WHERE@STEP``, where it is."""
    for key, text in texts_of(spec):
        where, at, step = text.rpartition("@")
        yield key, where if key == RESUME_FROM and at and step.isdigit() else text


def parts_below(text: str, root: str) -> tuple[str, ...]:
    """Return where a path leads below a folder, links followed; nothing where it leads elsewhere. Blocks.

    Args:
        text: an absolute path.
        root: whose links are followed already.
    """
    relative = Path(os.path.relpath(os.path.realpath(text), root)).parts
    return () if not relative or relative[0] == os.pardir else relative
