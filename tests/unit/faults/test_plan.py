"""The plan is read strictly: what is not known, or would have no effect, is refused with what is allowed."""

from pathlib import Path

import pytest

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.faults.sites import PLACES, Kind, Site

DOCUMENT = Path(__file__).parents[3] / "docs" / "faults.md"


def test_entries_are_a_site_a_kind_and_parameters() -> None:
    plan = parse_plan(
        "marks=/tmp/m; streams.forward kill in=rollout nth=3 phase=after times=1;\nclock.now skew seconds=-5"
    )

    first, second = plan.faults
    assert plan.marks == Path("/tmp/m")
    assert (first.site, first.kind, first.process, first.nth) == (Site.FORWARD, Kind.KILL, "rollout", 3)
    assert (first.phase, first.times) == ("after", 1)
    assert (second.kind, second.seconds) == (Kind.SKEW, -5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("streams.foward kill", "no site 'streams.foward'; did you mean streams.forward? (allowed: streams.claim"),
        ("streams.forward kil", "no kind 'kil'; did you mean kill? (allowed: kill, stall"),
        ("streams.forward kill nht=3", "no parameter 'nht'; did you mean nth?"),
        ("streams.forward disk_full", "knows no disk_full; it knows duplicate, kill, refuse, slow, stall"),
        ("engine.step stall", "stall needs seconds"),
        ("engine.step kill seconds=2", "kill has no seconds"),
        ("engine.step kill nth=0", "nth: Input should be greater than or equal to 1"),
        ("engine.step kill nth=1 probability=0.5", "exclude each other"),
        ("engine.step kill seed=3", "give both or neither"),
        ("engine.step kill in=engin", "in: Input should be 'gateway', 'rollout'"),
        ("engine.step kill phase=after", "has no phase=after"),
        ("engine.step kill path=/v1", "has no path"),
        ("engine.step kill slices=1", "has no slices"),
        ("engine.step slow seconds=-1", "only a clock's"),
        ("engine.step kill nth", "must be given once, as nth=VALUE"),
        ("engine.step kill nth=1 nth=2", "must be given once"),
        ("engine.step", "is not 'SITE KIND"),
        ("marks=/tmp/m", "names no fault"),
        ("engine.step kill while=slow", "add marks=DIRECTORY"),
        ("marks=/tmp/m; engine.step kill while=1-1", "while: String should match pattern"),
    ],
)
def test_a_bad_plan_is_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_plan(text)

    assert said in caught.value.detail


def test_the_document_lists_every_site_with_its_kinds() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {row.split("|")[1].strip(" `"): set(row.split("|")[3].strip().split(", ")) for row in rows}

    assert listed == {site.value: {kind.value for kind in place.kinds} for site, place in PLACES.items()}
