"""What services report becomes findings on the experiment, which begin and end as events."""

from dataclasses import replace
from typing import Any

import pytest

from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.monitoring.health.checks import find
from flotilla.services.gateway.monitoring.health.evidence import StepFigures, facts_of
from flotilla.services.gateway.monitoring.health.measurements import restore_windows
from flotilla.services.gateway.monitoring.health.monitor import REFRESH_SECONDS, STORE_SECONDS, HealthMonitor
from flotilla.services.gateway.monitoring.health.window import LOOKED_AT, HealthWindow
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.reward import AuditConfig
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.health import GradingReport, SamplingReport
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, spec_document
from tests.unit.gateway.health.builders import FIGURES, SAMPLES, evidence, facts, graded


def report(groups: int, *, dead: int, session: str = "a", **fields: Any) -> GradingReport:
    """Make a report of groups of eight, of which so many are dead; all other rewards differ."""
    counts = {"groups": groups, "flat_groups": dead, "signalless_groups": dead, "filtered_groups": dead}
    samples = {"samples": 8 * groups, "scored": 8 * groups, "answered": 8 * groups, "repeated": 4 * groups}
    return GradingReport(session=session, last_reward=0.0, samples_seen=SAMPLES, **(counts | samples | fields))


def a_monitor(gateway: GatewayState, experiment: Experiment, clock: ManualClock) -> HealthMonitor:
    async def fail(component: str, cause: str) -> None:
        await gateway.commands.fail(experiment, component, cause)

    window = gateway.measurements.of(experiment).health
    return HealthMonitor(
        experiment, gateway.repository, gateway.events, clock, window, fail, gateway.commands.stage_pause
    )


async def events_of(gateway: GatewayState, experiment: Experiment) -> list[str]:
    found = [event.type for event in await gateway.store.events(experiment.id, after=0, limit=99)]
    return [each for each in found if each.startswith("health")]


async def test_a_finding_begins_goes_on_and_ends() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, step=4)
    monitor = a_monitor(gateway, experiment, clock)
    window = gateway.measurements.of(experiment).health
    for step in range(1, 5):
        window.add_step(step, FIGURES)

    window.add_grading(report(60, dead=60))
    await monitor.look()
    await monitor.look()
    (finding,) = gateway.commands.view(experiment).health
    assert (finding.check, finding.component, finding.since_step) == ("no_signal", "reward", 4)
    assert "60 of the last 60 groups taught nothing" in finding.seen
    assert finding.samples == SAMPLES
    assert await events_of(gateway, experiment) == ["health_finding"]

    window.add_grading(report(130, dead=130))
    clock.advance(REFRESH_SECONDS)
    await monitor.look()
    assert "70 of the last 70 groups" in gateway.commands.view(experiment).health[0].seen
    assert gateway.commands.view(experiment).health[0].at == finding.at

    window.add_grading(report(200, dead=140))
    await monitor.look()
    assert gateway.commands.view(experiment).health == ()
    assert await events_of(gateway, experiment) == ["health_finding", "health_recovered"]


async def test_a_finding_outlasts_a_gateway_that_has_seen_nothing_yet() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    gateway.measurements.of(experiment).health.add_grading(report(60, dead=60))
    await a_monitor(gateway, experiment, clock).look()
    window = gateway.measurements.of(experiment).health

    window.clear()
    await a_monitor(gateway, experiment, clock).look()

    assert [each.check for each in gateway.commands.view(experiment).health] == ["no_signal"]
    assert await events_of(gateway, experiment) == ["health_finding"]


@pytest.mark.parametrize(("bound", "is_failed"), [(None, False), (200, False), (60, True)])
async def test_groups_without_signal_end_the_experiment_at_the_bound_of_its_spec(
    bound: int | None, is_failed: bool
) -> None:
    clock, section = ManualClock(), {"max_groups_without_signal": bound}
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, spec=a_spec(health=section).model_dump(mode="json"))
    monitor = a_monitor(gateway, experiment, clock)
    gateway.measurements.of(experiment).health.add_grading(report(100, dead=100))

    await monitor.look()

    view = gateway.commands.view(experiment)
    assert (view.state is ExperimentState.FAILED) is is_failed
    if is_failed:
        assert view.problem is not None and view.problem.component == "reward"
        assert view.problem.cause.startswith(
            "100 groups in a row taught nothing, health.max_groups_without_signal is 60"
        )
        assert "no_signal" in view.problem.cause


async def test_what_failed_at_the_bound_counts_from_nothing_once_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check", lambda *_spec: None)
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_args, **_named: None)
    clock, section = ManualClock(), {"max_groups_without_signal": 60}
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, spec=a_spec(health=section).model_dump(mode="json"))
    monitor, window = a_monitor(gateway, experiment, clock), gateway.measurements.of(experiment).health
    window.add_grading(report(100, dead=100))
    await monitor.look()
    assert experiment.state is ExperimentState.FAILED
    await gateway.repository.update(experiment, final_ledger={"train": {}})

    await gateway.commands.act(experiment.id, Action.RESUME)
    await gateway.repository.update(experiment, state=ExperimentState.RUNNING)
    window.add_grading(report(110, dead=110))  # of a session that goes on
    window.add_grading(report(49, dead=49, session="b"))
    await monitor.look()

    assert experiment.is_active
    assert window.groups_without_signal == 59
    window.add_grading(report(50, dead=50, session="b"))
    await monitor.look()
    assert experiment.state is ExperimentState.FAILED


def test_a_step_that_trained_on_other_groups_starts_the_count_again() -> None:
    window = HealthWindow()
    window.add_grading(report(50, dead=50))
    window.add_step(1, FIGURES | {"groups/flat_fraction": 1.0})
    assert window.groups_without_signal == 50

    window.add_step(2, FIGURES | {"groups/flat_fraction": 0.75})
    assert window.groups_without_signal == 0


def test_the_window_looks_at_the_newest_groups_of_all_sessions() -> None:
    window = HealthWindow()
    for groups in range(10, 110, 10):
        window.add_grading(report(groups, dead=0))
        window.add_grading(report(groups, dead=groups, session="b"))
    window.add_grading(report(20, dead=20, session="c"))

    seen = window.evidence(facts())

    assert (seen.graded.groups, seen.graded.flat_groups) == (50, 40)
    assert seen.graded_ever.groups == 220


def test_what_rollouts_sampled_is_counted_by_session() -> None:
    window = HealthWindow()
    window.add_sampling(SamplingReport(session="a", prompts=30, doubled_special=30, special_token="<s>"))
    window.add_sampling(SamplingReport(session="a", prompts=60, doubled_special=60, special_token="<s>"))

    seen = window.evidence(facts())

    assert (seen.sampled.prompts, seen.sampled.doubled_special, seen.special_token) == (60, 60, "<s>")


def test_a_step_that_is_trained_again_replaces_those_after_it() -> None:
    window = HealthWindow()
    for step in (1, 2, 3, 2):
        window.add_step(step, {"grad_norm": float(step)})

    assert [each.step for each in window.evidence(facts()).steps] == [1, 2]


async def restarted(gateway: GatewayState, clock: ManualClock) -> tuple[GatewayState, Experiment]:
    """Start another gateway on what this one has stored."""
    assert isinstance(gateway.store, MemoryStore)
    after = a_gateway(gateway.store, clock)
    await after.repository.load()
    await restore_windows(after.repository, after.measurements, after.store)
    return after, after.repository.get("tiny-1")


async def test_a_gateway_that_starts_again_goes_on_with_what_was_seen() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, step=3)
    window, monitor = gateway.measurements.of(experiment).health, a_monitor(gateway, experiment, clock)
    window.add_grading(report(200, dead=100, highest_reward=1.0, lowest_reward=0.0, last_error="why"))
    window.add_sampling(SamplingReport(session="r", prompts=30, doubled_special=3, special_token="<s>"))
    for step in range(1, 4):
        window.add_step(step, FIGURES | {"time/step_seconds": 1.0})
    clock.advance(STORE_SECONDS)
    await monitor.look()

    after, again = await restarted(gateway, clock)

    found = after.measurements.of(again).health
    expected = window.evidence(facts())
    kept = [replace(step, values={name: step.values[name] for name in LOOKED_AT if name in step.values})
            for step in expected.steps]  # fmt: skip
    assert found.evidence(facts()) == replace(expected, steps=tuple(kept))
    for each in (window, found):
        each.add_grading(report(210, dead=110, highest_reward=1.0, lowest_reward=0.0))
        each.add_sampling(SamplingReport(session="r", prompts=31, doubled_special=4))
    assert found.evidence(facts()).graded == window.evidence(facts()).graded
    assert found.evidence(facts()).sampled == window.evidence(facts()).sampled


async def test_groups_of_before_a_restart_of_the_gateway_are_not_counted_as_groups_in_a_row() -> None:
    clock, section = ManualClock(), {"max_groups_without_signal": 60}
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, spec=a_spec(health=section).model_dump(mode="json"))
    window, monitor = gateway.measurements.of(experiment).health, a_monitor(gateway, experiment, clock)
    for step in range(1, 4):  # It filters fifty groups for each step, and trains.
        window.add_grading(report(58 * step, dead=50 * step))
        window.add_step(step, FIGURES)
    clock.advance(STORE_SECONDS)
    await monitor.look()

    after, again = await restarted(gateway, clock)
    after.measurements.of(again).health.add_grading(report(58 * 3 + 20, dead=50 * 3 + 20))
    await a_monitor(after, again, clock).look()

    assert again.is_active
    assert after.measurements.of(again).health.groups_without_signal == 20


async def test_an_experiment_that_was_started_again_takes_over_its_sessions_alone() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    window = gateway.measurements.of(experiment).health
    monitor = a_monitor(gateway, experiment, clock)
    window.add_grading(report(100, dead=100))
    clock.advance(STORE_SECONDS)
    await monitor.look()
    await gateway.repository.update(experiment, start_number=7)

    after, again = await restarted(gateway, clock)
    found = after.measurements.of(again).health
    found.add_grading(report(110, dead=110))

    assert found.groups_without_signal == 10
    assert found.evidence(facts()).graded.groups == 10


@pytest.mark.parametrize("without", ["", "correction/log_ppl_abs_diff"])
def test_no_check_looks_at_a_figure_that_is_not_kept(without: str) -> None:
    asked: set[str] = set()

    class Recorded(dict[str, float]):
        def __missing__(self, name: str) -> float:
            return FIGURES.get(name, 0.0)

        def __contains__(self, name: object) -> bool:
            asked.add(str(name))
            return name != without

        def get(self, name: str, default: float = 0.0) -> float:  # type: ignore[override]
            asked.add(name)
            return FIGURES.get(name, default)

    steps = tuple(StepFigures(number, Recorded()) for number in range(1, 7))
    find(evidence(steps=steps, graded=graded(flat_groups=40)))

    assert asked <= set(LOOKED_AT)
    assert asked >= set(LOOKED_AT) - {"correction/log_ppl_abs_diff", "ratio/approx_kl"}


AUDIT = {"components": [{"kind": "exact"}], "min_groups": 8}


async def audited_experiment(gateway: GatewayState, **audit: Any) -> Experiment:
    spec = a_spec(reward={"components": [{"kind": "exact"}], "audit": AUDIT | audit})
    return await add_experiment(gateway, spec=spec.model_dump(mode="json"), step=4, state=ExperimentState.RUNNING)


async def test_graders_that_disagree_pause_the_experiment_once_with_examples() -> None:
    clock, store = ManualClock(), MemoryStore()
    gateway = a_gateway(clock=clock, store=store)
    experiment = await audited_experiment(gateway)
    monitor, window = a_monitor(gateway, experiment, clock), gateway.measurements.of(experiment).health
    for step in range(1, 5):
        window.add_step(step, FIGURES)

    window.add_grading(report(60, dead=0, audited_groups=7, audit_disagreement=7.0, audited_samples=SAMPLES))
    await monitor.look()
    assert (experiment.state, gateway.commands.view(experiment).health) == (ExperimentState.RUNNING, ())

    disagreeing: dict[str, Any] = {"audited_groups": 9, "audit_disagreement": 9.0, "audit_higher": 9.0}
    disagreeing["audited_samples"] = SAMPLES
    window.add_grading(report(80, dead=0, **disagreeing))
    await monitor.look()
    await monitor.look()
    (finding,) = gateway.commands.view(experiment).health
    assert (finding.check, finding.samples, finding.since_step) == ("graders_disagree", SAMPLES, 4)
    assert experiment.state is ExperimentState.PAUSED
    assert await events_of(gateway, experiment) == ["health_finding"]

    restored = HealthWindow()
    restored.restore((await store.window(experiment.id, "health"))["window"], is_same_start=True)
    assert restored.audited(AuditConfig.model_validate(AUDIT)).audited_groups == 0
    await gateway.commands.act(experiment.id, Action.RESUME)
    window.add_grading(report(100, dead=0, **disagreeing))
    await monitor.look()
    assert (experiment.state, gateway.commands.view(experiment).health) == (ExperimentState.RUNNING, ())

    window.add_grading(report(120, dead=0, **(disagreeing | {"audited_groups": 17, "audit_disagreement": 17.0})))
    await monitor.look()
    assert experiment.state is ExperimentState.PAUSED


async def test_an_audit_that_does_not_pause_warns() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await audited_experiment(gateway, pause=False)
    window = gateway.measurements.of(experiment).health

    window.add_grading(report(60, dead=0, audited_groups=20, audit_disagreement=20.0))
    await a_monitor(gateway, experiment, clock).look()

    assert [each.check for each in gateway.commands.view(experiment).health] == ["graders_disagree"]
    assert experiment.state is ExperimentState.RUNNING


@pytest.mark.parametrize("rows", [{"from": "tiny-1"}, {"dump": "/runs/a"}])
def test_groups_of_another_run_may_be_of_other_weights(rows: dict[str, str]) -> None:
    spec = validate_spec(spec_document(data=rows))

    assert facts_of(spec).is_dump and not facts_of(a_spec()).is_dump
