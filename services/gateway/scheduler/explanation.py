"""What an experiment waits for, and who has it, in one sentence. Pure."""

from collections.abc import Mapping, Sequence

from services.gateway.scheduler.placement import Candidate, Demand, Placement
from shared.schemas.service import ServiceKind as Kind

PLURALS = {Kind.TRAINER: "trainers", Kind.ROLLOUT: "rollouts", Kind.REWARD: "rewards", Kind.SANDBOX: "sandboxes"}


def why_waiting(
    experiment_id: str, placement: Placement, demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> str | None:
    """Explain what an experiment waits for; None if it has all that it needs.

    Returns:
        Such as ``waiting for 1 rollout, which other-1a2b3c gives back``, or ``waiting for 1 trainer to register or to
        fall free: other-1a2b3c has 1``.
    """
    lacking = placement.lacking.get(experiment_id)
    if lacking:
        holders = _holders(experiment_id, lacking, demands, candidates)
        how = f"to register or to fall free: {'; '.join(holders)}" if holders else "to register"
        engine = next((demand.engine for demand in demands if demand.experiment_id == experiment_id), None)
        able = f" with an interpreter for {engine}" if engine is not None and Kind.ROLLOUT in lacking else ""
        return f"waiting for {_counted(lacking)}{able} {how}"
    coming = placement.coming.get(experiment_id)
    if coming:
        return f"waiting for {_counted(coming)}, {_givers(coming, candidates, placement)}"
    return None


def _counted(counts: Mapping[Kind, int]) -> str:
    return " and ".join(f"{count} {kind.value if count == 1 else PLURALS[kind]}" for kind, count in counts.items())


def _holders(
    experiment_id: str, lacking: Mapping[Kind, int], demands: Sequence[Demand], candidates: Sequence[Candidate]
) -> list[str]:
    phrases = []
    for kind in lacking:
        for demand in demands:
            held = sum(c.kind is kind and c.experiment_id == demand.experiment_id for c in candidates)
            if held and demand.experiment_id != experiment_id:
                name = kind.value if held == 1 else PLURALS[kind]
                needs = "" if kind is Kind.TRAINER else f" and needs {demand.quotas[kind].min}"
                phrases.append(f"{demand.experiment_id} has {held} {name}{needs}")
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
