"""How the agents of a training job find each other: through one store, which the first node's agent has.

torch's own rendezvous would listen on every interface, admit any agent, and let the others continue when one is
lost. Here the gateway has fixed the members. An agent whose ranks end stores the cause; the others read it there
beside watching their own ranks, end them and name the same cause.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from flotilla.shared.net.server.ports import listening_socket

BACKEND = "flotilla"
STORE_SECONDS = 90.0
"""Within which the agents of all nodes have come."""
LOOK_SECONDS = 0.5
FAREWELL_SECONDS = 3.0
"""How long an agent whose ranks have lost others waits for the cause, and the store for late readers."""
ENDED, LEFT = "ended", "left"


@dataclass(frozen=True)
class Node:
    """A host's place in a job.

    Attributes:
        num_ranks: on this host.
        rank, count: of the node, and how many there are.
        host: address that this host's ranks are reached at.
        store_host, port: where the store is; None and 0 on the first node, which opens it.
    """

    num_ranks: int
    rank: int = 0
    count: int = 1
    host: str = "127.0.0.1"
    store_host: str | None = None
    port: int = 0

    @property
    def job_size(self) -> int:
        """Ranks of the job."""
        return self.num_ranks * self.count


class JobEnded(Exception):
    """The job ended on another node; the message has the cause."""


class Rendezvous(RendezvousHandler):
    """One agent's end of it.

    Args:
        node: of this host.
        on_opened: called with the port of the store that this agent has opened.
    """

    def __init__(self, node: Node, on_opened: Callable[[int], None]) -> None:
        self._node = node
        self._looked = 0.0
        if node.store_host is None:
            self._address, self._store = _open_store(node)
            on_opened(self._address.master_port)
        else:
            self._address = RendezvousStoreInfo(node.store_host, node.port)
            self._store = _reach_store(node, self._address)
        self._agents: Store = PrefixStore("agents", self._store)

    def get_backend(self) -> str:
        """Name it."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this very store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the agents of all nodes.

        Raises:
            JobEnded: one did not come in time.
        """
        self._agents.set(_here(self._node.rank), "1")
        missing = [rank for rank in range(self._node.count) if not self._comes(rank)]
        if missing:
            raise JobEnded(f"{self._named(missing)} did not come within {STORE_SECONDS:g} s")
        return RendezvousInfo(PrefixStore("agent", self._store), self._node.rank, self._node.count, self._address)

    def num_nodes_waiting(self) -> int:
        """Count waiting agents: always 0. It is polled, so this is where the end is noticed.

        Raises:
            JobEnded: the job has ended on another node.
        """
        now = time.monotonic()
        if self._node.count > 1 and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return 0

    def _look(self) -> None:
        try:
            self._agents.add(_beats(self._node.rank), 1)
            cause = self._agents.get(ENDED).decode() if self._agents.check([ENDED]) else None
        except RuntimeError:
            raise JobEnded(f"{self._named([0])} is gone, and the store of the job with it") from None
        if cause is not None:
            raise JobEnded(cause)

    def tell(self, cause: str) -> None:
        """Let all nodes know why the job ends; the first cause counts."""
        try:
            self._agents.compare_set(ENDED, "", cause)
        except RuntimeError:
            return  # the store is gone, as all agents notice

    def await_cause(self) -> str:
        """Find out why ranks of other nodes have ended; an agent that has ended, too, is named."""
        try:
            before = self._all_beats()
            end = time.monotonic() + FAREWELL_SECONDS
            while time.monotonic() < end:
                self._look()
                time.sleep(LOOK_SECONDS / 2)
            after = self._all_beats()
        except JobEnded as found:
            return str(found)
        except RuntimeError:
            return f"{self._named([0])} is gone, and the store of the job with it"
        silent = [rank for rank, beats in after.items() if beats == before[rank]]
        return f"{self._named(silent)} is gone" if silent else "ranks of another node are gone, for an unknown cause"

    def leave(self) -> None:
        """Keep the store, where it is here, until the others have had the time to read why the job ended."""
        try:
            left = self._agents.add(LEFT, 1)
            end = time.monotonic() + FAREWELL_SECONDS
            while self._node.rank == 0 and left < self._node.count and time.monotonic() < end:
                time.sleep(LOOK_SECONDS / 5)
                left = self._agents.add(LEFT, 0)
        except RuntimeError:
            return  # it was another node's

    def _all_beats(self) -> dict[int, int]:
        others = [rank for rank in range(self._node.count) if rank != self._node.rank]
        return {rank: self._agents.add(_beats(rank), 0) for rank in others}

    def _comes(self, rank: int) -> bool:
        try:
            self._agents.wait([_here(rank)], timedelta(seconds=STORE_SECONDS))
        except RuntimeError:
            return False
        return True

    def _named(self, ranks: list[int]) -> str:
        return " and ".join(f"node {rank + 1} of {self._node.count}" for rank in ranks)

    def is_closed(self) -> bool:
        """Whether it may not be used again."""
        return False

    def set_closed(self) -> None:
        """Nothing is to be closed."""

    def get_run_id(self) -> str:
        """Name the job."""
        return "training"

    def shutdown(self) -> bool:
        """Whether all is closed."""
        return True


def _open_store(node: Node) -> tuple[RendezvousStoreInfo, TCPStore]:
    """Open the job's store on one address alone: torch's own would listen on every interface."""
    with listening_socket(node.host) as listening:
        port = listening.getsockname()[1]
        store = TCPStore(
            node.host,
            port,
            node.job_size + node.count,
            is_master=True,
            timeout=timedelta(seconds=STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return RendezvousStoreInfo(node.host, port), store


def _reach_store(node: Node, address: RendezvousStoreInfo) -> TCPStore:
    timeout = timedelta(seconds=STORE_SECONDS)
    host, port = address.master_addr, address.master_port
    return TCPStore(host, port, node.job_size + node.count, is_master=False, timeout=timeout, wait_for_workers=False)


def _here(rank: int) -> str:
    return f"here/{rank}"


def _beats(rank: int) -> str:
    return f"beats/{rank}"
