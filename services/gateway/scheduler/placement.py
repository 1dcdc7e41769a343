"""Which services serve which experiment: a pure function of what is there, first come, first served.

An experiment starts only when it gets everything it needs, so two half-served experiments never wait for each other.
Once it runs, idle rollouts, rewards and sandboxes join it, and a lost trainer is replaced.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.config.reward import CodeConfig
from shared.config.spec import ExperimentSpec
from shared.schemas.service import ServiceKind as Kind


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live service that is not draining.

    Attributes:
        experiment_id: what it is assigned to; None while it is idle.
    """

    service_id: str
    kind: Kind
    experiment_id: str | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What an active experiment needs to run, and whether it may grow.

    Attributes:
        needed: least number of services by kind.
        is_placed: it had all that it needs at one time, so it takes up replacements one by one.
    """

    experiment_id: str
    needed: Mapping[Kind, int]
    is_placed: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """What to change.

    Attributes:
        assigned: service id to experiment id.
        lacking: by experiment, what it still misses by kind; an experiment that misses nothing has no entry.
    """

    assigned: Mapping[str, str]
    lacking: Mapping[str, Mapping[Kind, int]]


def needs_of(spec: ExperimentSpec) -> dict[Kind, int]:
    """Count the services that an experiment needs before it starts."""
    needs = {Kind.TRAINER: 1, Kind.ROLLOUT: spec.rollout.num_rollouts, Kind.REWARD: 1}
    if any(isinstance(component, CodeConfig) for component in spec.reward.components):
        needs[Kind.SANDBOX] = 1
    return needs


def place(demands: Sequence[Demand], candidates: Sequence[Candidate]) -> Placement:
    """Assign idle services to experiments.

    Args:
        demands: active experiments, the earliest started first.
        candidates: live services in the order in which they registered.
    """
    idle: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    held: dict[str, Counter[Kind]] = {demand.experiment_id: Counter() for demand in demands}
    for candidate in candidates:
        if candidate.experiment_id is None:
            idle[candidate.kind].append(candidate.service_id)
        elif candidate.experiment_id in held:
            held[candidate.experiment_id][candidate.kind] += 1
    assigned: dict[str, str] = {}
    lacking: dict[str, dict[Kind, int]] = {}
    for demand in demands:
        missing = {kind: count - held[demand.experiment_id][kind] for kind, count in demand.needed.items()}
        missing = {kind: count for kind, count in missing.items() if count > 0}
        short = {kind: count - len(idle[kind]) for kind, count in missing.items() if count > len(idle[kind])}
        if short:
            lacking[demand.experiment_id] = short
        if not short or demand.is_placed:
            for kind, count in missing.items():
                taken, idle[kind] = idle[kind][:count], idle[kind][count:]
                assigned |= dict.fromkeys(taken, demand.experiment_id)
    _share_surplus(demands, idle, held, lacking, assigned)
    return Placement(assigned, lacking)


def _share_surplus(
    demands: Sequence[Demand],
    idle: Mapping[Kind, list[str]],
    held: Mapping[str, Counter[Kind]],
    lacking: Mapping[str, Mapping[Kind, int]],
    assigned: dict[str, str],
) -> None:
    """Give idle rollouts to running experiments, the poorest first, less what those that wait will need."""
    takers = [demand.experiment_id for demand in demands if demand.is_placed]
    waiting = [demand for demand in demands if not demand.is_placed and demand.experiment_id in lacking]
    kept = sum(demand.needed.get(Kind.ROLLOUT, 0) for demand in waiting)
    if not takers:
        return
    shares = {taker: held[taker][Kind.ROLLOUT] for taker in takers}
    for service_id in idle[Kind.ROLLOUT][kept:]:
        poorest = min(takers, key=lambda taker: shares[taker])
        assigned[service_id] = poorest
        shares[poorest] += 1


def describe_lack(lacking: Mapping[Kind, int]) -> str:
    """Say what an experiment waits for, in one phrase."""
    parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in lacking.items()]
    return f"waiting for {' and '.join(parts)} to register"
