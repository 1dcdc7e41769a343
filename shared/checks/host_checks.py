"""A service's part in an examination of its fleet: it looks at its host and listens, then tries to reach others.

For one examination it listens where the fleet's own data listeners would be.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from flotilla.shared.checks.attempts import reach_all
from flotilla.shared.checks.facts import host_facts
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.environment.settings import PORTS
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.files.beneath import read_beneath
from flotilla.shared.net.server.ports import listening_socket
from flotilla.shared.schemas.checks import LOOK, MOST_FILES, REACH, CheckOrder, CheckReport, HostFacts, PortUse
from flotilla.shared.streams.redis.connection import connect

LINGER_SECONDS: Final = 60.0
"""After this no caller remains, whatever happened to the gateway."""
_Listen = Callable[[], socket.socket]


class Listeners:
    """Listens on one port of each kind that services exchange data on, and sends the examination's id on each."""

    def __init__(self, host: str, linger_seconds: float = LINGER_SECONDS) -> None:
        self._host = host
        self._linger_seconds = linger_seconds
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, check_id: str) -> tuple[Mapping[PortUse, int], str | None]:
        """Listen until ``close``, at most for a minute; those of an earlier examination end.

        Returns:
            The ports, and why one that is needed could not be had.
        """
        self.close()

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(check_id.encode())
            writer.close()

        ports: dict[PortUse, int] = {}
        problem: str | None = None
        for use, listen in self._wanted().items():
            try:
                sock = listen()
            except (OSError, InvalidRequest) as error:
                problem = str(error)
                continue
            ports[use] = sock.getsockname()[1]
            self._servers.append(await asyncio.start_server(greet, sock=sock))
        self._timer = asyncio.get_running_loop().call_later(self._linger_seconds, self.close)
        return ports, problem

    def _wanted(self) -> Mapping[PortUse, _Listen]:
        # gloo and NCCL take ports of the kernel's range, whatever FLOTILLA_PORTS says.
        wanted: dict[PortUse, _Listen] = {PortUse.DATA: lambda: listening_socket(self._host)}
        return wanted | {PortUse.COLLECTIVE: self._of_the_kernel} if os.environ.get(PORTS) else wanted

    def _of_the_kernel(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        return socket.create_server((self._host, 0), family=family)

    def close(self) -> None:
        """Listen no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        servers, self._servers = self._servers, []
        for each in servers:
            each.close()


REDIS_SECONDS: Final = 5.0
FOLDER_SECONDS: Final = 3.0
"""A file system of a network may show a new file that much later."""
POLL_SECONDS: Final = 0.25
LONGEST_PROBLEM: Final = 400


class HostChecks:
    """Answers the orders of one service.

    Args:
        host: address that its listeners are bound to, and reached at.
        redis_url: of the data plane; empty for a service that has nothing to do with it.
        listens: whether others exchange data with it.
    """

    def __init__(self, host: str, redis_url: str = "", *, listens: bool = False) -> None:
        self._redis_url = redis_url
        self._listeners = Listeners(host) if listens else None

    async def answer(self, order: CheckOrder, name: str, received_at: float) -> CheckReport:
        """Do what an order says.

        Args:
            name: the service's id.
            received_at: when the order came, in seconds since the epoch.
        """
        report = CheckReport(check_id=order.check_id, phase=order.phase, received_at=received_at, sent_at=received_at)
        if order.phase == LOOK:
            report = report.model_copy(update={"facts": await self._look(order, name)})
        elif order.phase == REACH:
            attempts, unseen = await asyncio.gather(reach_all(order.targets, order.check_id), _unseen(order))
            report = report.model_copy(update={"attempts": attempts, "unseen": unseen})
        return report.model_copy(update={"sent_at": time.time()})

    def close(self) -> None:
        """Listen no more."""
        if self._listeners is not None:
            self._listeners.close()

    async def _look(self, order: CheckOrder, name: str) -> HostFacts:
        facts, folder_problem, (seconds, problem) = await asyncio.gather(
            asyncio.to_thread(host_facts),
            on_daemon_thread(partial(write_into, order.folder, name, order.check_id), "examination folder"),
            ping(self._redis_url),
        )
        ports, port_problem = ({}, None) if self._listeners is None else await self._listeners.open(order.check_id)
        return facts.model_copy(
            update={
                "folder_problem": folder_problem and folder_problem[:LONGEST_PROBLEM],
                "redis_seconds": seconds,
                "redis_problem": problem and problem[:LONGEST_PROBLEM],
                "ports": dict(ports),
                "port_problem": port_problem and port_problem[:LONGEST_PROBLEM],
            }
        )


def write_into(folder: str | None, name: str, content: str) -> str | None:
    """Write a small file of this name into an existing folder; return why that fails."""
    if folder is None:
        return None
    if Path(name).name != name:
        return f"{name!r} is no name of a file"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(Path(folder, name), flags, 0o644), "w") as file:
            file.write(content)
    except OSError as error:
        return error.strerror or str(error)
    return None


def missing_in(folder: str, names: Iterable[str], content: str) -> tuple[str, ...]:
    """List the files that a folder does not have, or that have another content."""
    return tuple(name for name in names if not _has(Path(folder), name, content.encode()))


async def ping(url: str) -> tuple[float | None, str | None]:
    """Ask a Redis server for a sign of life.

    Returns:
        The seconds that it took, and what is wrong; neither where no server is named.
    """
    if not url:
        return None, None
    began = time.monotonic()
    try:
        client = connect(url)
    except InvalidRequest as error:
        return None, error.detail
    try:
        async with asyncio.timeout(REDIS_SECONDS):
            await client.ping()
    except TimeoutError:
        return None, f"no answer within {REDIS_SECONDS:g} s"
    except (RedisError, OSError) as error:
        return None, str(error)
    finally:
        await client.aclose()
    return round(time.monotonic() - began, 4), None


async def _unseen(order: CheckOrder) -> tuple[str, ...]:
    if order.folder is None:
        return ()
    end, names = time.monotonic() + FOLDER_SECONDS, order.files[:MOST_FILES]
    while True:
        looking = partial(missing_in, order.folder, names, order.check_id)
        left = await on_daemon_thread(looking, "examination folder")
        if not left or time.monotonic() >= end:
            return left
        await asyncio.sleep(POLL_SECONDS)


def _has(folder: Path, name: str, content: bytes) -> bool:
    try:
        # Others write there: a pipe of that name would be waited for, and a link lead elsewhere.
        with read_beneath(folder, name) as file:
            return file.read(len(content) + 1) == content
    except OSError:
        return False
