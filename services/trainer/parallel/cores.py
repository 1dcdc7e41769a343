"""Keeps torch to the cores that a training process should compute with."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from shared.config.base import Threads
from shared.cores import CoreSeat


class ComputeCores:
    """The cores of one training process; the thread that computes calls it.

    Args:
        threads: that many, or ``auto``.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._seat = CoreSeat() if threads == "auto" else None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute meanwhile, and leave the cores to others afterwards."""
        if self._seat is None:
            assert self._threads != "auto"
            torch.set_num_threads(self._threads)
            yield
            return
        torch.set_num_threads(self._seat.begin())
        try:
            yield
        finally:
            self._seat.end()

    def follow(self, model: nn.Module) -> None:
        """Look again before each pass of a model: a step may take long, and others come and go meanwhile."""
        if (seat := self._seat) is not None:
            model.register_forward_pre_hook(lambda *_: torch.set_num_threads(seat.threads()))
