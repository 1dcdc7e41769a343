"""A data source whose groups teach nothing while others do is told of, until no rows are taken of it."""

import json

from flotilla.services.gateway.monitoring.health.evidence import SourceCounts
from flotilla.services.gateway.monitoring.health.sources import MOST_PARTS, PART_GROUPS, SourceSeries, dead_source
from flotilla.services.gateway.monitoring.health.window import HealthWindow
from flotilla.shared.config.sections.health import HealthConfig
from flotilla.shared.schemas.health import GradingReport, SourceReport
from tests.unit.gateway.health.builders import SAMPLES, evidence, facts

WANTED = 48
DEAD = SourceCounts(WANTED, WANTED, SAMPLES[1])
ALIVE = SourceCounts(WANTED, 6)


def report(session: str = "a", **sources: tuple[int, int]) -> GradingReport:
    found = {
        name: SourceReport(groups=groups, signalless_groups=dead, sample=SAMPLES[1])
        for name, (groups, dead) in sources.items()
    }
    return GradingReport(session=session, sources=found)


def restored(window: HealthWindow) -> HealthWindow:
    found = HealthWindow()
    found.restore(json.loads(json.dumps(window.to_window())), is_same_start=True)
    return found


def test_the_dead_one_of_two_is_named_with_a_sample() -> None:
    seen = dead_source(evidence(sources={"easy": DEAD, "hard": ALIVE}))

    assert seen is not None
    assert seen.subject == "easy" and seen.sample == SAMPLES[1]
    assert "48 of the last 48 groups of the data source easy taught nothing" in seen.text


def test_where_all_are_dead_or_too_few_groups_are_known_none_is_named() -> None:
    assert dead_source(evidence(sources={"easy": DEAD, "hard": DEAD})) is None
    assert dead_source(evidence(sources={"easy": SourceCounts(47, 47), "hard": ALIVE})) is None
    assert dead_source(evidence(sources={"easy": DEAD})) is None
    assert dead_source(evidence(sources={"easy": ALIVE, "hard": ALIVE})) is None
    assert dead_source(evidence(sources={"easy": DEAD, "rare": SourceCounts(3, 3)})) is None, "no other one teaches"


def test_it_takes_no_more_groups_of_a_source_than_the_spec_says_however_large_a_step_is() -> None:
    of_large_steps = facts(groups_per_step=512)

    assert dead_source(evidence(facts=of_large_steps, sources={"easy": DEAD, "hard": ALIVE})) is not None


def test_a_source_of_which_each_report_has_one_group_is_known_as_well() -> None:
    window, wanted = HealthWindow(), 10 * MOST_PARTS
    for number in range(1, 2 * wanted):
        window.add_grading(report(rare=(number, number), other=(number, 0)))
    of_many = facts(thresholds=HealthConfig(min_groups=wanted))

    for found in (window, restored(window)):
        seen = dead_source(found.evidence(of_many))
        assert seen is not None and seen.subject == "rare"


def test_one_of_which_no_rows_are_taken_any_more_is_no_finding() -> None:
    seen = evidence(facts=facts(left_out=frozenset({"easy"})), sources={"easy": DEAD, "hard": ALIVE, "more": ALIVE})

    assert dead_source(seen) is None


def test_groups_are_counted_by_session_and_the_newest_are_looked_at() -> None:
    series = SourceSeries()
    series.add(report(easy=(40, 0), hard=(40, 40)))
    series.add(report(easy=(90, 50)))
    series.add(report(session="b", easy=(10, 10)))

    assert series.counts(WANTED)["easy"] == SourceCounts(60, 60, SAMPLES[1])
    assert series.counts(61)["easy"] == SourceCounts(100, 60, SAMPLES[1])
    assert series.counts(WANTED)["hard"] == SourceCounts(40, 40, SAMPLES[1])


def test_a_gateway_that_starts_again_goes_on_and_counts_nothing_twice() -> None:
    before, after = SourceSeries(), SourceSeries()
    before.add(report(easy=(40, 30)))
    after.restore(before.to_window(), is_same_start=True)
    after.add(report(easy=(50, 40)))

    assert after.counts(WANTED)["easy"] == SourceCounts(50, 40, SAMPLES[1])


def test_another_start_takes_over_sessions_alone() -> None:
    before, after = SourceSeries(), SourceSeries()
    before.add(report(easy=(40, 30)))
    after.restore(before.to_window(), is_same_start=False)
    after.add(report(easy=(50, 40)))

    assert after.counts(WANTED)["easy"] == SourceCounts(10, 10, SAMPLES[1])


def test_what_is_kept_of_a_source_is_bounded() -> None:
    series = SourceSeries()
    for number in range(1, 3 * MOST_PARTS * PART_GROUPS):
        series.add(report(easy=(number, 0)))

    assert series.counts(100 * MOST_PARTS)["easy"].groups <= MOST_PARTS * PART_GROUPS
