"""The client that a command talks through: waits for its gateway are announced."""

import argparse
from collections.abc import Mapping
from typing import Any

from flotilla.cli.output import telling
from flotilla.client.asynchronous import AsyncClient
from flotilla.shared.net.client.client import GatewayClient

READ_SECONDS = 10.0
ACT_SECONDS = 30.0
START_SECONDS = 60.0
COPY_SECONDS = 600.0
"""Deadlines of calls: that read, that act, that begin something, and where every byte of a checkpoint is read."""


class TellingGateway(GatewayClient):
    """Prints on standard error what it waits for: a gateway that cannot be reached, or an answer that takes long."""

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        deadline_seconds: float = READ_SECONDS,
        **more: Any,
    ) -> Any:
        """Call a route, as ``GatewayClient`` does."""
        async with telling(f"waiting for {self.base_url}: {method} {path}, at most {deadline_seconds:.0f} s"):
            return await super().call(method, path, params=params, deadline_seconds=deadline_seconds, **more)


class TellingClient(AsyncClient):
    """A client whose waits are announced."""

    gateway_class = TellingGateway


def open_gateway(arguments: argparse.Namespace) -> TellingClient:
    """Make a client of the gateway that ``--gateway``, ``--data`` and the environment mean; nothing is called yet.

    Raises:
        FlotillaError: as ``open_client``.
    """
    return TellingClient(arguments.gateway, data=arguments.data, deadline_seconds=READ_SECONDS)
