"""SGLang as a member of the trainer's weight group: its ranks take the tensors, and no process of the rollout does.

The server is paused before it forms a group, since that blocks its scheduler until all members are there, and stays so
until the version is committed. Between the first tensor and the last its weights are of no version: what breaks off
there is made good by the next epoch's broadcast, or by loading an image. A call that is not answered in time leaves
a scheduler that nothing wakes: then the server is abandoned.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import httpx

from flotilla.services.rollout.engines.base import GroupBroken
from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader
from flotilla.services.rollout.engines.servers.attaching import UNREADABLE
from flotilla.services.rollout.engines.servers.client import Refused
from flotilla.services.rollout.engines.servers.connection import Connection
from flotilla.services.rollout.engines.servers.dialect import Body
from flotilla.services.rollout.engines.servers.proof import ServerProof
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import PAUSES, SglangEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.publication import Manifest, PublicationOrder, TensorSpec
from flotilla.shared.weights.group.engine_group import buckets_of, group_name

PHASES = 2
"""Deadlines of a phase that a call may take: the sender times out first, which wakes its waiters."""
NOT_RECEIVED = "Failed to receive weights"
"""How SGLang's message of a failed broadcast begins; other messages are about the tensors."""
ALREADY_OPEN = "session is already open"
"""In what it answers to the beginning of an update while another one has not ended."""
TORCH_NAMES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of the dtypes that an image for an engine may have."""


class GroupSglangEngine(SglangEngine):
    """An ``SglangEngine`` that is a ``GroupMember``.

    Args:
        settings: how the server runs, or where.
        transport: another one than sockets, for tests.
        backend: of the group.
        reaches: checks whether a port takes connections within some seconds: the server would retry for half an hour
            where an epoch is over already.
    """

    def __init__(
        self,
        settings: ServerSettings,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        backend: Literal["nccl", "gloo"],
        reaches: Callable[[str, int, float], Awaitable[bool]] | None = None,
    ) -> None:
        super().__init__(settings, transport)
        self._reaches = reaches or is_reached
        self._backend = backend
        self._on_update = OnWeightUpdate.INTERRUPT
        self._num_ranks: int | None = None
        self._group: tuple[int, str] | None = None
        self._has_session = False
        self._has_lost_weights = False
        self._received: int | None = None

    @property
    def received(self) -> int | None:
        """See ``GroupMember.received``."""
        return self._received

    @property
    def is_paused(self) -> bool:
        """See ``GroupMember.is_paused``."""
        return self._gate.is_held

    async def close(self) -> None:
        """See ``Engine.close``; a server that continues without us is left without our group."""
        connection = self._connection
        if self._settings.url is not None and connection is not None and connection.death is None:
            with suppress(FlotillaError):
                await self._leave(connection)
        await super().close()

    async def join(self, order: PublicationOrder, on_update: OnWeightUpdate) -> None:
        """See ``GroupMember.join``."""
        connection, model = self._running()
        model.check_tensors({each.name: TensorHeader(each.dtype, each.shape) for each in order.manifest.tensors})
        if self._num_ranks is None:
            self._num_ranks = await self._ask_num_ranks(connection)
        if self._num_ranks != order.num_ranks:
            raise WeightTransferFailed(
                f"the server has {self._num_ranks} ranks, its place in the group {order.num_ranks}"
            )
        if not self._gate.is_held:
            self._on_update = on_update
            await self._gate.hold(on_update)
        if self._received is not None:
            # Of an epoch that had no result: another trainer may have made another image of that version since.
            self._received, self._has_lost_weights = None, True
        await self._changing(connection, self._join(connection, order))

    async def receive(self, order: PublicationOrder) -> None:
        """See ``GroupMember.receive``."""
        connection, _ = self._running()
        await self._changing(connection, self._receive(connection, order))

    async def serve(self) -> None:
        """See ``GroupMember.serve``."""
        connection, _ = self._running()
        assert self._received is not None
        await self._changing(connection, self._go_on(connection, self._received))

    async def give_up(self) -> bool:
        """See ``GroupMember.give_up``."""
        if not self._gate.is_held:
            return True
        connection, _ = self._running()
        if self._received is not None or self._has_lost_weights:
            self._received, self._has_lost_weights = None, True
            return False
        await self._changing(connection, self._go_on(connection, self._version))
        return True

    async def _load(self, image: Path, version: int, on_update: OnWeightUpdate, proof: ServerProof | None) -> None:
        await super()._load(image, version, on_update, proof)
        self._has_lost_weights = False

    async def wake(self) -> None:
        """See ``Engine.wake``."""
        await super().wake()
        self._has_lost_weights = False

    async def _changing(self, connection: Connection, work: Coroutine[None, None, None]) -> None:
        """Await what changes the server, also when cancelled; without an answer its state is unknown."""

        async def known() -> None:
            try:
                await work
            except (WeightTransferFailed, WorkerDied):
                raise
            except FlotillaError as error:
                connection.die(WorkerDied(f"the server did not follow its weight group: {error.detail}"))
                raise connection.death or error from error

        await self._to_the_end(connection, known())

    async def _join(self, connection: Connection, order: PublicationOrder) -> None:
        rendezvous, seconds = order.rendezvous, PHASES * order.deadline_seconds
        assert rendezvous is not None and order.rank is not None
        await connection.post("/pause_generation", {"mode": PAUSES[self._on_update]})
        if self._group is None or self._group[0] != order.epoch:
            await self._leave(connection)
            name = group_name(order.epoch, rendezvous.port)
            body = {
                "master_address": rendezvous.host,
                "master_port": rendezvous.port,
                "rank_offset": order.rank,
                "world_size": rendezvous.world_size,
                "group_name": name,
                "backend": self._backend,
            }
            if not await self._reaches(rendezvous.host, rendezvous.port, self._settings.call_seconds):
                raise GroupBroken(f"the store at {rendezvous.host}:{rendezvous.port} cannot be reached")
            try:
                await connection.post("/init_weights_update_group", body, seconds=seconds)
            except Refused as error:
                raise GroupBroken(error.detail) from error
            self._group = order.epoch, name
        if not self._has_session:
            await self._begin_session(connection)

    async def _receive(self, connection: Connection, order: PublicationOrder) -> None:
        self._received, self._has_lost_weights = None, True
        assert self._group is not None
        try:
            for body in self._bodies(order.manifest, self._group[1]):
                await connection.post("/update_weights_from_distributed", body, seconds=PHASES * order.deadline_seconds)
        except Refused as error:
            await self._end_session(connection)
            if NOT_RECEIVED in error.detail:
                raise GroupBroken(error.detail) from error
            raise WeightTransferFailed(error.detail) from error
        await self._end_session(connection)
        self._received, self._has_lost_weights = order.version, False

    def _bodies(self, manifest: Manifest, name: str) -> list[Body]:
        """Make a request for each broadcast; the last one names the version."""
        buckets = list(buckets_of(manifest.tensors, manifest.slice_bytes))
        flushes = self._on_update is not OnWeightUpdate.CONTINUE
        last = {"weight_version": self._labels.of(manifest.version), "flush_cache": flushes}
        return [
            {**update_body(bucket, name), **({"flush_cache": False} if number < len(buckets) else last)}
            for number, bucket in enumerate(buckets, start=1)
        ]

    async def _go_on(self, connection: Connection, version: int) -> None:
        if self._has_session:
            await self._end_session(connection)
        await connection.post("/continue_generation", {})
        self._version, self._received, self._has_lost_weights = version, None, False
        await self._gate.release()

    async def _ask_num_ranks(self, connection: Connection) -> int:
        try:
            return int((await connection.get("/server_info"))["tp_size"])
        except (Refused, *UNREADABLE) as error:
            raise WeightTransferFailed(f"the server does not report its number of ranks: {error}") from error

    async def _begin_session(self, connection: Connection) -> None:
        try:
            await connection.post("/begin_weight_update", {})
        except Refused as error:
            if ALREADY_OPEN not in error.detail:
                raise
            # A rollout that was killed had this server before us.
            await self._end_session(connection)
            await connection.post("/begin_weight_update", {})
        self._has_session = True

    async def _end_session(self, connection: Connection) -> None:
        await connection.post("/end_weight_update", {}, seconds=self._settings.load_seconds)
        self._has_session = False

    async def _leave(self, connection: Connection) -> None:
        if self._group is not None:
            (_, name), self._group = self._group, None
            await connection.post("/destroy_weights_update_group", {"group_name": name})


async def is_reached(host: str, port: int, seconds: float) -> bool:
    """Return whether a port takes connections."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def update_body(bucket: tuple[TensorSpec, ...], name: str) -> Body:
    """Return which tensors the next broadcast of a group holds, one behind the other."""
    return {
        "names": [each.name for each in bucket],
        "dtypes": [TORCH_NAMES[each.dtype] for each in bucket],
        "shapes": [list(each.shape) for each in bucket],
        "group_name": name,
        "load_format": "flattened_bucket",
    }
