"""Ports on which a service listens for one examination, where the fleet's own data listeners would be."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

from flotilla.shared.environment.settings import PORTS
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.server.ports import listening_socket
from flotilla.shared.schemas.checks import PortUse

LINGER_SECONDS: Final = 60.0
"""Then nobody calls any more, whatever became of the gateway."""
_Listen = Callable[[], socket.socket]


class Listeners:
    """Listens on one port of each kind that services exchange data on, and says on each the examination's id."""

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
