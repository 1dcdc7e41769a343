"""A Python interpreter that stays in a box between the commands that are run there.

Runs in the box, alone: the standard library only, from Python 3.9 on. ``start`` leaves a process that runs cells in one
``__main__``; ``ask`` gives it one, with the outputs of its own, and writes how it ended.
"""

import ast
import json
import linecache
import os
import resource
import signal
import socket
import sys
import time
import traceback
import types
from contextlib import suppress

START_SECONDS = 20.0
INTERRUPT_SECONDS = 1.0
"""So long may a cell take to end after its time, having been interrupted, without costing the session."""
END_SECONDS = 2.0


def start(home: str, cpu_seconds: int) -> None:
    """Leave an interpreter, with a process above it that notes how it ended; return when it is up.

    Args:
        home: directory for its socket and that note.
        cpu_seconds: processor time of all cells together.
    """
    if os.fork():
        end = time.monotonic() + START_SECONDS
        while not os.path.exists(f"{home}/socket"):  # noqa: PTH110
            if time.monotonic() > end:
                sys.exit("the interpreter does not start")
            time.sleep(0.01)
        return
    os.setsid()
    _be_quiet(0, 1, 2)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        serve(home)
    _, status = os.waitpid(child, 0)
    with open(f"{home}/ended.new", "w") as file:  # noqa: PTH123
        file.write(str(os.waitstatus_to_exitcode(status)))
    os.rename(f"{home}/ended.new", f"{home}/ended")  # noqa: PTH104
    os._exit(0)


def serve(home: str) -> None:
    """Run cells until one of them ends the process."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{home}/socket.new")
    server.listen(1)
    os.rename(f"{home}/socket.new", f"{home}/socket")  # noqa: PTH104
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = [""]
    sys.path[0] = os.getcwd()  # noqa: PTH109
    number = 0
    while True:
        connection, _ = server.accept()
        with connection:
            path, descriptors, _, _ = socket.recv_fds(connection, 4096, 2)
            for target, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, target)
                os.close(descriptor)
            connection.sendall(f"{os.getpid()}\n".encode())
            number += 1
            with open(path, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
                text = file.read()
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                told = run(text, f"<cell {number}>", vars(main))
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            except KeyboardInterrupt:  # it came when the cell had ended
                told = b"1"
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            _be_quiet(1, 2)
            with suppress(OSError):
                connection.sendall(told)


def run(text: str, name: str, space: "dict[str, object]") -> bytes:
    """Run a cell; the value of its last expression is printed, an exception is printed to stderr."""
    try:
        tree = ast.parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), space)  # noqa: S102  to run it is the point
        if last is not None:
            exec(compile(ast.Interactive([last]), name, "single", dont_inherit=True), space)  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace)
        return b"1"
    return b"0"


def ask(home: str, cell: str, seconds: float, told: str) -> None:
    """Have the interpreter run a cell, interrupt it when its time is over, and write how it ended.

    Args:
        home: as of ``start``.
        cell: file with its text.
        seconds: its time.
        told: file for its exit status.
    """
    outcome, said = "exited", b""
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{home}/socket")
        socket.send_fds(connection, [os.path.abspath(cell).encode()], [1, 2])  # noqa: PTH100
        process = b""
        while not process.endswith(b"\n"):
            process += connection.recv(1) or b"?\n"
        number = int(process)
        connection.settimeout(seconds)
        try:
            said = connection.recv(1)
        except socket.timeout:  # noqa: UP041  before Python 3.10 it is no TimeoutError
            outcome = "timed_out"
            os.kill(number, signal.SIGINT)
            connection.settimeout(INTERRUPT_SECONDS)
            try:
                said = connection.recv(1)
            except socket.timeout:  # noqa: UP041
                os.kill(number, signal.SIGKILL)
    code = int(said) if said.isdigit() else _ended(home)
    with open(told, "w") as file:  # noqa: PTH123
        json.dump({"outcome": outcome, "code": code, "is_alive": said.isdigit()}, file)


def _ended(home: str) -> "int | None":
    """Read how the interpreter ended, once it has."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        with suppress(OSError, ValueError), open(f"{home}/ended") as file:  # noqa: PTH123
            return int(file.read())
        time.sleep(0.02)
    return None


def _be_quiet(*descriptors: int) -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(quiet, descriptor)
    if quiet not in descriptors:
        os.close(quiet)


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2], int(sys.argv[3]))
    else:
        ask(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
