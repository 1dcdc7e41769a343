"""Lists of an experiment, read to their end."""

from flotilla.connection import Source
from flotilla.shared.schemas.experiment import ExperimentView, Page
from flotilla.shared.schemas.uploads import ListedCheckpoint

PAGE = 1000


async def read_checkpoints(client: Source, view: ExperimentView) -> list[ListedCheckpoint]:
    """Read all checkpoints of an experiment, by step."""
    found: list[ListedCheckpoint] = []
    after: str | None = None
    while True:
        query = {"limit": PAGE, "after": after}
        page = Page[ListedCheckpoint].model_validate(
            await client.call("GET", f"/v1/experiments/{view.id}/checkpoints", params=query, deadline_seconds=30)
        )
        found += page.items
        after = page.next
        if after is None:
            return found
