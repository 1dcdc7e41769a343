"""Training jobs on several hosts: which service is which node, and when a job is over. Pure.

The trainer epoch is the membership: a job begins when as many services as nodes have the same epoch, and whatever ends
it anywhere raises the epoch, so that all its services end it and begin the next one. Node numbers follow the order of
registration, which a gateway that restarts finds again.
"""

from collections.abc import Mapping, Sequence

from flotilla.shared.schemas.service import JobNode, JobReport

STORE_SECONDS = 120.0
"""Within which the first node has opened the job's store, once all services are there; it sees to the others itself."""

Reports = Mapping[str, JobReport | None]
"""By id of the experiment's trainer services, the first node first; None of one that says nothing of a job."""


def node_of(service_id: str, num_nodes: int, epoch: int, reports: Reports) -> JobNode | None:
    """Find a service's place in the job of an epoch; None while there are too few services for it."""
    members = list(reports)[:num_nodes]
    if len(members) < num_nodes or service_id not in members:
        return None
    rank, first = members.index(service_id), reports[members[0]]
    if rank == 0 or first is None or first.epoch != epoch:
        return JobNode(rank=rank, count=num_nodes)
    return JobNode(rank=rank, count=num_nodes, host=first.host, port=first.port)


def why_ended(epoch: int, reports: Reports) -> str | None:
    """Return why the job of an epoch ended on one of its nodes; None while it has not."""
    causes = [each.ended for each in reports.values() if each is not None and each.epoch == epoch and each.ended]
    return causes[0] if causes else None


def name_of(service_id: str, members: Sequence[str], num_nodes: int) -> str:
    """Name a node to a person."""
    return f"node {members.index(service_id) + 1} of {num_nodes} (service {service_id})"
