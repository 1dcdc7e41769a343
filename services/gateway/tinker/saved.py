"""Saved models of the Tinker API: listed, published, dated, deleted. What is on the disk is what there is."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from flotilla.shared.clock import Clock
from flotilla.shared.errors import NotFound
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.tinker.locks import UNFINISHED, changing
from flotilla.shared.tinker.paths import FOLDER, RUN, Kind, SavedPath, saved_of, state_of
from flotilla.shared.tinker.records import MANIFEST, Saved

OURS = frozenset({MANIFEST, f".{MANIFEST}"})


class SavedModels:
    """Those below the fleet's data directory.

    Args:
        data: the fleet's directory.
        clock: tells what has expired.
    """

    def __init__(self, data: Path, clock: Clock) -> None:
        self._data, self._clock = data, clock
        self._saved = data / FOLDER / "saved"

    def read(self, who: Principal, path: SavedPath) -> Saved:
        """Find one that the caller may read.

        Raises:
            NotFound: there is none.
        """
        found = self._found(path)
        if found is None or not (who.scope is Scope.OPERATOR or found.owner == who.actor or found.is_public):
            raise NotFound(f"there is no saved model {path}")
        return found

    def of_run(self, run: str) -> list[Saved]:
        """List those of a training run that have an address, oldest first."""
        return sorted(self._all(run), key=lambda saved: (saved.created, saved.path))

    def files(self, path: SavedPath) -> list[str]:
        """List the files of one that has an address.

        Raises:
            NotFound: there is none.
        """
        if path.kind is Kind.EPHEMERAL or self._found(path) is None:
            raise NotFound(f"there is no saved model {path}")
        return sorted(each.name for each in self.directory(path).iterdir() if each.name not in OURS)

    def directory(self, path: SavedPath) -> Path:
        """Return where one lies."""
        return path.below(self._data)

    def change(
        self, who: Principal, path: SavedPath, *, is_public: bool | None = None, expires: float | None = None
    ) -> None:
        """Publish one or take that back, or else say when it expires; None: never.

        Raises:
            NotFound: it is not the caller's.
        """
        self._own(who, path)
        update = {"expires": expires} if is_public is None else {"is_public": is_public}
        with changing(self._saved):
            # What another change, or the trainer, wrote since stays.
            saved = self._own(who, path)
            manifest = self.directory(path) / MANIFEST
            unfinished = manifest.with_name(f".{MANIFEST}")
            unfinished.write_text(saved.model_copy(update=update).model_dump_json(), encoding="utf-8")
            unfinished.replace(manifest)

    def delete(self, who: Principal, path: SavedPath) -> None:
        """Delete one.

        Raises:
            NotFound: it is not the caller's.
        """
        self._own(who, path)
        with changing(self._saved):
            removed = self._put_aside(self.directory(path))
        shutil.rmtree(removed, ignore_errors=True)

    def delete_expired(self) -> int:
        """Delete those whose time is over; returns how many."""
        runs = [each.name for each in self._saved.glob("*") if RUN.fullmatch(each.name)]
        over = [SavedPath.read(saved.path) for run in runs for saved in self._every(run) if self._is_over(saved)]
        return sum([self._delete_expired(path) for path in over])

    def _delete_expired(self, path: SavedPath) -> bool:
        with changing(self._saved):
            saved = self._read(path)
            # It may have got another date since.
            if saved is None or not self._is_over(saved):
                return False
            removed = self._put_aside(self.directory(path))
        shutil.rmtree(removed, ignore_errors=True)
        return True

    def forget_run(self, run: str) -> bool:
        """Release what a run whose session ended kept without a name; returns whether it saved something else."""
        shutil.rmtree(state_of(self._data, run), ignore_errors=True)
        shutil.rmtree(saved_of(self._data, run) / Kind.EPHEMERAL, ignore_errors=True)
        with suppress(OSError):
            saved_of(self._data, run).rmdir()
        return bool(self.of_run(run))

    def _own(self, who: Principal, path: SavedPath) -> Saved:
        saved = self._found(path)
        if saved is None or not (who.scope is Scope.OPERATOR or saved.owner == who.actor):
            raise NotFound(f"there is no saved model {path}")
        return saved

    def _found(self, path: SavedPath) -> Saved | None:
        saved = self._read(path)
        return None if saved is None or self._is_over(saved) else saved

    def _read(self, path: SavedPath) -> Saved | None:
        try:
            return Saved.model_validate_json((self.directory(path) / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            return None

    def _all(self, run: str) -> Iterator[Saved]:
        named = (saved for saved in self._every(run) if SavedPath.read(saved.path).kind is not Kind.EPHEMERAL)
        return (saved for saved in named if not self._is_over(saved))

    def _every(self, run: str) -> Iterator[Saved]:
        for kind in Kind:
            for manifest in sorted((saved_of(self._data, run) / kind).glob(f"[!.]*/{MANIFEST}")):
                try:
                    yield Saved.model_validate_json(manifest.read_bytes())
                except (OSError, ValidationError):
                    continue  # it is being deleted

    def _is_over(self, saved: Saved) -> bool:
        return saved.expires is not None and saved.expires <= self._clock.now()

    def _put_aside(self, directory: Path) -> Path:
        # Gone at once: whoever is killed meanwhile leaves no model that is listed and cannot be read.
        # It is removed by who has released the lock; what a killed one leaves, the trainer removes a day later.
        directory.parent.mkdir(parents=True, exist_ok=True)
        removed = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=UNFINISHED, dir=directory.parent))
        with suppress(FileNotFoundError):
            directory.rename(removed)
        return removed
