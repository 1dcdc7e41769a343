"""How far the copies of an experiment's checkpoints at ``checkpoint.upload_to`` are."""

from collections.abc import Mapping
from typing import Literal

from flotilla.shared.schemas.experiment import CheckpointView
from flotilla.shared.schemas.wire import Wire


class UploadView(Wire):
    """How far the copy of a checkpoint is."""

    state: Literal["pending", "uploading", "failed", "uploaded", "removed"]
    """uploaded: all of its files were there with their sizes, and its state.json, when the gateway looked last;
    pending: its turn will come; failed: the last attempt failed, and it is tried again; removed: neither there nor to
    come, since it was removed from the disk (``checkpoint.keep``, ``best``)."""
    url: str
    """Of its folder."""
    at: str | None = None
    """When it was found to be whole there for the first time."""
    cause: str | None = None
    """Why the last attempt failed."""


class ListedCheckpoint(CheckpointView):
    """A durable checkpoint, and its copy."""

    upload: UploadView | None = None
    """null where the spec names no URL."""


class UploadCheck(Wire):
    """A checkpoint on the disk beside its copy."""

    step: int
    url: str
    """Of the copy's folder."""
    is_whole: bool
    missing: tuple[str, ...]
    """Files that are not there with their size; state.json alone where the copy is no checkpoint, or another one."""


class UploadedCheckpoint(Wire):
    """A copy that is whole."""

    at: str
    digest: str
    """xxh3-64 of its state.json: another lineage's checkpoint of the same step is another one."""


class UploadRecord(Wire):
    """What the gateway keeps of an experiment's copies.

    Attributes:
        url: of the folder that has a folder of each step.
        local: steps of the checkpoints on the disk, when it looked last.
        uploaded: copies that are whole, by step.
        uploading: the step that is being copied.
        cause: why nothing can be copied now.
    """

    url: str
    local: tuple[int, ...] = ()
    uploaded: Mapping[str, UploadedCheckpoint] = {}
    uploading: int | None = None
    cause: str | None = None

    def view_of(self, step: int) -> UploadView:
        """Return the state of the copy of a step's checkpoint."""
        url = f"{self.url}/step-{step:08d}"
        done = self.uploaded.get(str(step))
        if done is not None:
            return UploadView(state="uploaded", url=url, at=done.at)
        if self.local and step < max(self.local) and step not in self.local:
            return UploadView(state="removed", url=url)
        if self.cause is not None:
            return UploadView(state="failed", url=url, cause=self.cause)
        return UploadView(state="uploading" if step == self.uploading else "pending", url=url)
