"""Keeps torch to the cores that a training process should compute with."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from flotilla.shared.config.base.model import Threads
from flotilla.shared.host.cores import CoreSeat


class ComputeCores:
    """The cores of one training process; the thread that computes calls it.

    Args:
        threads: that many, or ``auto``.
    """

    def __init__(self, threads: Threads) -> None:
        self._seat = CoreSeat(threads=None if threads == "auto" else threads)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute meanwhile, and leave the cores to others afterwards."""
        torch.set_num_threads(self._seat.begin())
        try:
            yield
        finally:
            self._seat.end()

    def follow(self, model: nn.Module) -> None:
        """Look again before each pass of a model: a step may take long, and others come and go meanwhile."""
        model.register_forward_pre_hook(lambda *_: torch.set_num_threads(self._seat.threads()))

    def close(self) -> None:
        """Give the seat up."""
        self._seat.close()
