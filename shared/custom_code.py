"""Code of the user's, loaded from a file by reference; it runs with the rights of the process that loads it, a confined
child of the service's (``code_process.py``)."""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.errors import InvalidSpec


def load_callable(reference: str, *, what: str, kind: str, accepts: Callable[[Any], bool]) -> Callable[..., Any]:
    """Load ``file.py:name``; a relative path starts at the working directory.

    Args:
        reference: the file and the name in it.
        what: who asks, for messages, such as ``custom verifier``.
        kind: what the name stands for, such as ``function``.
        accepts: which of the file's names to offer when there is no such name.

    Raises:
        InvalidSpec: there is no such file, importing it fails, or the name is not there or cannot be called.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise InvalidSpec(f"{what} {reference!r}: there is no file {path}")
    module_name = f"flotilla_{what.replace(' ', '_')}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise InvalidSpec(f"{what} {reference!r}: importing it failed: {describe(error, path)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        offered = ", ".join(sorted(key for key, value in vars(module).items() if accepts(value))) or "none"
        raise InvalidSpec(f"{what} {reference!r}: the file has no {kind} {name!r}; it has: {offered}")
    checked: Callable[..., Any] = found
    return checked


def describe(error: BaseException, path: Path | None) -> str:
    """Name an exception and the innermost line of ``path`` that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and frame.filename == str(path)]
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}: {error}"[:500]
