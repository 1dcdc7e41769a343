"""The ranks of a training job, and the few collectives that a step needs beside those of sharded weights.

One rank has no process group, and everything here gives back what it is given: that path does not change a bit.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from flotilla.services.trainer.algorithms.metrics import Metrics, Tally, combine
from flotilla.shared.config.sections.parallelism import CriticParallelismConfig, ParallelismConfig

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"


@dataclass(frozen=True, eq=False)
class Ranks:
    """What a process is in its job.

    Attributes:
        rank, size: of this process, and of the job.
        mesh: axes ``replicate``, ``shard`` and ``tensor``, whose product is the job; None for one rank.
        expert_mesh: the same ranks as experts are divided among them, axes ``replicate``, ``expert_shard`` and
            ``expert``; None where every rank computes all experts.
        device: where collectives take their tensors.
        data_group: those that compute other sequences than this one, itself included; None for one rank.
        sequence_group: those that compute the same sequences together; None where each computes its own.
        sequence_size: how many these are.
        remote: the ranks that do not see the leader's shared memory: they are on other hosts.
        offloads_parameters: whether sharded weights, their gradients and optimiser are in the host's memory, but for
            the layer that computes.
        timeout: of a collective; None as torch has it.
        precision: what sharded weights are gathered in and compute in, and gradients are added up in; None: their own.
        round_bytes: of a file's tensors, whole, after which ranks of other hosts send what they have of them.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data_group: ProcessGroup | None = None
    sequence_group: ProcessGroup | None = None
    sequence_size: int = 1
    remote: frozenset[int] = frozenset()
    offloads_parameters: bool = False
    timeout: timedelta | None = None
    precision: MixedPrecisionPolicy | None = None
    round_bytes: int = 64 << 20

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What sharded weights compute in, where that is not their own element type."""
        return None if self.precision is None else self.precision.param_dtype

    @property
    def home(self) -> torch.device:
        """Where sharded weights are while they do not compute."""
        return torch.device("cpu") if self.offloads_parameters else self.device

    @property
    def shares_computation(self) -> bool:
        """Whether a layer is computed by several ranks together, and so perhaps not as one computes it."""
        return self.share_size > 1 or self.expert_mesh is not None

    @cached_property
    def undivided(self) -> "Ranks":
        """The same ranks where each computes whole layers by itself; every rank asks for it, or none."""
        mesh = init_device_mesh(self.device.type, (1, self.size, 1), mesh_dim_names=(REPLICATE, SHARD, TENSOR))
        return replace(self, mesh=mesh, expert_mesh=None, sequence_group=None, sequence_size=1)

    def reshaped(self, shape: "MeshShape") -> "Ranks":
        """Divide the same ranks otherwise, for another model; every rank asks for it."""
        found = _formed(shape, self.rank, self.device, self.timeout)
        return replace(
            found, remote=self.remote, offloads_parameters=self.offloads_parameters, precision=self.precision
        )

    @property
    def is_remote(self) -> bool:
        """Whether this rank is on another host than the leader."""
        return self.rank in self.remote

    @property
    def data_rank(self) -> int:
        """Number of the share of sequences that this rank computes."""
        return self.rank // self.share_size

    @property
    def data_size(self) -> int:
        """Shares that sequences are divided into."""
        return self.size // self.share_size

    @property
    def tensor_size(self) -> int:
        """Ranks that compute each layer together."""
        return 1 if self.mesh is None else self.mesh[TENSOR].size()

    @property
    def share_size(self) -> int:
        """Ranks that compute the same sequences together."""
        return self.sequence_size * self.tensor_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank keeps the loop, the planner, the publisher and the checkpoints."""
        return self.rank == 0

    @property
    def is_several(self) -> bool:
        """Whether this job has other ranks than this one."""
        return self.mesh is not None

    def sum(self, values: Tensor) -> Tensor:
        """Add up the ranks' tensors of one shape; every rank gets the same bits."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.data_group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Take the largest of the ranks' values, element by element."""
        if self.mesh is not None:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.data_group)
        return values

    def combine(self, metrics: Metrics) -> Metrics:
        """Add up the tallies of all shares, in their order."""
        if self.mesh is None:
            return metrics
        mine = json.dumps({name: [float(tally.total), float(tally.count)] for name, tally in metrics.items()})
        told = self.gather(mine.encode())[:: self.share_size]
        return combine(_tallies(json.loads(each)) for each in told)

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the bytes of every rank, in their order."""
        if self.mesh is None:
            return [payload]
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(payload)], device=self.device))
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(max(1, longest), dtype=torch.uint8, device=self.device)
        mine[: len(payload)] = _tensor(payload).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [_bytes(each[: int(length)]) for each, length in zip(found, lengths, strict=True)]

    def send_to_leader(self, values: Tensor) -> None:
        """Send bytes to the leader, which receives them under the same length; blocks."""
        dist.send(values.to(self.device), dst=0)

    def receive_from(self, rank: int, length: int) -> Tensor:
        """Leader: receive bytes that a rank sends, into the host's memory; blocks."""
        values = torch.empty(length, dtype=torch.uint8, device=self.device)
        dist.recv(values, src=rank)
        return values.cpu()

    def broadcast(self, payload: bytes | None, length: int) -> bytes:
        """Return the leader's bytes on every rank; the others know their length, and pass None."""
        if self.mesh is None:
            assert payload is not None
            return payload
        empty = torch.empty(length, dtype=torch.uint8, device=self.device)
        values = empty if payload is None else _tensor(payload).to(self.device)
        if length:
            dist.broadcast(values, src=0)
        return _bytes(values)


ONE_RANK = Ranks()


@dataclass(frozen=True)
class MeshShape:
    """How many ranks each axis has.

    Attributes:
        replicate: copies of the sharded weights (HSDP); 1 for plain FSDP.
        shard: parts that each rank's share of a copy is divided into (FSDP).
        sequence: of those, how many compute the same sequences together.
        tensor: ranks that compute each layer together.
        expert: ranks that divide the experts of a layer; of the ranks of one copy.
    """

    shard: int
    replicate: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, config: ParallelismConfig | CriticParallelismConfig, size: int) -> "MeshShape":
        """Read how a section of the spec divides a job's ranks."""
        return cls(
            shard=size // (config.replicas * config.tensor_parallel),
            replicate=config.replicas,
            sequence=config.sequence_parallel,
            tensor=config.tensor_parallel,
            expert=config.expert_parallel,
        )

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.replicate * self.shard * self.tensor


@contextmanager
def joined(
    shape: MeshShape,
    rank: int,
    device: torch.device,
    store: Store,
    *,
    timeout_seconds: float,
    host: str | None = None,
    offloads_parameters: bool = False,
) -> Iterator[Ranks]:
    """Form the group of all ranks; blocks until they are there.

    Args:
        shape: of the mesh.
        rank: of this process.
        device: of this rank.
        store: that all ranks reach.
        timeout_seconds: a collective that takes longer ends with an error.
        host: identity of this rank's host; None on all ranks where they are known to be on one.
        offloads_parameters: see ``Ranks``.
    """
    backend = backend_of(device, offloads_parameters=offloads_parameters)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=shape.size, timeout=timeout)
    ranks = replace(_formed(shape, rank, device, timeout), offloads_parameters=offloads_parameters)
    if host is not None:
        hosts = ranks.gather(host.encode())
        ranks = replace(ranks, remote=frozenset(other for other in range(shape.size) if hosts[other] != hosts[0]))
    yield ranks
    # Not after a failure: ranks waiting in a collective would see the end before its cause is reported.
    dist.destroy_process_group()


def _formed(shape: MeshShape, rank: int, device: torch.device, timeout: timedelta | None) -> Ranks:
    """Form the groups of a mesh; every rank does it."""
    dense = (shape.replicate, shape.shard, shape.tensor)
    mesh = init_device_mesh(device.type, dense, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
    data = sequence = experts = None
    numbers, together = list(range(shape.size)), shape.sequence * shape.tensor
    if shape.expert > 1:
        divided = (shape.replicate, shape.shard * shape.tensor // shape.expert, shape.expert)
        experts = init_device_mesh(device.type, divided, mesh_dim_names=(REPLICATE, EXPERT_SHARD, EXPERT))
    if shape.sequence > 1:
        shares = [numbers[start : start + shape.sequence] for start in numbers[:: shape.sequence]]
        sequence = _own_group(shares, rank, timeout)
    if together > 1:
        data = _own_group([numbers[start::together] for start in range(together)], rank, timeout)
    return Ranks(
        rank,
        shape.size,
        mesh,
        experts,
        device,
        data or dist.group.WORLD,
        sequence,
        shape.sequence,
        timeout=timeout,
    )


def backend_of(device: torch.device, *, offloads_parameters: bool) -> str:
    """Name what carries collectives: gradients that are in the host's memory are measured there."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offloads_parameters else "nccl"


def _own_group(groups: list[list[int]], rank: int, timeout: timedelta | None) -> ProcessGroup:
    """Form some groups, which every rank has to do, and return the one that this rank is in."""
    made = {rank in members: dist.new_group(members, timeout=timeout) for members in groups}
    found: ProcessGroup = made[True]
    return found


def _tallies(found: Mapping[str, list[float]]) -> Metrics:
    return {
        name: Tally(torch.tensor(total, dtype=torch.float32), torch.tensor(count, dtype=torch.float32))
        for name, (total, count) in found.items()
    }


def _tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _bytes(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()
