"""The samples of an evaluation: into a file, and one right and one wrong answer to look at."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flotilla.services.gateway.records.repository import Experiment
from flotilla.shared.samples.folder import SampleFolder, evaluation_name
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.trajectory import Group, Trajectory

log = logging.getLogger(__name__)

MOST_CHARACTERS = 400


class EvaluationKeeper:
    """Keeps the answers of one experiment's evaluations, if its spec keeps samples."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._folder: SampleFolder | None = None

    async def keep(self, groups: Sequence[Group], *, version: int, step: int) -> None:
        """Write the answers of an evaluation; what cannot be written is said and left out."""
        config = self._experiment.spec.samples
        if config is None or not groups:
            return
        if self._folder is None:
            # One for all evaluations: it knows how much it has written, and need not look at all files each time.
            self._folder = SampleFolder(Path(self._experiment.record.directory), config)
        ordered = sorted(groups, key=lambda group: group.task.row)
        kept = [KeptGroup(group, SampleKind.EVALUATION) for group in ordered]
        file = SampleFile(evaluation_name(version), kept, step, version, {"num_groups": len(kept)})
        try:
            await asyncio.to_thread(self._folder.write, file)
        except OSError as error:
            facts = {"experiment_id": self._experiment.id, "version": version, "error": repr(error)}
            log.warning("samples of an evaluation cannot be kept", extra=facts)


def right_and_wrong(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Choose an answer of the greatest and one of the smallest reward, shortened; one alone where all are the same."""
    scored = [
        (t.reward, group, t)
        for group in sorted(groups, key=lambda group: group.task.row)
        for t in group.trajectories
        if t.reward is not None
    ]
    if not scored:
        return []
    best, worst = max(scored, key=lambda each: each[0]), min(scored, key=lambda each: each[0])
    return [
        {
            "row": group.task.row,
            "question": _shortened(group.task.messages[-1].content if group.task.messages else group.prompt),
            "prompt": _shortened(group.prompt),
            "completion": _shortened(trajectory.text),
            "written": _shortened(_written(trajectory)),
            "label": group.task.label,
            "reward": reward,
            "reason": trajectory.reason,
        }
        for reward, group, trajectory in ([best] if best[0] == worst[0] else [best, worst])
    ]


def _written(trajectory: Trajectory) -> str:
    """Join what was written in all turns."""
    turns = trajectory.turns
    return " | ".join(turn.text for turn in turns) if len(turns) > 1 else trajectory.text


def _shortened(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
