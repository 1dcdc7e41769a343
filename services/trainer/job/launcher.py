"""Ranks under ``torch.distributed.run``'s agent: no restarts of its own, and the store of the job on loopback only.

The ranks share standard input and output with this process: the leader reads the orders, and answers go to the
supervisor directly. When a rank ends by a signal, all others are ended, and the supervisor is told which it was.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from typing import IO

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from services.trainer.wire import Failed
from shared.processes import python_module
from shared.schemas.service import Failure

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BACKEND = "flotilla-loopback"
STORE_SECONDS = 60.0
END_SECONDS = 5
"""A rank that was told to end is killed after that."""
MODULE = "services.trainer.worker"


def run_job(num_ranks: int, answers: IO[bytes]) -> int:
    """Start the ranks, wait for their end, and say why where one was ended by a signal; returns the exit code."""
    rendezvous_handler_registry.register(BACKEND, lambda parameters: LoopbackRendezvous(parameters, num_ranks))
    # Ranks of one machine need nobody else to reach them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="flotilla-job-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="training",
            rdzv_backend=BACKEND,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle="SIGTERM",
            shutdown_timeout=END_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        try:
            elastic_launch(config, sys.executable)(*python_module(MODULE)[1:])
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            cause = cause_of(codes, num_ranks)
            if cause is not None:
                failure = Failure(component="trainer", cause=cause, fatal=False)
                answers.write(Failed(failure=failure, is_permanent=False).line())
                answers.flush()
            return 1
    return 0


def cause_of(codes: Mapping[int, int], num_ranks: int) -> str | None:
    """Name the ranks that signals ended; None where there is none, and a rank has told the cause itself.

    Args:
        codes: exit codes of the ranks that ended badly; negative for a signal. SIGTERM is how others are ended.
        num_ranks: of the job.
    """
    killed = {rank: -code for rank, code in sorted(codes.items()) if code < 0 and code != -signal.SIGTERM}
    if not killed:
        return None
    named = " and ".join(f"rank {rank} of {num_ranks}" for rank in killed)
    return f"{named} {'was' if len(killed) == 1 else 'were'} ended by {_name(next(iter(killed.values())))}"


def _name(number: int) -> str:
    return signal.Signals(number).name if number in {each.value for each in signal.Signals} else f"signal {number}"


class LoopbackRendezvous(RendezvousHandler):
    """One agent, whose store no other machine can reach: torch's own would listen on every interface."""

    def __init__(self, parameters: RendezvousParameters, num_ranks: int) -> None:
        self._run_id = parameters.run_id
        with socket.create_server((LOOPBACK, 0)) as listening:
            self._port = listening.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                self._port,
                num_ranks + 1,
                is_master=True,
                timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )

    def get_backend(self) -> str:
        """Name it."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this very store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet nobody: there is one agent."""
        address = RendezvousStoreInfo(LOOPBACK, self._port)
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, address)

    def is_closed(self) -> bool:
        """Whether it may not be used again."""
        return False

    def set_closed(self) -> None:
        """Nothing is to be closed."""

    def num_nodes_waiting(self) -> int:
        """Count the agents that wait to take part: nobody may."""
        return 0

    def get_run_id(self) -> str:
        """Name the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Whether all is closed."""
        return True
