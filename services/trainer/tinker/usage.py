"""How much of the disk each owner's models take: what was saved of them, and their states."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from flotilla.services.trainer.tinker.files import STATE
from flotilla.shared.errors import QuotaExceeded
from flotilla.shared.tinker.paths import FOLDER
from flotilla.shared.tinker.records import MANIFEST, Record


class Owned(Record):
    """What a manifest or a state says of itself."""

    owner: str = ""
    num_bytes: int = 0


class Usage:
    """Counts bytes. What is on the disk is what there is: only what was read before is remembered.

    Args:
        data: the fleet's directory.
        most_bytes: that one owner may have.
    """

    def __init__(self, data: Path, most_bytes: int) -> None:
        self._root, self._most = data / FOLDER, most_bytes
        self._read: dict[Path, tuple[int, Owned]] = {}

    def of(self, owner: str) -> int:
        """Return how many bytes an owner has."""
        found = dict(self._every())
        self._read = found
        return sum(each.num_bytes for _, each in found.values() if each.owner == owner)

    def check(self, owner: str, more: int) -> None:
        """Refuse what an owner has no room for.

        Raises:
            QuotaExceeded: saying how much there is.
        """
        used = self.of(owner)
        if used + more > self._most:
            raise QuotaExceeded(
                f"this key's models have {used} bytes on the disk, and {more} more are over its {self._most}: "
                "delete saved ones, let them expire (ttl_seconds), or finish sessions"
            )

    def _every(self) -> Iterator[tuple[Path, tuple[int, Owned]]]:
        for pattern in (f"saved/*/*/[!.]*/{MANIFEST}", f"state/*/[!.]*/{STATE}"):
            for path in self._root.glob(pattern):
                try:
                    changed = path.stat().st_mtime_ns
                    known = self._read.get(path)
                    if known is None or known[0] != changed:
                        known = changed, Owned.model_validate_json(path.read_bytes())
                except (OSError, ValidationError):
                    continue  # it is being deleted
                yield path, known
