"""What an experiment waits for, and who has it, in one sentence. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.devices import counts_of, others, owners_of
from flotilla.services.gateway.scheduler.placement import Placement
from flotilla.shared.schemas.service import ServiceKind as Kind

PLURALS = {Kind.TRAINER: "trainers", Kind.ROLLOUT: "rollouts", Kind.REWARD: "rewards", Kind.SANDBOX: "sandboxes"}


def why_waiting(
    experiment_id: str, placement: Placement, demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> str | None:
    """Explain what an experiment waits for; None if it has all that it needs.

    Returns:
        Such as ``waiting for 1 rollout, which other-1a2b3c gives back``, or ``waiting for 1 trainer to register or to
        fall free: other-1a2b3c has 1 trainer``, also where that one ends and has not let go of it.
    """
    lacking = placement.lacking.get(experiment_id)
    if lacking:
        holders = _holders(experiment_id, lacking, demands, candidates)
        how = f"to register or to fall free: {'; '.join(holders)}" if holders else "to register"
        demand = next((demand for demand in demands if demand.experiment_id == experiment_id), None)
        facts = [] if demand is None else _facts(demand, lacking, demands, candidates)
        return f"waiting for {_counted(lacking, demand)} {how}{''.join(f'; {fact}' for fact in facts)}"
    coming = placement.coming.get(experiment_id)
    if coming:
        return f"waiting for {_counted(coming)}, {_givers(coming, candidates, placement)}"
    return None


def _counted(counts: Mapping[Kind, int], demand: Demand | None = None) -> str:
    phrases = []
    for kind, count in counts.items():
        phrase = f"{count} {kind.value if count == 1 else PLURALS[kind]}"
        if demand is not None:
            engine, devices = demand.engine_of(kind), demand.need_of(kind).count
            able = [] if not devices else [f"{devices} device{'' if devices == 1 else 's'}"]
            able += [] if engine is None else [f"an interpreter for {engine}"]
            phrase += f" with {' and '.join(able)}" if able else ""
        phrases.append(phrase)
    return " and ".join(phrases)


def _facts(
    demand: Demand, lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    """Describe the devices of a kind if a number is required, and idle services that lack only devices."""
    owners, facts = owners_of(demands, candidates), []
    for kind in lacking:
        if demand.need_of(kind).count and any(each.kind is kind for each in candidates):
            facts.append(f"the devices of the fleet's {PLURALS[kind]}: {counts_of(kind, candidates)}")
        idle = [each for each in candidates if each.kind is kind and each.experiment_id is None and not each.is_leaving]
        for service in idle:
            computing = sorted(others(service, owners) - {demand.experiment_id, ""})
            if demand.suits(service) and computing:
                facts.append(f"{' and '.join(computing)} computes on the devices of {service.service_id}")
    return facts


def _holders(
    experiment_id: str, lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    phrases = []
    for kind in lacking:
        for demand in demands:
            held = sum(c.kind is kind and c.experiment_id == demand.experiment_id for c in candidates)
            if held and demand.experiment_id != experiment_id:
                name = kind.value if held == 1 else PLURALS[kind]
                needed = demand.quotas[kind].min
                needs = "" if kind is Kind.TRAINER and needed == 1 else f" and needs {needed}"
                phrases.append(f"{demand.experiment_id} has {held} {name}{needs}")
    return phrases + _held_by_the_ending(lacking, demands, candidates)


def _held_by_the_ending(
    lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    """Name experiments that ask for nothing any more and still have what is lacking."""
    active = {demand.experiment_id for demand in demands}
    held = Counter((c.experiment_id, c.kind) for c in candidates if c.experiment_id and c.experiment_id not in active)
    phrases = []
    for experiment_id in sorted({holder for holder, _ in held if holder is not None}):
        counts = {kind: held[experiment_id, kind] for kind in lacking if held[experiment_id, kind]}
        if counts:
            phrases.append(f"{experiment_id} is ending and still has {_counted(counts)}")
    return phrases


def _givers(coming: Mapping[Kind, int], candidates: Sequence[Candidate], placement: Placement) -> str:
    givers = {
        candidate.experiment_id
        for candidate in candidates
        if candidate.kind in coming and candidate.experiment_id and candidate.service_id in placement.leaving
    }
    if not givers:
        return "on the way from an experiment that gave back or ended"
    return f"which {' and '.join(sorted(givers))} {'gives' if len(givers) == 1 else 'give'} back"
