"""Everything that one lane of one experiment keeps in its data plane, behind one protocol with two twins."""

from collections.abc import Collection
from typing import Protocol

from flotilla.shared.streams.admission import Admission
from flotilla.shared.streams.hop import Hop, HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.mailbox import Mailbox
from flotilla.shared.streams.plans import TrainerQueue
from flotilla.shared.streams.sharing import Sharing


class DataPlane(Protocol):
    """One lane of one experiment."""

    @property
    def admission(self) -> Admission:
        """The feeder's side."""
        ...

    @property
    def mailbox(self) -> Mailbox:
        """Answers that come later than they were asked for."""
        ...

    @property
    def sharing(self) -> Sharing:
        """What is offered to other experiments."""
        ...

    def hop(self, name: HopName, service_id: str) -> Hop:
        """Open a hop as a consumer of its own; the train lane's scored hop belongs to the trainer."""
        ...

    def trainer(self, service_id: str) -> TrainerQueue:
        """Open the trainer's queue; ``take_over`` makes it the only one."""
        ...

    async def holders(self) -> set[str]:
        """Name the consumers that hold claims of tasks or of generated groups."""
        ...

    async def release(self, consumers: Collection[str]) -> int:
        """End all claims that consumers hold of tasks and generated groups, and return how many these were.

        It is for dead consumers: their leases need not be awaited then. Each such delivery counts. One that lives
        after all finds its claims lost, as after a lease, and claims again.
        """
        ...

    async def ledger(self) -> Ledger:
        """Take a snapshot of the ledger in one atomic step."""
        ...

    async def oldest_seconds(self) -> dict[HopName, float]:
        """Return how long ago the oldest entry of each hop came there; hops without an entry are left out.

        What is claimed counts, what is planned does not.
        """
        ...

    async def remove(self) -> None:
        """Delete everything of the lane. For experiments that are deleted."""
        ...
