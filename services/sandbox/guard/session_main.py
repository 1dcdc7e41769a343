"""The interpreter of a session: it runs cells in one ``__main__``, as an interactive interpreter does.

A cell's last expression is printed; an exception is printed to stderr and costs nothing; an exit ends the session. What
this process reports of itself is as untrusted as what its program prints: limits are the guard's.
"""

import _ast
import os
import signal
import sys
from types import CodeType
from typing import NoReturn

from flotilla.services.sandbox.guard.python_main import end, flush, told

CELLS, ENDS = 3, 4
"""Descriptors: for cells, and for the end of each."""
FINE, FAILED = b"0", b"1"
LENGTH_BYTES = 8
ONLY_TREE = 0x400
"""``ast.PyCF_ONLY_AST``"""


class _Exit(BaseException):
    """A cell ended the interpreter.

    Args:
        code: the exit code.
    """

    def __init__(self, code: int) -> None:
        self.code = code


class _Cells:
    """Reads cells; an interrupt that came too late for its cell is forgotten."""

    def __init__(self) -> None:
        self._read = b""

    def next(self) -> "str | None":
        """Wait for a cell; None if there will be none."""
        length = self._take(LENGTH_BYTES)
        code = self._take(int.from_bytes(length, "big")) if length else b""
        return code.decode("utf-8", "surrogatepass") if length else None

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            try:
                piece = os.read(CELLS, size - len(self._read))
            except KeyboardInterrupt:
                continue
            if not piece:
                return b""
            self._read += piece
        taken, self._read = self._read[:size], self._read[size:]
        return taken


def converse() -> NoReturn:
    """Run cells until there are no more or one of them ends the interpreter; then end as Python would."""
    num_modules = len(sys.modules)
    directory = os.getcwd()  # noqa: PTH109  pathlib would be loaded for it
    sys.path.insert(0, directory)
    sys.argv[:] = [""]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a service that was started to ignore it passes that on
    cells, number, code = _Cells(), 0, 0
    while (text := cells.next()) is not None:
        number += 1
        try:
            said = _run(text, f"<cell {number}>")
        except _Exit as ended:
            code = ended.code
            break
        _tell(said)
    end(code, directory, num_modules)


def _tell(said: bytes) -> None:
    while True:
        try:
            flush()
            os.write(ENDS, said)
        except KeyboardInterrupt:  # it was meant for the cell, which has ended
            continue
        except OSError:  # the program closed it: the ends of its cells are unknown
            return
        return


def _run(text: str, name: str) -> bytes:
    space = sys.modules["__main__"].__dict__
    try:
        for piece in _compiled(text, name):
            exec(piece, space)  # noqa: S102  to run it is the point
    except SystemExit as error:
        raise _Exit(told(error)) from None
    except BaseException as error:  # of whatever kind: it is printed as Python does
        _tell_exception(error, text, name)
        return FAILED
    return FINE


def _compiled(text: str, name: str) -> "list[CodeType]":
    """Compile a cell; its last expression, if it ends with one, so that its value is printed."""
    tree = compile(text, name, "exec", ONLY_TREE, dont_inherit=True)
    assert isinstance(tree, _ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    pieces = [compile(tree, name, "exec", dont_inherit=True)] if tree.body else []
    if last is not None:
        pieces.append(compile(_ast.Interactive([last]), name, "single", dont_inherit=True))
    return pieces


def _tell_exception(error: BaseException, text: str, name: str) -> None:
    """Print an exception on stderr with the lines of the cell."""
    try:
        import linecache
        import traceback

        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == _run.__code__.co_filename:
            trace = trace.tb_next  # the first entries are this module's
        traceback.print_exception(type(error), error, trace)
    except BaseException as wrong:  # the program has changed what this needs
        os.write(2, f"{type(error).__name__} (it cannot be told: {type(wrong).__name__})\n".encode())
