"""The ranks of one host under ``torch.distributed.run``'s agent: no restarts of its own, and a store on one address.

The ranks share standard input and output with this process: the leader reads the orders, and answers go to the
supervisor directly. When a rank ends by a signal, all others are ended, on other hosts too, and the supervisor of each
host learns which it was.
"""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import IO, Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flotilla.services.trainer.job.rendezvous import BACKEND, JobEnded, Node, Rendezvous
from flotilla.services.trainer.wire import EXIT_PEER_LOST, Failed, Line, StoreOpened
from flotilla.shared.children.processes import python_module
from flotilla.shared.schemas.service import Failure

END_SECONDS = 5
"""A rank that received SIGTERM is killed after that."""
MODULE = "flotilla.services.trainer.worker"


def run_job(node: Node, answers: IO[bytes]) -> int:
    """Start this host's ranks, wait for their end, report its cause unless they did; returns the exit code."""
    say = partial(_say, answers)
    try:
        rendezvous = Rendezvous(node, lambda port: say(StoreOpened(port=port)) if node.count > 1 else None)
    except RuntimeError as error:
        say(_failed(f"the store of the training job cannot be reached: {error}", is_passing=True))
        return 1
    rendezvous_handler_registry.register(BACKEND, lambda _: rendezvous)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if node.count > 1 else ("GLOO_SOCKET_IFNAME",):
        # Ranks of one machine need not be reached from others.
        if (interface := interface_of(node.host)) is not None:
            os.environ.setdefault(name, interface)
    code = _run(node, rendezvous, say)
    if node.count > 1:
        rendezvous.leave()
    return code


def _run(node: Node, rendezvous: Rendezvous, say: Callable[[Line], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="flotilla-job-") as directory:
        config = LaunchConfig(
            min_nodes=node.count,
            max_nodes=node.count,
            nproc_per_node=node.num_ranks,
            run_id="training",
            rdzv_backend=BACKEND,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle="SIGTERM",
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            **time_to_end(),
        )
        try:
            elastic_launch(config, sys.executable)(*python_module(MODULE)[1:])
        except JobEnded as ended:
            rendezvous.tell(str(ended))
            say(_failed(str(ended), is_passing=True))
            return 1
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            cause = cause_of(codes, node.job_size)
            if cause is not None:
                rendezvous.tell(cause)
                say(_failed(cause))
            elif node.count > 1 and set(codes.values()) <= {EXIT_PEER_LOST, -signal.SIGTERM}:
                cause = rendezvous.await_cause()
                rendezvous.tell(cause)
                say(_failed(cause, is_passing=True))
            else:
                # It has reported more to its own supervisor.
                rendezvous.tell(" and ".join(f"rank {rank} of {node.job_size}" for rank in sorted(codes)) + " failed")
            return 1
    return 0


def time_to_end() -> dict[str, Any]:
    """Grace period of a rank that received SIGTERM; torch up to 2.11 has no option for it, and gives 30 s."""
    return (
        {"shutdown_timeout": END_SECONDS} if "shutdown_timeout" in {each.name for each in fields(LaunchConfig)} else {}
    )


def cause_of(codes: Mapping[int, int], num_ranks: int) -> str | None:
    """Name the ranks that signals ended; None where there is none, and a rank has reported the cause itself.

    Args:
        codes: exit codes of the ranks that ended badly; negative for a signal. SIGTERM is how others are ended.
        num_ranks: of the job.
    """
    killed = {rank: -code for rank, code in sorted(codes.items()) if code < 0 and code != -signal.SIGTERM}
    if not killed:
        return None
    named = " and ".join(f"rank {rank} of {num_ranks}" for rank in killed)
    return f"{named} {'was' if len(killed) == 1 else 'were'} ended by {_name(next(iter(killed.values())))}"


def interface_of(host: str) -> str | None:
    """Find the network interface that has an address; None if unknown; the libraries then choose one."""
    try:
        wanted = {found[4][0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address in wanted for each in addresses):
            return name
    return None


def _failed(cause: str, *, is_passing: bool = False) -> Failed:
    failure = Failure(component="trainer", cause=cause, fatal=False)
    return Failed(failure=failure, is_permanent=False, is_passing=is_passing)


def _say(answers: IO[bytes], line: Line) -> None:
    answers.write(line.line())
    answers.flush()


def _name(number: int) -> str:
    return signal.Signals(number).name if number in {each.value for each in signal.Signals} else f"signal {number}"
