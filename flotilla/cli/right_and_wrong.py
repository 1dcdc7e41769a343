"""An answer of the greatest and one of the smallest reward, of an evaluation or of a step: to see what figures mean."""

from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.cli.progress import Progress
from flotilla.cli.sample_text import Sample, in_a_line, line_of
from flotilla.cli.stored import Source
from flotilla.shared.errors import FlotillaError
from flotilla.shared.samples.query import SampleOrder
from flotilla.shared.schemas.experiment import ExperimentView
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.samples import SampleView

SECONDS = 5.0


async def read_right_and_wrong(client: Source, view: ExperimentView, step: int, kind: SampleKind) -> list[SampleView]:
    """Read the best and the worst sample of a step; one where both have the same reward, none where none is kept."""
    found: list[SampleView] = []
    for order in (SampleOrder.BEST, SampleOrder.WORST):
        try:
            samples = await client.with_deadline(SECONDS).samples(view, step=step, kinds=[kind], order=order, limit=1)
        except FlotillaError:
            return []  # they are for looking at: what is shown beside them matters more
        found += [sample for sample in samples if sample.reward not in [each.reward for each in found]]
    return found


async def read_last(client: Source, progress: Progress) -> list[SampleView]:
    """Read those of the last evaluation; of the last step where nothing was evaluated."""
    evaluated = progress.held_out.points
    step, kind = (evaluated[-1][0], SampleKind.EVALUATION) if evaluated else (progress.view.step, SampleKind.TRAINED)
    return await read_right_and_wrong(client, progress.view, step, kind)


def lines_of_answers(answers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Print the examples in an evaluation's event, a labelled line each."""
    names = _names([each["reward"] for each in answers])
    return [
        (name, line_of(_question(each), each.get("written", each["completion"]), each["reward"], each["label"]))
        for name, each in zip(names, answers, strict=True)
    ]


def _question(told: Mapping[str, Any]) -> str:
    return str(told.get("question", told["prompt"]))


def _names(rewards: Sequence[float | None]) -> list[str]:
    """Call each the better or the worse of two; with another scale than 0 and 1 neither is right or wrong."""
    if {*rewards} <= {0.0, 1.0}:
        return ["right" if reward else "wrong" for reward in rewards]
    return ["best" if number == 0 else "worst" for number in range(len(rewards))]


def lines_of(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Write each sample in a line, with what it is called."""
    names = _names([sample.reward for sample in samples])
    return [(name, in_a_line(sample)) for name, sample in zip(names, samples, strict=True)]
