"""What a service and its weight endpoint say to each other: JSON lines over unix sockets.

On the endpoint's own socket the service asks for members to be forked and killed, and hears of their ends. On each
member's socket it sends commands and hears events. A closed socket means that the other side is gone.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from flotilla.shared.schemas.wire import Wire

NUM_FORK_DESCRIPTORS = 2
"""Sent along with a :class:`Fork`: the member's socket and its standard error."""


class Message(Wire):
    """One line."""

    def line(self) -> bytes:
        """Encode as one line, newline included."""
        return self.model_dump_json().encode() + b"\n"


class Opening(Message):
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


class Fork(Message):
    """Service to endpoint: fork a member. The answer is :class:`Forked`."""

    kind: Literal["fork"] = "fork"
    opening: Opening


class Kill(Message):
    """Service to endpoint: end a member, whatever it is doing. The answer is its :class:`Exited`."""

    kind: Literal["kill"] = "kill"
    pid: int


class Started(Message):
    """Endpoint to service: torch is imported, members can be forked."""

    kind: Literal["started"] = "started"


class Forked(Message):
    """Endpoint to service: the member of the oldest unanswered :class:`Fork` runs."""

    kind: Literal["forked"] = "forked"
    pid: int


class Exited(Message):
    """Endpoint to service: a member ended. A negative code is the signal that ended it."""

    kind: Literal["exited"] = "exited"
    pid: int
    code: int


class Direction(StrEnum):
    """What a member does with its image."""

    SEND = "send"
    RECEIVE = "receive"


class Command(Message):
    """Service to member: take part in one image's broadcast."""

    direction: Direction
    image_path: Path
    image_bytes: int = Field(gt=0)
    slice_bytes: int = Field(gt=0)
    deadline_seconds: float = Field(gt=0)
    tells_progress: bool = False
    """Whether the member says :class:`Arrived` after each slice."""


class Opened(Message):
    """Member to service: the store listens on this port."""

    kind: Literal["opened"] = "opened"
    port: int


class Joined(Message):
    """Member to service: all members of the group are connected."""

    kind: Literal["joined"] = "joined"


class Arrived(Message):
    """Member to service: the first bytes of the image that is being received are there; not verified yet."""

    kind: Literal["arrived"] = "arrived"
    num_bytes: int


class Done(Message):
    """Member to service: the oldest unanswered command is carried out."""

    kind: Literal["done"] = "done"
    checksum: str | None
    """xxh3-64 of what was received; None after sending."""


class Failed(Message):
    """Member to service: forming the group or a command failed. The member ends after saying so."""

    kind: Literal["failed"] = "failed"
    detail: str
    is_timeout: bool


FROM_SERVICE: TypeAdapter[Fork | Kill] = TypeAdapter(Annotated[Fork | Kill, Field(discriminator="kind")])
FROM_ENDPOINT: TypeAdapter[Started | Forked | Exited] = TypeAdapter(
    Annotated[Started | Forked | Exited, Field(discriminator="kind")]
)
FROM_MEMBER: TypeAdapter[Opened | Joined | Arrived | Done | Failed] = TypeAdapter(
    Annotated[Opened | Joined | Arrived | Done | Failed, Field(discriminator="kind")]
)
