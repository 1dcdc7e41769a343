"""What a learner keeps in its device's memory between two steps, and how it leaves and comes back."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.offloading import Offloader

RETRY_SECONDS = 1.0
RELOAD_TRIES = 30
"""An engine that ends at this moment takes a while to give its memory back, to each rank in its own time."""


class LearnerMemory:
    """The memory of one rank's learner.

    Args:
        learner: between two steps it has no gradients and no activations.
        directory: where a file takes what cannot go to the host's memory.
    """

    def __init__(self, learner: Learner, directory: Path) -> None:
        self._learner = learner
        self._offloader = Offloader(directory)

    def offload(self) -> None:
        """Free the memory; nothing may be asked of the learner until ``reload``. Errors as of ``Offloader``."""
        for tower in self._learner.towers:
            tower.forget()
        self._offloader.offload(self._tensors())

    def reload(self) -> None:
        """Take the memory again, as soon as there is room; the learner is what it was, bit by bit. Blocks.

        Raises:
            MemoryError, torch.OutOfMemoryError: there was no room in all ``RELOAD_TRIES``.
        """
        for left in reversed(range(RELOAD_TRIES)):
            try:
                self._offloader.reload()
                return
            except (MemoryError, torch.OutOfMemoryError):
                if not left:
                    raise
                time.sleep(RETRY_SECONDS)

    def _tensors(self) -> Iterator[Tensor]:
        learner = self._learner
        models = [learner.loaded.model]
        models += [each.model for each in (learner.reference, *learner.teachers) if each is not None]
        for model in models:
            yield from model.parameters()
            yield from model.buffers()
        yield from learner.optimizer.state().values()
        if learner.critic is not None:
            yield from learner.critic.state().values()
        if learner.average is not None:
            yield from learner.average.state().values()
        if learner.versions is not None:
            yield from learner.versions.tensors()
