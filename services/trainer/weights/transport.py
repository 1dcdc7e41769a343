"""What a transport that broadcasts weight images offers to the two ends of a weight group.

An epoch is opened, joined by all its members, used for any number of images, and closed. After a failure in it an epoch
is of no use any more: close it and open the next. That one end succeeded says nothing about the others: a version
becomes current only by the gateway's commit.

Implementation: ``EndpointClient``. Beside it stand ``WeightPuller`` (HTTP) and, on the sender's own host, mapping its
image (``WeightImage.attach``): one member at a time, without a group.
"""

from pathlib import Path
from typing import Protocol

from flotilla.shared.schemas.publication import Rendezvous


class WeightMember(Protocol):
    """Either end of a weight group."""

    async def joined(self, epoch: int, deadline_seconds: float) -> None:
        """Wait until all members of the epoch are connected.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed.
            DeadlineExceeded: somebody is missing.
        """

    async def close_epoch(self, epoch: int) -> None:
        """Leave the epoch at once, whatever is going on in it. Nothing happens where it is not open."""

    async def close(self) -> None:
        """Leave all epochs and end what belongs to them. May be called twice."""


class WeightSender(WeightMember, Protocol):
    """The trainer's end."""

    async def open_sender(self, epoch: int, world_size: int, timeout_seconds: float) -> Rendezvous:
        """Open an epoch as rank 0; returns once the others can begin to join.

        Raises:
            Conflict: the epoch is open.
            WeightTransferFailed: it cannot be opened.
        """

    async def send(
        self, epoch: int, image_path: Path, image_bytes: int, slice_bytes: int, deadline_seconds: float
    ) -> None:
        """Send an image to all members.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed, or the image is not as told.
            DeadlineExceeded: somebody stalled.
        """
