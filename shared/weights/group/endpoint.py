"""The weight endpoint: a process that has imported torch once and forks a member for each epoch.

``python -m ...group.endpoint DESCRIPTOR PARENT`` serves the unix socket with that number, inherited from its
service, the process PARENT. It stays single-threaded and runs no torch code itself, so that forking is safe, and a fork
costs milliseconds where a fresh import of torch costs seconds. Members are aborted by killing them. Everything ends
with the service: its end closes the socket, and the kernel kills each child of a dead parent.
"""

import os
import selectors
import signal
import socket
import sys
import traceback
from collections import deque
from typing import NoReturn

from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.weights.group.endpoint_protocol import (
    FROM_SERVICE,
    NUM_FORK_DESCRIPTORS,
    Exited,
    Fork,
    Forked,
    Message,
    Opening,
    Started,
)
from flotilla.shared.weights.group.member import serve

_READ_BYTES = 1 << 16


class Endpoint:
    """Forks, kills and reaps members for the service at the other end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unread = b""
        self._descriptors: deque[int] = deque()
        self._pids: set[int] = set()
        self._awake, self._waker = socket.socketpair()

    def run(self) -> None:
        """Serve until the service closes the channel, then kill and reap the members that are left."""
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, or the wake-up byte is not written
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._awake, selectors.EVENT_READ)
            self._tell(Started())
            serving = True
            while serving:
                for key, _ in selector.select():
                    if key.fileobj is self._awake:
                        self._awake.recv(_READ_BYTES)
                        self._reap()
                    else:
                        serving = self._read()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _read(self) -> bool:
        """Take what the service sent; False when it closed the channel."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, _READ_BYTES, NUM_FORK_DESCRIPTORS)
        self._descriptors.extend(descriptors)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = FROM_SERVICE.validate_json(line)
            if isinstance(request, Fork):
                self._fork(request.opening)
            elif request.pid in self._pids:  # not reaped yet, so the number is still the member's
                os.kill(request.pid, signal.SIGKILL)
        return bool(data)

    def _fork(self, opening: Opening) -> None:
        control, errors = self._descriptors.popleft(), self._descriptors.popleft()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_member(control, errors, parent, opening)
        os.close(control)
        os.close(errors)
        self._pids.add(pid)
        self._tell(Forked(pid=pid))

    def _become_member(self, control: int, errors: int, parent: int, opening: Opening) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent, with_signal=signal.SIGKILL)
            os.dup2(errors, sys.stderr.fileno())
            os.close(errors)
            # The service must see each socket close when the one process that it is for ends.
            for inherited in (self._channel, self._awake, self._waker):
                inherited.close()
            for descriptor in self._descriptors:
                os.close(descriptor)
            serve(socket.socket(fileno=control), opening)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for pid in list(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids.remove(pid)
                self._tell(Exited(pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _tell(self, message: Message) -> None:
        self._channel.sendall(message.line())


def main(descriptor: int, parent: int) -> NoReturn:
    """Serve the service ``parent`` over an inherited socket until it closes it or ends."""
    die_with_parent(parent, with_signal=signal.SIGKILL)
    # Ctrl-C reaches the whole process group; the service decides when members end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arm_process("weights")
    with socket.socket(fileno=descriptor) as channel:
        Endpoint(channel).run()
    # All that is left is to unload torch, which takes longer than everything that this process ever did.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
