"""Commands to a member of a weight group: which group to form, then one image's broadcast after the other."""

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from flotilla.shared.schemas.wire import Wire


class Opening(Wire):
    """Which group a member forms, and from which addresses."""

    epoch: int = Field(ge=1)
    rank: int = Field(ge=0)
    """Rank 0 hosts the store and is the root of every broadcast."""
    world_size: int = Field(ge=1)
    bind_host: str
    """Address that rank 0 binds its store to."""
    host: str
    """Where the other members reach the store."""
    port: int = Field(ge=0, lt=65536)
    """Port of the store; 0 for rank 0, which takes a free one."""
    address: str | None
    """Address that the member's data connections bind to; None takes the one that routes to ``host``."""
    timeout_seconds: float = Field(gt=0)
    device: str | None = None
    """The GPU that an NCCL group goes through; None forms a gloo group."""
    sends_to_engines: bool = False
    """Whether the other members are ranks of engines, which form the group in their own way."""


class Direction(StrEnum):
    """What a member does with its image."""

    SEND = "send"
    RECEIVE = "receive"


class Command(Wire):
    """Service to member: take part in one image's broadcast."""

    direction: Direction
    image_path: Path
    image_bytes: int = Field(gt=0)
    slice_bytes: int = Field(gt=0)
    deadline_seconds: float = Field(gt=0)
    tells_progress: bool = False
    """Whether the member reports after each slice how many bytes are there."""
