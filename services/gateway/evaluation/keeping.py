"""The samples of an evaluation: into a file, and one right and one wrong answer to look at."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flotilla.services.gateway.records.repository import Experiment
from flotilla.shared.samples.folder import SampleFolder, evaluation_name
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.trajectory import Group

log = logging.getLogger(__name__)

MOST_CHARACTERS = 400


async def keep_evaluation(experiment: Experiment, groups: Sequence[Group], *, version: int, step: int) -> None:
    """Write the answers of an evaluation, if the spec keeps samples; what cannot be written is said and left out."""
    config = experiment.spec.samples
    if config is None or not groups:
        return
    ordered = sorted(groups, key=lambda group: group.task.row)
    kept = [KeptGroup(group, SampleKind.EVALUATION) for group in ordered]
    file = SampleFile(evaluation_name(version), kept, step, version, {"num_groups": len(kept)})
    folder = SampleFolder(Path(experiment.record.directory), config)
    try:
        await asyncio.to_thread(folder.write, file)
    except OSError as error:
        facts = {"experiment_id": experiment.id, "version": version, "error": repr(error)}
        log.warning("samples of an evaluation cannot be written", extra=facts)


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
            "prompt": _shortened(group.prompt),
            "completion": _shortened(trajectory.text),
            "label": group.task.label,
            "reward": reward,
            "reason": trajectory.reason,
        }
        for reward, group, trajectory in ([best] if best[0] == worst[0] else [best, worst])
    ]


def _shortened(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
