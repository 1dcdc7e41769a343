"""Which services an experiment can use by their GPUs, and whose a GPU is now. Pure.

A service's devices are given whole, with the service. Two services may declare the same device (both see the whole
machine): while an experiment computes on it, the other service works for the same experiment or is idle.
"""

from collections.abc import Iterable, Mapping, Sequence

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.shared.schemas.service import ServiceKind as Kind

SOMEBODY = ""
"""Owner of the devices of a service that has left its experiment, and is not yet done with it."""
COMPUTING = frozenset({Kind.TRAINER, Kind.ROLLOUT})
"""Kinds of service whose devices are given with them; a reward model's is its spec's own choice."""
Owners = dict[str, str]
"""Device to the experiment that computes on it."""


def owners_of(demands: Sequence[Demand], candidates: Sequence[Candidate]) -> Owners:
    """Find who computes on which device."""
    uses = {demand.experiment_id: demand for demand in demands}
    owners: Owners = {}
    for candidate in candidates:
        owner = candidate.experiment_id
        if candidate.kind not in COMPUTING or (owner is None and not candidate.is_leaving):
            continue
        if owner in uses and not uses[owner].need_of(candidate.kind).is_used:
            continue
        owners |= dict.fromkeys(candidate.devices, owner or SOMEBODY)
    return owners


def others(candidate: Candidate, owners: Mapping[str, str]) -> set[str]:
    """List the experiments that compute on a service's devices."""
    return {owners[device] for device in candidate.devices if device in owners}


def may_use(demand: Demand, candidate: Candidate, owners: Mapping[str, str]) -> bool:
    """Whether the devices that an experiment would get with a service are free of other experiments."""
    return not demand.need_of(candidate.kind).is_used or others(candidate, owners) <= {demand.experiment_id}


def in_order_of_use(demand: Demand, candidates: Iterable[Candidate], owners: Mapping[str, str]) -> list[Candidate]:
    """Sort idle services by how well their devices suit an experiment; equal ones stay in their order.

    One that takes turns on its devices wants those that it has. Otherwise devices that nobody computes on come first;
    then who needs a number of them takes the smallest service that has as many, and who does not use any one without.
    """

    def key(candidate: Candidate) -> tuple[int, int]:
        need = demand.need_of(candidate.kind)
        shared = len(candidate.devices & owners.keys())
        takes_all = need.is_used and not need.count
        return (-shared if demand.shares_devices else shared), (-1 if takes_all else 1) * len(candidate.devices)

    return sorted(candidates, key=key)


def reserved_for(
    demands: Sequence[Demand], candidates: Sequence[Candidate], owners: Mapping[str, str]
) -> dict[str, str]:
    """Find idle services that only one experiment can use, since it computes on their devices: id to experiment."""
    known = {demand.experiment_id for demand in demands}
    found = {}
    for candidate in candidates:
        if candidate.experiment_id is None and len(owner := others(candidate, owners)) == 1 and owner <= known:
            found[candidate.service_id] = next(iter(owner))
    return found


def counts_of(kind: Kind, candidates: Sequence[Candidate]) -> str:
    """List how many devices each service of a kind has, such as ``0, 2 and 2``."""
    numbers = sorted(len(candidate.devices) for candidate in candidates if candidate.kind is kind)
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
