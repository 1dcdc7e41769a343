"""A diagnosis names idle cores only where a number in the spec keeps the slow stage from using them."""

from typing import Any

import pytest

from flotilla.services.gateway.monitoring.bottleneck import Placed, advice_on_cores
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import a_spec, spec_document

TRAINER, ROLLOUT = Placed(ServiceKind.TRAINER, "one", 4), Placed(ServiceKind.ROLLOUT, "one", 4)
ELSEWHERE = Placed(ServiceKind.ROLLOUT, "two", 8)


@pytest.mark.parametrize(
    ("component", "trainer", "rollout", "services", "expected"),
    [
        ("trainer", 1, 1, [TRAINER, ROLLOUT], "2 of 4 cores of one compute nothing: set parallelism.threads to auto"),
        ("trainer", "auto", 1, [TRAINER, ROLLOUT], None),
        ("trainer", 3, 1, [TRAINER, ROLLOUT], None),
        ("generation", 3, 2, [TRAINER, ROLLOUT], None),
        (
            "generation",
            4,
            2,
            [TRAINER, ELSEWHERE],
            "6 of 8 cores of two compute nothing: set rollout.engine.threads to auto",
        ),
        (
            "admission",
            2,
            2,
            [TRAINER, ROLLOUT],
            "2 of 4 cores of one compute nothing: set parallelism.threads and rollout.engine.threads to auto",
        ),
        ("admission", "auto", "auto", [TRAINER, ROLLOUT], None),
        ("redis", 1, 1, [TRAINER, ROLLOUT], None),
    ],
)
def test_idle_cores_are_named_with_the_setting_that_uses_them(
    component: str, trainer: Any, rollout: Any, services: list[Placed], expected: str | None
) -> None:
    document = spec_document(parallelism={"threads": trainer})
    document["rollout"] = {**document["rollout"], "engine": {"threads": rollout}}

    assert advice_on_cores(component, a_spec(**document), services) == expected
