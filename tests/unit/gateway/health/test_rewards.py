"""Two graders that disagree more than a bound allows, and not by chance, are named; by chance they are not."""

from math import comb

import pytest

from flotilla.services.gateway.monitoring.health.evidence import Audited
from flotilla.services.gateway.monitoring.health.rewards import audit_missing, graders_disagree, lower_bound
from flotilla.shared.config.sections.reward import AuditConfig
from tests.unit.gateway.health.builders import SAMPLES, evidence, facts

AUDIT = AuditConfig.model_validate({"components": [{"kind": "exact"}], "bound": 0.1, "min_groups": 8})


@pytest.mark.parametrize(
    ("groups", "disagreement", "is_seen"),
    [(8, 4.0, True), (7, 7.0, False), (8, 1.0, False), (64, 8.0, False), (64, 14.0, True), (64, 0.0, False)],
)
def test_what_chance_can_explain_is_no_finding(groups: int, disagreement: float, is_seen: bool) -> None:
    audited = Audited(groups, 0, disagreement, disagreement)

    seen = graders_disagree(evidence(facts=facts(audit=AUDIT), audited=audited, audited_samples=SAMPLES))

    assert (seen is not None) is is_seen
    if seen is not None:
        assert seen.samples == SAMPLES
        assert seen.figures["disagreement_at_least"] > AUDIT.bound


@pytest.mark.parametrize(
    ("audited", "is_seen"),
    [
        (Audited(0, 8, audit_missing=8.0), True),
        (Audited(0, 7, audit_missing=7.0), False),
        (Audited(16, 0, audit_missing=8.0), True),
        (Audited(64, 1, audit_missing=1.0), False),
    ],
)
def test_second_grades_that_are_missing_are_a_finding(audited: Audited, is_seen: bool) -> None:
    seen = audit_missing(evidence(facts=facts(audit=AUDIT), audited=audited, last_audit_error="audit: TimeoutError()"))

    assert (seen is not None) is is_seen
    if seen is not None:
        assert "TimeoutError" in seen.text


def test_without_an_audit_nothing_is_concluded() -> None:
    assert graders_disagree(evidence(audited=Audited(64, 0, 64.0, 64.0))) is None


@pytest.mark.parametrize("true", [0.05, 0.1, 0.3])
def test_the_bound_holds_as_often_as_it_says(true: float) -> None:
    count = 40
    exceeded = [
        comb(count, ones) * true**ones * (1 - true) ** (count - ones)
        for ones in range(count + 1)
        if lower_bound(ones / count, count, 0.95) > true
    ]

    assert sum(exceeded) <= 0.08, "Wilson's bound of a binomial share is near its level, not below it everywhere"
