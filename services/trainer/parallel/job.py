"""A process' place in the job that ``torch.distributed.run`` started it in, and how it enters the group."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from flotilla.services.trainer.parallel.channel import Channel
from flotilla.services.trainer.parallel.fsdp import precision_of
from flotilla.services.trainer.parallel.ranks import MeshShape, Ranks, joined
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.weights.image.files import host_identity

OPENING = "opening"
"""The leader's channel to the others."""
MEETING_SECONDS = 180.0
"""Within which all ranks of a job have imported what they need and met."""


BEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0


class Pulse:
    """Beats on a thread of its own until closed.

    Args:
        store: a connection used by nothing else.
        rank, size: of this process, and of the job.
        on_silence: called once on that thread, with a sentence that names the rank.
    """

    def __init__(self, store: Store, rank: int, size: int, on_silence: Callable[[str], None]) -> None:
        self._store, self._rank, self._size, self._on_silence = store, rank, size, on_silence
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()
        self._thread.join(timeout=BEAT_SECONDS)

    def _beat(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        try:
            while not self._closed.wait(BEAT_SECONDS):
                self._store.add(_key(self._rank), 1)
                now = time.monotonic()
                for other in range(self._size):
                    beats = self._store.add(_key(other), 0)
                    before = seen.setdefault(other, (beats, now))
                    if beats != before[0]:
                        seen[other] = beats, now
                    elif now - before[1] > SILENT_SECONDS:
                        self._on_silence(f"rank {other} of {self._size} was silent for {SILENT_SECONDS:g} s")
                        return
        except RuntimeError as error:
            if not self._closed.is_set():
                self._on_silence(f"the store of the training job is lost: {error}")


def _key(rank: int) -> str:
    return f"beats/{rank}"


@dataclass(frozen=True)
class Place:
    """This process's place in its job.

    Attributes:
        rank, size: of this process, and of the job.
        local_rank: among those of its machine.
        host, port: of the job's store.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the environment that ``torch.distributed.run`` sets; None outside a job."""
        if "WORLD_SIZE" not in environment:
            return None
        return cls(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
        )

    def store(self) -> Store:
        """Connect to the job's store."""
        timeout = timedelta(seconds=MEETING_SECONDS)
        return TCPStore(self.host, self.port, self.size, is_master=False, timeout=timeout, wait_for_workers=False)


@contextmanager
def entered(
    place: Place, store: Store, config: ParallelismConfig, on_silence: Callable[[str], None]
) -> Iterator[tuple[Ranks, Channel]]:
    """Enter the group of all ranks, and leave it at the end.

    Args:
        place: of this process.
        store: a connection to the job's store.
        config: the ranks' section.
        on_silence: called on another thread with the silent rank.
    """
    shape = MeshShape.of(config, config.ranks)
    device = device_of(config, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pulse = Pulse(PrefixStore("pulse", place.store()), place.rank, place.size, on_silence)
    try:
        group, timeout = PrefixStore("group", store), config.collective_timeout_seconds
        host = host_identity() if config.nodes > 1 else None
        offloads = config.offload.parameters
        with joined(
            shape, place.rank, device, group, timeout_seconds=timeout, host=host, offloads_parameters=offloads
        ) as ranks:
            precise = replace(ranks, precision=precision_of(config.mixed_precision))
            yield precise, Channel(precise, PrefixStore("commands", store))
    finally:
        pulse.close()


def device_of(config: ParallelismConfig, place: Place) -> torch.device:
    """Return the device of a rank: of several on GPUs, each has the one with its number on its machine."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device, place.local_rank) if device == "cuda" else torch.device(device)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only shows that another rank ended or does not answer, not its cause."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Gloo"))
