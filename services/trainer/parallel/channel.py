"""The way from the leader to the followers: a command through the job's store, its groups by one broadcast.

A follower waits for its next command for as long as the leader takes, in waits of some seconds: that the leader still
lives is watched elsewhere (``pulse``). A command has ended when every rank has said how it went.
"""

from collections.abc import Sequence
from datetime import timedelta

import msgpack
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from flotilla.services.trainer.parallel.commands import COMMAND, Command, Train
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.errors import FlotillaError, ModelError
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.codec import decode_group, encode_body, encode_grades

WAIT_SECONDS = 5.0


class Channel:
    """One end of it; every rank has one.

    Args:
        ranks: the job.
        store: that all ranks reach.
    """

    def __init__(self, ranks: Ranks, store: Store) -> None:
        self._ranks, self._store = ranks, store
        self._number = 0

    def send(self, command: Command) -> None:
        """Leader: begin a command on every rank."""
        self._number += 1
        self._store.set(_key(self._number), command.model_dump_json())

    def receive(self) -> Command:
        """Follower: wait for the next command; blocks."""
        self._number += 1
        key = _key(self._number)
        while True:
            try:
                self._store.wait([key], timedelta(seconds=WAIT_SECONDS))
            except DistStoreError:
                continue
            return COMMAND.validate_json(self._store.get(key))

    def send_groups(self, command: Train, groups: Sequence[Group]) -> None:
        """Leader: begin a step on every rank, or what its loss is; the command lacks the size of the groups."""
        payload: bytes = msgpack.packb([[encode_body(group), encode_grades(group)] for group in groups])
        self.send(command.model_copy(update={"payload_bytes": len(payload)}))
        self._ranks.broadcast(payload, len(payload))

    def receive_groups(self, payload_bytes: int) -> list[Group]:
        """Follower: receive the groups of a step."""
        payload = self._ranks.broadcast(None, payload_bytes)
        return [decode_group(body, grades) for body, grades in msgpack.unpackb(payload)]

    def end(self, failure: FlotillaError | None = None) -> None:
        """End a command: wait until every rank is here, and fail on all of them where it failed on one.

        Raises:
            ModelError: a rank could not do it; the others are as they were.
        """
        told = self._ranks.gather(failure.detail.encode() if failure is not None else b"")
        if self._ranks.is_leader:
            self._store.delete_key(_key(self._number))
        if failure is not None:
            raise failure
        for rank, detail in enumerate(told):
            if detail:
                raise ModelError(f"rank {rank} of {self._ranks.size}: {detail.decode()}")


def _key(number: int) -> str:
    return f"command/{number}"
