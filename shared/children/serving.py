"""The child's side of ``calls``: loads what the owner names, answers until its input ends, and dies with its parent.

A process that runs user code cannot read the memory of the service that started it.

Landlock keeps a process from tracing any that is outside its own domain, which reading ``/proc/PID/mem`` is, root's
processes included; newer kernels also keep it from sending them signals. Environments are still shown: services take
their secrets out of theirs (``shared/children/processes.py``).

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

import asyncio
import ctypes
import inspect
import json
import os
import signal
import struct
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, BinaryIO, Protocol

from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.errors import FlotillaError, InvalidSpec
from flotilla.shared.net.absence import absent_or

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
REFER = 1 << 13
"""Moving files between folders: denied in every domain, unless it is handled and granted."""
REFER_VERSION, SIGNAL_VERSION = 2, 6
SIGNALS = 1 << 1
PR_SET_NO_NEW_PRIVS = 38


def confine() -> bool:
    """Enter a domain of its own, in which files and networks are as before; False where the kernel offers none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        version = library.syscall(
            ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG)
        )
    except OSError:
        return False
    if version < REFER_VERSION:
        return False
    attributes = struct.pack("=QQQ", REFER, 0, SIGNALS)[: 24 if version >= SIGNAL_VERSION else 8]
    ruleset = library.syscall(
        ctypes.c_long(CREATE_RULESET), attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", REFER, root)
        library.syscall(
            ctypes.c_long(ADD_RULE), ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), rule, ctypes.c_uint32(0)
        )
        library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return int(library.syscall(ctypes.c_long(RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint32(0))) == 0
    finally:
        os.close(root)
        os.close(ruleset)


MAX_LINE_BYTES = 1 << 30
"""Largest message of the owner, which bounds what it sends."""
MARK = b'"serving"\n'
"""The line with which the child reserves standard output for the owner."""

_progress: ContextVar[Callable[[object], None]] = ContextVar("progress", default=lambda _: None)


def progress_of_call() -> Callable[[object], None]:
    """Return a function that reports the present call's progress to the owner, in JSON; any thread may call it."""
    return _progress.get()


class Loaded(Protocol):
    """What was loaded, in its process."""

    @property
    def about(self) -> object:
        """What is reported to the owner about it, in JSON."""

    def handle(self, content: Any) -> object | Awaitable[object]:
        """Do what a call asks for, and return the result in JSON.

        A coroutine function works on many calls at once, each of which may be cancelled; another one on one at a time.
        A ``FlotillaError`` is raised again on the other side, by its code; any other exception as the base class.
        """


def serve(load: Callable[[Any], Loaded], *, is_confined: bool = False) -> None:
    """Be such a process.

    What the code prints goes to standard error, and it finds nothing on standard input.

    Args:
        load: makes it of the opening. A ``FlotillaError`` of its, a ``ValueError`` or a ``TypeError`` is what the owner
            is told; after any other exception the process ends.
        is_confined: whether it must not see the owner's memory; see ``confinement``.
    """
    die_with_parent(with_signal=signal.SIGKILL)
    if is_confined:
        confine()
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(os.dup(0), "rb") as asked:
        os.dup2(2, 1)
        _write(answers, b"\n" + MARK)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        try:
            loaded = load(json.loads(asked.readline()))
            gives_up = inspect.iscoroutinefunction(loaded.handle)
            greeting = _line({"ready": loaded.about, "gives_up": gives_up})
        except (FlotillaError, TypeError, ValueError) as error:
            known = error if isinstance(error, FlotillaError) else InvalidSpec(str(error))
            _write(answers, _line({"error": _told(absent_or(error, known))}, default=str))
            return
        _write(answers, greeting)
        if gives_up:
            asyncio.run(_answer_at_once(loaded, asked, answers))
            return
        for line in asked:
            number, content = json.loads(line)
            _progress.set(lambda progress, number=number: _write(answers, _line([number, progress, None])))  # type: ignore[misc]
            try:
                answer = _line([number, loaded.handle(content)])
            except Exception as error:
                answer = _line([number, None, _told(error)], default=str)
            if number is not None:
                _write(answers, answer)


async def _answer_at_once(loaded: Loaded, asked: BinaryIO, answers: BinaryIO) -> None:
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), asked)
    running: dict[object, asyncio.Task[None]] = {}

    async def answer(number: int | None, content: Any) -> None:
        _progress.set(lambda progress: _write(answers, _line([number, progress, None])))
        try:
            result = loaded.handle(content)
            assert inspect.isawaitable(result)
            line = _line([number, await result])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the owner gives the call up
            line = _line([number, None, _told(FlotillaError("what was called was cancelled by its own code"))])
        except Exception as error:
            line = _line([number, None, _told(error)], default=str)
        if number is not None:
            _write(answers, line)

    while line := await lines.readline():
        message = json.loads(line)
        if isinstance(message, dict):
            if (task := running.get(message["cancel"])) is not None:
                task.cancel()
            continue
        number, content = message
        task = asyncio.create_task(answer(number, content))
        key = task if number is None else number
        running[key] = task
        task.add_done_callback(lambda _, key=key: running.pop(key, None))  # type: ignore[misc]


def _told(error: Exception) -> list[object]:
    if not isinstance(error, FlotillaError):
        error = FlotillaError(f"{type(error).__name__}: {error}")
    return [error.code, error.detail, error.errors, error.context]


def _line(message: object, *, default: Callable[[object], object] | None = None) -> bytes:
    return json.dumps(message, default=default).encode() + b"\n"


def _write(answers: BinaryIO, line: bytes) -> None:
    answers.write(line)
    answers.flush()
