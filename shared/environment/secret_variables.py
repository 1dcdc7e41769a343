"""Environment variables that hold secrets: their reader removes them, so that no child process inherits them."""

import ctypes
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

VALUES = (
    "FLOTILLA_TOKEN",
    "FLOTILLA_SERVICE_TOKEN",
    "FLOTILLA_REDIS_URL",
    "FLOTILLA_DATABASE_URL",
    "FLOTILLA_SANDBOX_KEY",
)
"""URLs hold passwords, and a sandbox's key is that of an account elsewhere."""
SECRETS = (*VALUES, *(f"{name}_FILE" for name in VALUES))
"""Also where the files are that hold them."""
STAT = Path("/proc/self/stat")
START_FIELD, END_FIELD = 47, 48
"""``env_start`` and ``env_end`` in proc(5), counted from 0 after the process's name."""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a child process."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def forget_secrets(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove them from this process's environment, and from where the kernel shows what it was started with.

    Children inherit the first; every process of the same user may read the second (``/proc/PID/environ``).
    """
    held = [environment.pop(name, None) for name in SECRETS]
    if environment is os.environ and any(held):
        _overwrite()


def _overwrite() -> None:
    try:
        # The name is in parentheses, and may hold any character.
        fields = STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[START_FIELD]), int(fields[END_FIELD])
    except (OSError, ValueError, IndexError):
        return  # not Linux
    if not 0 < start < end:
        return
    shown = ctypes.string_at(start, end - start)
    for name in SECRETS:
        prefix = f"{name}=".encode()
        at = 0 if shown.startswith(prefix) else shown.find(b"\0" + prefix) + 1
        if at == 0 and not shown.startswith(prefix):
            continue
        first = at + len(prefix)
        last = shown.find(b"\0", first)
        ctypes.memset(start + first, ord("x"), (len(shown) if last < 0 else last) - first)
