"""The caller of the request being handled: set by the guard, read where audit records are made."""

from contextvars import ContextVar

from flotilla.shared.net.authorisation.access import Principal

caller: ContextVar[Principal | None] = ContextVar("caller", default=None)
"""None outside of requests: the gateway itself acts."""

GATEWAY = "gateway"


def actor() -> str:
    """Name the caller, for an audit record."""
    principal = caller.get()
    return GATEWAY if principal is None else principal.actor


def owner() -> str | None:
    """Name whose token acts; None for the fleet's own, and for the gateway itself."""
    principal = caller.get()
    return None if principal is None else principal.owner
