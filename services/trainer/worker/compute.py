"""The thread that computes for a session, and whom it computes beside; torch keeps to its cores."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from flotilla.services.trainer.models.shared_bases import SharedBases
from flotilla.services.trainer.parallel.turns import ComputeTurns, Seat
from flotilla.shared.concurrency.cancelling import to_the_end
from flotilla.shared.config.base.model import Threads
from flotilla.shared.config.spec import ExperimentSpec
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


T = TypeVar("T")


@dataclass(frozen=True)
class Company:
    """What the sessions of one process have in common.

    Attributes:
        bases: of their models.
        turns: in which they compute.
    """

    bases: SharedBases
    turns: ComputeTurns


class ComputeThread(ThreadPoolExecutor):
    """One thread, which computes with its share of cores, in turn with those of other sessions.

    Args:
        cores: of this process.
        seat: among those that compute in turn; None: it computes alone.
    """

    def __init__(self, cores: ComputeCores, seat: Seat | None) -> None:
        super().__init__(1, thread_name_prefix="compute")
        self.cores = cores
        self._seat = seat

    @property
    def is_waiting(self) -> bool:
        """Whether what is to be computed waits for another session's turn to end."""
        return self._seat is not None and self._seat.is_waiting

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Compute something in its turn, with the submitter's logging context."""
        context = contextvars.copy_context()

        def compute() -> T:
            turn = contextlib.nullcontext() if self._seat is None else self._seat.turn()
            with turn, self.cores.computing():
                return context.run(work, *arguments, **named)

        return super().submit(compute)


@contextlib.asynccontextmanager
async def compute_thread(
    spec: ExperimentSpec, name: str, company: Company | None, is_ending: Callable[[], bool] = lambda: False
) -> AsyncIterator[ComputeThread]:
    """Run all computation on one thread, so that weights are never touched by two and results never depend on it.

    Args:
        spec: of the experiment.
        name: its id.
        company: that the session is in.
        is_ending: returns whether it is ending: it goes before others then.
    """
    seat = None if company is None else company.turns.seat(name, spec.resources.weight, is_ending)
    executor = ComputeThread(ComputeCores(spec.parallelism.threads), seat)
    try:
        yield executor
    finally:
        if seat is not None:
            seat.leave()
        end = partial(executor.shutdown, wait=True, cancel_futures=True)
        # What computes does so to its end, and others wait for that.
        await to_the_end(asyncio.ensure_future(asyncio.to_thread(end)))
        executor.cores.close()
