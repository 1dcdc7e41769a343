"""What ``python main.py`` does once the interpreter is up, in an interpreter that was forked: run the file, then end.

The end is what a program can tell of Python's own: threads are waited for, exit functions run, globals are taken apart
so that files are written and destructors run, streams are flushed. Only the interpreter's own memory is left to the
kernel: taking it apart costs more than most programs. A program that left threads, or loaded packages that may have
an end of their own, ends the long way.
"""

import atexit
import ctypes
import gc
import importlib.machinery
import os
import signal
import sys
from types import ModuleType
from typing import NoReturn

WRITING_FAILED = 120
_PYTHON = ctypes.pythonapi
_FLUSH_ALL = ctypes.PyDLL(None).fflush  # looked up now, and not in each fork


def run(source: str) -> NoReturn:
    """Run a file of the working directory as ``__main__`` and end the process as Python would."""
    num_modules = len(sys.modules)
    directory = os.getcwd()  # noqa: PTH109  pathlib would be loaded for it
    path = f"{directory}/{source}"
    sys.path.insert(0, directory)
    space = sys.modules["__main__"].__dict__
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    space.update(__file__=path, __loader__=loader, __cached__=None, __annotations__={})
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            text = file.read()
        exec(compile(text, path, "exec", dont_inherit=True), space)  # noqa: S102  to run it is the point
        code = 0
    except BaseException as error:  # of whatever kind: Python prints it to stderr
        code = told(error)
    end(code, directory, num_modules)


def told(error: BaseException) -> int:
    """Print an uncaught exception as Python does, and return the exit code."""
    # The first entry of the traceback is this module's.
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    error.__traceback__ = trace
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return exit_status(error.code)
        flush()
        print(error.code, file=sys.stderr)  # noqa: T201
        return 1
    flush()
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as other:
        return told(other)
    except BaseException as wrong:
        wrong.__context__ = None
        of_hook = wrong.__traceback__.tb_next if wrong.__traceback__ is not None else None
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(wrong), wrong.with_traceback(of_hook), of_hook)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(error), error, trace)
    return -int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else 1


def exit_status(code: int) -> int:
    """Return the status that Python ends with for a number: its low byte; that of -1 for what is no C long."""
    return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF


def end(code: int, directory: str, num_modules: int) -> NoReturn:
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    added = [sys.modules["__main__"]]
    if len(sys.modules) > num_modules:  # they are listed as they came
        added += [module for module in list(sys.modules.values())[num_modules:] if isinstance(module, ModuleType)]
    if code >= 0 and (any(map(_is_package, added)) or len(sys._current_frames()) > 1):
        _PYTHON.Py_Exit(ctypes.c_int(code))
    atexit._run_exitfuncs()
    is_written = flush()
    _take_apart(added, directory)
    is_written = flush() and is_written
    _FLUSH_ALL(None)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if is_written or code else WRITING_FAILED)


def _file_of(module: ModuleType) -> str:
    file = module.__dict__.get("__file__")
    return file if isinstance(file, str) else ""


def _is_package(module: ModuleType) -> bool:
    """Return whether code beyond the standard library's was loaded, which may have an end of its own."""
    file = _file_of(module)
    return "-packages" in file or (file.endswith(".so") and "lib-dynload" not in file)


def _take_apart(modules: "list[ModuleType]", directory: str) -> None:
    """Clear the globals of the program's modules, in the interpreter's order: names with one underscore first."""
    for module in modules:
        if not _file_of(module).startswith(f"{directory}/"):
            continue
        space = module.__dict__
        for is_private in (True, False):
            for name in list(space):
                if name[:2] != "__" and (name[:1] == "_") is is_private:
                    space[name] = None
    gc.collect()


def flush() -> bool:
    """Flush the standard streams; False if what was printed could not be written."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BaseException as error:
        print(f"Exception ignored in: {sys.stdout!r}\n{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return False
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except BaseException:
        return False
    return True
