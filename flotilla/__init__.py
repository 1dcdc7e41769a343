"""What users import and type: the command line, the client and the importers of launch files."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # On first use: the command line starts without the client.
    if name in __all__:
        from flotilla import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
