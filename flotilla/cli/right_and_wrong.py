"""An answer of the greatest and one of the smallest reward, of an evaluation or of a step: to see what figures mean."""

from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.cli.progress import Progress
from flotilla.cli.sample_text import in_a_line
from flotilla.connection import Source
from flotilla.shared.errors import FlotillaError

SECONDS = 5.0


async def read_right_and_wrong(client: Source, experiment_id: str, step: int, kind: str) -> list[dict[str, Any]]:
    """Read the best and the worst sample of a step; one where both have the same reward, none where none is kept."""
    found: list[dict[str, Any]] = []
    for order in ("best", "worst"):
        params = {"step": step, "kind": kind, "order": order, "limit": 1}
        try:
            path = f"/v1/experiments/{experiment_id}/samples"
            page = await client.call("GET", path, params=params, deadline_seconds=SECONDS)
        except FlotillaError:
            return []  # they are for looking at: what is shown beside them matters more
        found += [item for item in page["items"] if item["reward"] not in [each["reward"] for each in found]]
    return found


async def read_last(client: Source, progress: Progress) -> list[dict[str, Any]]:
    """Read those of the last evaluation; of the last step where nothing was evaluated."""
    evaluated = progress.held_out.points
    step, kind = (evaluated[-1][0], "evaluation") if evaluated else (progress.view.step, "trained")
    return await read_right_and_wrong(client, progress.view.id, step, kind)


def name_of(sample: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """Call a sample the better or the worse of two; with another scale than 0 and 1 neither is right or wrong."""
    if {each["reward"] for each in samples} <= {0.0, 1.0}:
        return "right" if sample["reward"] else "wrong"
    return "best" if sample is samples[0] else "worst"


def lines_of(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Write each sample in a line, with what it is called."""
    return [(name_of(sample, samples), in_a_line(sample)) for sample in samples]
