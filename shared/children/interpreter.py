"""How a process that imports much starts and ends without searching for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Import what a process needs for good; called by ``__main__`` modules alone.

    The collector would look through all modules so far again and again while they are imported, and a last time when
    the interpreter ends: with torch and transformers that is two seconds of five. Nothing that exists at the end of
    the block is looked at again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
