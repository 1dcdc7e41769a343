"""How long claims live and how often an entry may be tried."""

from pydantic import Field

from flotilla.shared.config.base.model import Config


class StreamsConfig(Config):
    """Leases, deliveries and patience of the data plane."""

    lease_seconds: float = Field(60.0, gt=0)
    """A claim that is not renewed for this long is taken over. Holders renew at a third of it."""
    max_deliveries: int = Field(16, ge=1)
    """An entry delivered this often and still not forwarded is resolved as failed: too_many_deliveries."""
    deadline_seconds: float = Field(30.0, gt=0)
    """How long a call keeps trying while the server does not answer, before it raises Unavailable."""
    max_partial_bytes: int = Field(16 * 1024**2, ge=0)
    """Most tokens, in bytes, that a task is handed over with; members beyond are sampled afresh."""
