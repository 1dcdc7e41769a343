"""Deliveries to the operator's web hooks, as a gateway reports them."""

from flotilla.shared.schemas.wire import TolerantWire


class WebhookView(TolerantWire):
    """Deliveries to one web hook since the gateway began."""

    url: str
    """Without path and query, which may hold a key."""
    events: tuple[str, ...]
    delivered: int
    failed: int
    """Abandoned: refused, or not answered in any attempt."""
    dropped: int
    """Lost because too many waited."""
    waiting: int
    last_error: str | None = None
    """Of the newest attempt; null once a delivery succeeded."""
    last_delivered_at: str | None = None
