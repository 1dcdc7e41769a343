"""Records which groups it was asked to keep."""

from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.trajectory import Group


class KeptInMemory:
    """Twin of the recorder, for groups that end without being trained."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, SampleKind, str]] = []

    def ended(self, group: Group, kind: SampleKind, reason: str) -> None:
        """Remember id, kind and reason."""
        self.groups.append((group.task.group_id, kind, reason))
