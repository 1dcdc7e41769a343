"""The gateway that a command talks to: a wait for it is told of."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla.cli.output import telling
from flotilla.connection import open_client_of
from flotilla.shared.net.client.client import GatewayClient


class TellingClient(GatewayClient):
    """Says on standard error what it waits for: a gateway that cannot be reached, or an answer that takes long."""

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        deadline_seconds: float = 10.0,
        **more: Any,
    ) -> Any:
        """Call a route, as ``GatewayClient`` does."""
        async with telling(f"waiting for {self.base_url}: {method} {path}, at most {deadline_seconds:.0f} s"):
            return await super().call(method, path, params=params, deadline_seconds=deadline_seconds, **more)


def open_gateway(arguments: argparse.Namespace) -> TellingClient:
    """Make a client of the gateway that ``--gateway``, ``--data`` and the environment mean; nothing is called yet.

    Raises:
        FlotillaError: as ``open_client``.
    """
    return open_client_of(TellingClient, arguments.gateway, Path(arguments.data))
