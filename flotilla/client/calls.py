"""What all calls of a client share: one gateway, a deadline for each call, and answers as models."""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel

from flotilla.connection import DEFAULT_DATA, open_client_of
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import Page

CALL_SECONDS = 30.0
PAGE = 1000

Model = TypeVar("Model", bound=BaseModel)


class Calls:
    """Calls one gateway; an async context manager.

    Args:
        url: the gateway's, or those of several with commas between them; None: ``FLOTILLA_GATEWAY_URL``, else the local
            fleet of ``data``.
        token: None: ``FLOTILLA_TOKEN`` or ``FLOTILLA_TOKEN_FILE``, or the local fleet's own.
        data: data directory of the local fleet.
        deadline_seconds: how long one call may take, with all its attempts.

    Raises:
        Unavailable: no gateway is named and no local fleet runs.
    """

    gateway_class: ClassVar[type[GatewayClient]] = GatewayClient

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        data: str | Path = DEFAULT_DATA,
        deadline_seconds: float = CALL_SECONDS,
    ) -> None:
        self._gateway = open_client_of(self.gateway_class, url, Path(data), token=token)
        self._place = (url, Path(data))
        self._deadline_seconds = deadline_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._gateway.close()

    @property
    def base_url(self) -> str:
        """The gateway's URL."""
        return self._gateway.base_url

    def with_deadline(self, seconds: float) -> Self:
        """Return the same client with another deadline for each call; both share their connections."""
        other = copy.copy(self)
        other._deadline_seconds = seconds
        return other

    async def _answer(
        self, method: str, path: str, *, body: Any = None, params: Mapping[str, object] | None = None
    ) -> Any:
        return await self._gateway.call(method, path, body=body, params=params, deadline_seconds=self._deadline_seconds)

    async def _call(
        self,
        model: type[Model],
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, object] | None = None,
    ) -> Model:
        return model.model_validate(await self._answer(method, path, body=body, params=params))

    async def _pages(self, model: type[Model], path: str, params: Mapping[str, object] = {}) -> list[Model]:
        found: list[Model] = []
        after: str | None = None
        while True:
            answer = await self._answer("GET", path, params={**params, "limit": PAGE, "after": after})
            page = Page[model].model_validate(answer)  # type: ignore[valid-type]
            found += page.items
            after = page.next
            if after is None or not page.items:
                return found
