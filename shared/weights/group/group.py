"""One member of a weight group, of gloo or NCCL: it forms the group, then broadcasts images slice by slice.

Everything here may block until its deadline and cannot be interrupted: gloo's ``abort`` and ``shutdown`` return and do
nothing. Run it in a process that may be killed.
"""

import mmap
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import xxhash
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.net.server.ports import listening_socket
from flotilla.shared.weights.group.endpoint_protocol import Command, Direction, Opening
from flotilla.shared.weights.group.engine_group import buckets_of, group_name, store_prefixes
from flotilla.shared.weights.group.nccl import NcclBroadcast, form_nccl_group
from flotilla.shared.weights.image.image import layout_of
from flotilla.shared.weights.mapped.mappings import KeptMappings

NUM_CONNECTIONS = 2
"""Between each two members, in gloo, each with a thread of its own: one alone waits for the sender's copies into it."""
SLICES_IN_FLIGHT = 8
"""Broadcasts under way at once in gloo: enough that no connection falls idle while our thread waits for its turn on the
processor or computes a checksum. Each one takes a thread of gloo's, and no memory."""


class Collective(Protocol):
    """Broadcasts slices from rank 0."""

    @property
    def in_flight(self) -> int:
        """How many slices to have under way at once."""

    def start(self, piece: torch.Tensor, end: float) -> Any:
        """Start to broadcast a slice until ``end``; what is returned has ``wait``."""


class GlooBroadcast:
    """Broadcasts over gloo, straight from and to host memory; slices take turns on the connections."""

    in_flight = SLICES_IN_FLIGHT

    def __init__(self, opening: Opening, store: PrefixStore, deadline: float) -> None:
        address = opening.address or _address_towards(opening)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _until(deadline)
        # Engines have one connection each, and members of a group have as many as each other.
        num_connections = 1 if opening.sends_to_engines else NUM_CONNECTIONS
        options._devices = [ProcessGroupGloo.create_device(hostname=address) for _ in range(num_connections)]
        options._threads = SLICES_IN_FLIGHT
        self._group = ProcessGroupGloo(store, opening.rank, opening.world_size, options)

    def start(self, piece: torch.Tensor, end: float) -> Any:
        """See ``Collective``."""
        options = BroadcastOptions()
        options.timeout = _until(end)
        return self._group.broadcast([piece], options)  # type: ignore[attr-defined]


class WeightGroup:
    """The membership of one process in one epoch."""

    def __init__(self, opening: Opening, on_opened: Callable[[int], None]) -> None:
        """Form the group; returns when every member is connected.

        Args:
            opening: this member's rank, and where the store is or shall be.
            on_opened: called with the store's port as soon as rank 0 hosts it.

        Raises:
            RuntimeError: the store or a member was not there within the time-out.
        """
        deadline = time.monotonic() + opening.timeout_seconds
        self._mappings = KeptMappings()
        self._store = _host_store(opening, on_opened) if opening.rank == 0 else _reach_store(opening)
        self._sends_to_engines = opening.sends_to_engines
        if opening.sends_to_engines:
            name = group_name(opening.epoch, self._store.port)
            first, *others = store_prefixes(name, on_gpus=opening.device is not None)
        else:
            first, others = f"epoch-{opening.epoch}", []
        store = PrefixStore(first, self._store)
        for prefix in others:
            store = PrefixStore(prefix, store)
        self._collective: Collective
        if opening.device is None:
            self._collective = GlooBroadcast(opening, store, deadline)
        else:
            device = torch.device(opening.device)
            group = form_nccl_group(store, opening.rank, opening.world_size, opening.timeout_seconds, device)
            self._collective = NcclBroadcast(group, device, is_sender=opening.rank == 0)

    def transfer(self, command: Command, on_arrived: Callable[[int], None]) -> str | None:
        """Broadcast the image from rank 0: send it, or receive it and return its checksum.

        Args:
            command: what to do.
            on_arrived: called during the receipt, if the command asks for it, with the number of bytes received.

        Raises:
            RuntimeError: a member failed or stalled; the group is of no use afterwards.
            WeightTransferFailed: the image cannot be opened or has another size.
        """
        deadline = time.monotonic() + command.deadline_seconds
        with self._mappings.use((command.image_path, command.image_bytes)) as (mapped,):
            data = torch.frombuffer(mapped, dtype=torch.uint8)
            slices: Iterable[torch.Tensor] = (
                buckets_of_image(mapped, data, command.slice_bytes)
                if self._sends_to_engines
                else torch.split(data, command.slice_bytes)
            )
            if (faults := armed()) is not None:
                is_sender = command.direction is Direction.SEND
                slices = faults.each_slice(Site.WEIGHTS_SEND if is_sender else Site.WEIGHTS_RECEIVE, slices)
            arrived = self._broadcast(slices, deadline)
            if command.direction is Direction.SEND:
                deque(arrived, maxlen=0)
                return None
            digest, num_bytes = xxhash.xxh3_64(), 0
            for piece in arrived:
                num_bytes += piece.numel()
                if command.tells_progress:
                    on_arrived(num_bytes)
                digest.update(piece.numpy().data)
            return digest.hexdigest()

    def _broadcast(self, slices: Iterable[torch.Tensor], deadline: float) -> Iterator[torch.Tensor]:
        """Yield each slice when it has been transferred, while the following ones are under way."""
        under_way: deque[tuple[torch.Tensor, Any]] = deque()
        for piece in slices:
            if len(under_way) == self._collective.in_flight:
                oldest, work = under_way.popleft()
                work.wait()
                under_way.append((piece, self._collective.start(piece, deadline)))
                yield oldest
            else:
                under_way.append((piece, self._collective.start(piece, deadline)))
        for piece, work in under_way:
            work.wait()
            yield piece


def buckets_of_image(image: mmap.mmap, data: torch.Tensor, bucket_bytes: int) -> Iterator[torch.Tensor]:
    """Cut an image into the broadcasts that engines expect: tensors without the header.

    Args:
        image: a safetensors file.
        data: [N] uint8, the same.
        bucket_bytes: most that one carries, but for a larger tensor.
    """
    for bucket in buckets_of(layout_of(image).tensors, bucket_bytes):
        yield data[bucket[0].start : bucket[-1].end]


def _host_store(opening: Opening, on_opened: Callable[[int], None]) -> TCPStore:
    # The store would listen on every interface; a Flotilla socket restricts it to the given address.
    with listening_socket(opening.bind_host) as listening:
        port = listening.getsockname()[1]
        store = _store(opening, port, master_listen_fd=listening.detach())
    on_opened(port)
    return store


def _reach_store(opening: Opening) -> TCPStore:
    return _store(opening, opening.port, master_listen_fd=None)


def _store(opening: Opening, port: int, master_listen_fd: int | None) -> TCPStore:
    return TCPStore(
        opening.host,
        port,
        opening.world_size,
        is_master=master_listen_fd is not None,
        timeout=timedelta(seconds=opening.timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=master_listen_fd,
    )


def _address_towards(opening: Opening) -> str:
    """Find the local address that packets to the store leave from; nothing is sent."""
    family = socket.AF_INET6 if ":" in opening.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((opening.host, opening.port or 9))
        return str(probe.getsockname()[0])


def _until(deadline: float) -> timedelta:
    # A time-out of zero would mean none at all.
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
