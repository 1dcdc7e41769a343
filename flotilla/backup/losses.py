"""What would be lost if the parts of a backup were put together: said before anything is written. Pure."""

from dataclasses import dataclass

from flotilla.backup.keys import PlaneSummary


@dataclass(frozen=True, slots=True)
class Parts:
    """What each part of a backup says of an experiment's training.

    Attributes:
        step: the newest step that the database knows.
        plane: what the data plane knew; None: nothing of it is there.
        checkpoint: step of the newest whole checkpoint; 0: there is none.
        is_started: whether the experiment has ever trained.
    """

    step: int
    plane: PlaneSummary | None
    checkpoint: int
    is_started: bool


def losses_of(parts: Parts) -> list[str]:
    """Say what would be lost, by the rule of ``shared/checkpoints/lineage.py``; empty: nothing."""
    if not parts.is_started:
        return []
    plane = parts.plane
    end = parts.checkpoint
    for step in plane.plans if plane is not None else ():
        if step == end + 1:
            end = step
    known = max(parts.step, plane.committed if plane is not None else 0, parts.checkpoint)
    found = []
    if plane is None:
        found.append("nothing of the data plane is there: every group that was not trained is lost, and its counts")
    if end < known:
        steps = f"step {known} is" if known == end + 1 else f"steps {end + 1} to {known} are"
        since = f"the checkpoint of step {parts.checkpoint}" if parts.checkpoint else "the model, without a checkpoint"
        found.append(f"{steps} trained again, from {since}; what they trained on counts as lost_with_checkpoint")
    return found
