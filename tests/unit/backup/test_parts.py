"""What a restore would lose, by the ages of a backup's parts."""

from dataclasses import replace

import pytest

from flotilla.backup.keys import PlaneSummary
from flotilla.backup.parts import Parts, losses_of

EQUAL = Parts(step=6, plane=PlaneSummary(committed=4, plans=(5, 6)), checkpoint=4, is_started=True)
"""Six steps, a checkpoint after each fourth, and the plans of those since."""


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (EQUAL, None),
        (replace(EQUAL, step=2), None),
        (replace(EQUAL, plane=PlaneSummary(committed=0, plans=(1, 2)), step=2), None),
        (replace(EQUAL, checkpoint=8), None),
        (replace(EQUAL, checkpoint=0), "steps 1 to 6 are trained again, from the model"),
        (replace(EQUAL, checkpoint=3), "steps 4 to 6 are trained again, from the checkpoint of step 3"),
        (
            replace(EQUAL, plane=PlaneSummary(committed=4, plans=(5,))),
            "step 6 is trained again, from the checkpoint of step 4",
        ),
        (replace(EQUAL, plane=None), "nothing of the data plane is there"),
        (Parts(step=0, plane=None, checkpoint=0, is_started=False), None),
    ],
    ids=lambda each: "",
)
def test_only_steps_that_neither_checkpoint_nor_plans_lead_to_are_lost(parts: Parts, words: str | None) -> None:
    losses = losses_of(parts)

    assert losses == [] if words is None else words in losses[0] + losses[-1]
