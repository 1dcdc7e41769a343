"""Code of the user's, loaded from a file by reference; it runs with the rights of the process that loads it, a confined
child of the service's (``calls.py``).

What is beside the file can be imported as in a script of the user's own: its folder comes first.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.absence import absent_or


def load_callable(reference: str, *, what: str, kind: str, accepts: Callable[[Any], bool]) -> Callable[..., Any]:
    """Load ``file.py:name``; a relative path starts at the working directory.

    A file of a package is imported as that package's module, so that its relative imports work. The folder of the file,
    and before a package that of the package, are put at the front of this process' import path: call it where nothing
    else will be imported, in a process of the code's own.

    Args:
        reference: the file and the name in it.
        what: the caller, for messages, such as ``custom verifier``.
        kind: what the name stands for, such as ``function``.
        accepts: which of the file's names to offer when there is no such name.

    Raises:
        InvalidSpec: there is no such file, importing it fails, or the name is not there or cannot be called.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise InvalidSpec(f"{what} {reference!r}: there is no file {path}")
    try:
        module = _imported(path, what)
    except Exception as error:
        raise absent_or(
            error, InvalidSpec(f"{what} {reference!r}: importing it failed: {describe(error, path)}")
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        offered = ", ".join(sorted(key for key, value in vars(module).items() if accepts(value))) or "none"
        raise InvalidSpec(f"{what} {reference!r}: the file has no {kind} {name!r}; it has: {offered}")
    checked: Callable[..., Any] = found
    return checked


def _imported(path: Path, what: str) -> ModuleType:
    dotted, root = _name_in_package(path)
    folders = list(dict.fromkeys((path.parent, root)))
    wanted = [str(each) for each in folders]
    sys.path[:] = [*wanted, *(each for each in sys.path if each not in wanted)]
    if dotted is not None:
        return importlib.import_module(dotted)
    # Under a name of its own: a file called ``json.py`` is not asked for by that name.
    name = f"flotilla_{what.replace(' ', '_')}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_in_package(path: Path) -> tuple[str | None, Path]:
    """Return a file's dotted name and the folder of its outermost package; None where it is in no package."""
    names = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    is_module = folder != path.parent and all(name.isidentifier() for name in names)
    return (".".join(names), folder) if is_module else (None, path.parent)


def describe(error: BaseException, path: Path | None) -> str:
    """Name an exception and the innermost line of ``path`` that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and frame.filename == str(path)]
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}: {error}"[:500]
