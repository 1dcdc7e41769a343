"""Where a rollout finds versions that it has missed: in this host's memory, at other services, in a directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from flotilla.shared.errors import NotFound
from flotilla.shared.schemas.publication import PublicationOrder
from flotilla.shared.schemas.service import DesiredState
from flotilla.shared.weights.mapped.locate import LocatedImage
from flotilla.shared.weights.pull.source import OnArrived, Reuse

PULL_SECONDS: Final = 60.0


class Puller(Protocol):
    """Fetches a committed version over HTTP."""

    async def __call__(
        self,
        url: str | None,
        version: int,
        directory: Path | None,
        deadline_seconds: float,
        *,
        checksum: str | None,
        peers: Sequence[str],
        kept_in: Path | None,
        reuse: Reuse | None,
        on_arrived: OnArrived | None,
    ) -> Path:
        """Write the verified image into a file of ``directory``, of shared memory, or that ``reuse`` gives."""


class RelayedPuller(Protocol):
    """Fetches a version that is not committed yet from a member that passes it on."""

    async def __call__(
        self,
        sources: Sequence[str],
        version: int,
        deadline_seconds: float,
        *,
        checksum: str,
        image_bytes: int,
        reuse: Reuse | None,
    ) -> Path:
        """Write the verified image into a file of shared memory, or that ``reuse`` gives."""


class Locator(Protocol):
    """Finds a version in the memory of this host."""

    async def __call__(self, url: str | None, checksum: str | None, peers: Sequence[str]) -> LocatedImage | None:
        """Name the image's file, which has to be checked; None if no process of this host has it."""


@dataclass(frozen=True, slots=True)
class MissedVersions:
    """Finds committed versions, and those that members of a publication pass on.

    Attributes:
        pull: fetches them.
        locate: finds them in this host's shared memory; None pulls them all.
        kept_in: directory where they may be found as well.
        relayed: fetches what a member passes on; None cannot.
    """

    pull: Puller
    locate: Locator | None = None
    kept_in: Path | None = None
    relayed: RelayedPuller | None = None

    async def located(self, desired: DesiredState) -> LocatedImage | None:
        """Name an image of this host, which has to be checked; None if it is to be pulled."""
        if self.locate is None or desired.weights_url is None:
            return None
        return await self.locate(desired.weights_url, desired.policy_checksum, desired.weights_peers)

    def check_served(self, version: int, desired: DesiredState) -> None:
        """Check that there is something to pull a version from.

        Raises:
            NotFound: there is not.
        """
        if desired.weights_url is None and (desired.policy_checksum is None or self.kept_in is None):
            raise NotFound(f"no source serves version {version} now")

    async def pulled(self, version: int, desired: DesiredState, reuse: Reuse, on_arrived: OnArrived) -> Path:
        """Fetch a version into a file.

        Args:
            reuse: gives a file to write into.
            on_arrived: called with the file and how many bytes of it are there.

        Raises:
            NotFound, Unavailable, DeadlineExceeded, WeightTransferFailed: it could not be fetched.
        """
        return await self.pull(
            desired.weights_url,
            version,
            None,
            PULL_SECONDS,
            checksum=desired.policy_checksum,
            peers=desired.weights_peers,
            kept_in=self.kept_in,
            reuse=reuse,
            on_arrived=on_arrived,
        )

    async def located_at_member(self, order: PublicationOrder) -> LocatedImage | None:
        """Name the image of the member that passes a version on, which has to be checked; None if it is not here."""
        if self.locate is None or not order.may_map:
            return None
        return await self.locate(None, order.manifest.checksum, order.sources[:1])

    async def passed_on(self, order: PublicationOrder, reuse: Reuse) -> Path:
        """Fetch a version from the member that passes it on into a file; errors and arguments as of ``pulled``."""
        if self.relayed is None:
            raise NotFound("this rollout cannot be relayed to")
        return await self.relayed(
            order.sources,
            order.version,
            2 * order.deadline_seconds,
            checksum=order.manifest.checksum,
            image_bytes=order.manifest.image_bytes,
            reuse=reuse,
        )
