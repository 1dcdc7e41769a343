"""How much of the disk each owner's models take: what was saved of them, and their states."""

from collections.abc import Iterator, Mapping
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

    def of(self, owner: str, states: Mapping[str, int]) -> int:
        """Return how many bytes an owner has, or will have.

        Args:
            owner: whose.
            states: by model of this owner's, what its states will take; fewer may be on the disk yet.
        """
        found = dict(self._every())
        self._read = found
        used, on_disk = 0, dict[str, list[int]]()
        for path, (_, each) in found.items():
            if each.owner != owner:
                continue
            if path.name == STATE:
                on_disk.setdefault(path.parent.parent.name, []).append(each.num_bytes)
            else:
                used += each.num_bytes
        # The state before the newest is kept: where there is one, there will be two.
        will = {model: max(sum(each), 2 * max(each)) for model, each in on_disk.items()}
        return used + sum(max(will.get(model, 0), states.get(model, 0)) for model in will.keys() | states.keys())

    def check(self, owner: str, states: Mapping[str, int], more: int = 0) -> None:
        """Refuse what an owner has no room for.

        Args:
            owner: whose.
            states: as ``of`` takes them.
            more: bytes beside these.

        Raises:
            QuotaExceeded: saying how much there is.
        """
        used = self.of(owner, states)
        if used + more > self._most:
            raise QuotaExceeded(
                f"this key's models have or need {used} bytes on the disk, and {more} more are over its {self._most}: "
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
