"""A checkpoint's tensors in the host's memory: copied there in a pause between steps, written to the disk beside them.

Each file is memory without a name, with the bytes that the file on the disk will have. It is free as soon as this
process ends, however it ends. Other ranks of this host write into it by way of this process's open files.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from flotilla.services.trainer.checkpoint.files import SharedFile, write_companions
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.host.control_groups import available_bytes

SHARE_OF_FREE_MEMORY = 0.5
"""What a copy may take: a step, an engine and whatever else is on this host need the rest."""
CHUNK_BYTES = 64 << 20


class HostCopy:
    """The files of one checkpoint, until they are on disk or abandoned.

    Args:
        descriptors: of the memory of each file, by its name.
        empty: files without any tensor.
        source: the directory that tokenizer and templates are taken from.
        learner: whose configuration is written; its tensors are not read again.
    """

    def __init__(self, descriptors: dict[str, int], empty: list[str], source: Path, learner: Learner) -> None:
        self._descriptors, self._empty = descriptors, empty
        self._source, self._learner = source, learner

    @classmethod
    def reserve(cls, files: Iterable[SharedFile], source: Path, learner: Learner) -> "HostCopy | None":
        """Make room for the tensors, with the headers of their files; None where this host has not enough memory.

        Raises:
            OSError: the system gives none although it is there.
        """
        layouts = {file.name: file.layout for file in files}
        wanted = sum(layout.image_bytes for layout in layouts.values() if layout is not None)
        if not hasattr(os, "memfd_create") or wanted > SHARE_OF_FREE_MEMORY * available_bytes():
            return None
        made = cls({}, [name for name, layout in layouts.items() if layout is None], source, learner)
        try:
            for name, layout in layouts.items():
                if layout is not None:
                    made._descriptors[name] = descriptor = os.memfd_create(f"flotilla-checkpoint-{name}")
                    os.write(descriptor, layout.header)
                    os.truncate(descriptor, layout.image_bytes)
        except BaseException:
            made.close()
            raise
        return made

    @property
    def paths(self) -> dict[str, Path]:
        """Where this process and others of this host open the memory of each file, by its name."""
        return {name: Path(f"/proc/{os.getpid()}/fd/{number}") for name, number in self._descriptors.items()}

    @property
    def num_bytes(self) -> int:
        """Memory that is taken."""
        return sum(os.fstat(number).st_size for number in self._descriptors.values())

    def write(self, directory: Path) -> None:
        """Write all files into a checkpoint's directory, and free the memory of each as soon as it is there; blocks.

        Raises:
            OSError: the disk is full or fails.
        """
        write_companions(directory, self._source, self._learner)
        for name in self._empty:
            save_file({}, directory / name)
        for name in list(self._descriptors):
            _write_to_disk(self._descriptors[name], directory / name)
            os.close(self._descriptors.pop(name))
            if (faults := armed()) is not None:
                faults.hit(Site.CHECKPOINT_FILE)

    def close(self) -> None:
        """Free what is left."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _write_to_disk(descriptor: int, path: Path) -> None:
    left = os.fstat(descriptor).st_size
    with path.open("xb", buffering=0) as file:
        position = 0
        while left:
            sent = os.sendfile(file.fileno(), descriptor, position, min(left, CHUNK_BYTES))
            if not sent:
                raise OSError(f"{left} bytes of a copied file are gone")
            position, left = position + sent, left - sent
        os.fsync(file.fileno())
