"""Gives memory that was freed back to the machine: the C library keeps pages of small blocks for later."""

import ctypes


def return_freed_memory() -> None:
    """Let the C library return what is free; nothing happens where it cannot be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
