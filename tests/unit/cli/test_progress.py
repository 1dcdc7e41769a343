"""What the live view and the summary are made of."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from flotilla.cli import following
from flotilla.cli.points import Points
from flotilla.cli.progress import Pace, Progress, duration, live_line, live_view
from flotilla.cli.summary import summarise, summary_table
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView
from flotilla.shared.schemas.service import Capabilities, ObservedState, ServiceKind, ServiceView, WorkState
from flotilla.shared.streams.ledger import Ledger, TokenCounts
from tests.unit.cli.gateway import client_of


def a_view(**fields: Any) -> ExperimentView:
    defaults: dict[str, Any] = {
        "id": "trial-1",
        "name": "trial",
        "state": ExperimentState.RUNNING,
        "revision": 1,
        "spec": {},
        "created_at": "2026-01-01T00:00:00Z",
        "updated_at": "2026-01-01T00:00:00Z",
        "step": 2,
        "total_steps": 10,
        "policy_version": 2,
        "services": {"rollout": ("r1",)},
        "directory": "/data/trial-1",
    }
    return ExperimentView(**(defaults | fields))


def point(name: str, step: int, value: float) -> dict[str, Any]:
    return {"name": name, "step": step, "version": step, "value": value}


def a_rollout(service_id: str, **load: float) -> ServiceView:
    return ServiceView(
        service_id=service_id,
        kind=ServiceKind.ROLLOUT,
        address="http://127.0.0.1:9000",
        host="here",
        pid=1,
        capabilities=Capabilities(),
        registered_at="2026-01-01T00:00:00Z",
        lease_expires_in_seconds=10.0,
        is_draining=False,
        observed=ObservedState(load=load),
    )


class ScriptedGateway:
    """Serves one experiment; metrics in pages, each once."""

    def __init__(self, *pages: list[dict[str, Any]]) -> None:
        self.pages = list(pages)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/ledger"):
            return httpx.Response(200, json={"train": {"issued": 8, "balanced": True}, "evaluation": {}})
        if path.endswith("/metrics"):
            items = self.pages.pop(0) if self.pages else []
            return httpx.Response(200, json={"items": items, "next": "c"})
        if path == "/v1/services":
            mine, other = a_rollout("r1", tokens_per_second=120.0), a_rollout("r2", tokens_per_second=999.0)
            items = [each.model_dump(mode="json") for each in (mine, other)]
            return httpx.Response(200, json={"items": items, "next": None})
        return httpx.Response(200, content=a_view().model_dump_json())


async def refreshed(*pages: list[dict[str, Any]]) -> Progress:
    progress = Progress(a_view())
    async with client_of(ScriptedGateway(*pages)) as client:
        for _ in pages:
            await progress.refresh(client)
    return progress


async def test_series_are_read_on_and_only_own_rollouts_count() -> None:
    progress = await refreshed([point("reward/mean", 1, 0.5)], [point("reward/mean", 2, 0.7)])

    assert progress.series["reward/mean"] == [(1, 1, 0.5), (2, 2, 0.7)]
    assert progress.tokens_per_second() == 120.0
    assert progress.mean_of_last("reward/mean", 5) == 0.6


async def test_a_replayed_step_replaces_what_was_said_of_it() -> None:
    progress = await refreshed(
        [point("reward/mean", 1, 0.5), point("reward/mean", 2, 0.7)], [point("reward/mean", 2, 0.8)]
    )

    assert progress.series["reward/mean"] == [(1, 1, 0.5), (2, 2, 0.8)]


async def test_a_line_says_what_is_known() -> None:
    progress = await refreshed([point("evaluation/accuracy", 0, 0.25)])

    line = live_line(progress, elapsed=61, left=None)

    assert "1:01" in line
    assert "step 2/10" in line
    assert "held-out accuracy 0.250" in line


async def test_rewards_that_are_no_accuracy_are_not_called_one() -> None:
    progress = await refreshed(
        [point("evaluation/reward_mean", 0, 0.5), point("evaluation/accuracy", 0, 0.5)],
        [point("evaluation/reward_mean", 9, 3.5)],
    )
    summary = summarise(progress, wall_seconds=3.0, checkpoints=[], logs=None, plot=None)
    console = Console(width=100, file=io.StringIO())
    console.print(summary_table(summary, took="this command took"))

    assert "held-out reward 3.500" in live_line(progress, elapsed=1, left=None)
    assert (summary.accuracy_before, summary.accuracy_after, summary.accuracy) == (None, None, ())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.500 -> 3.500" in shown and "accuracy" not in shown


async def test_the_speed_is_not_zero_between_two_bursts() -> None:
    progress = Progress(a_view(), monotonic=iter([0.0, 10.0, 20.0, 100.0, 110.0]).__next__)
    speeds = []
    for tokens in (1000, 1500, 500, 500, 500):
        progress.services = [a_rollout("r1", tokens_per_second=0.0, generated_tokens=tokens)]
        progress._count_sampled()
        speeds.append(progress.tokens_per_second())

    # The engine was started again before the third look; after a minute without tokens the speed is zero.
    assert speeds == [0.0, 50.0, 50.0, 0.0, 0.0]


def test_time_left_follows_the_pace_from_a_second_before_the_first_step() -> None:
    pace = Pace(0)

    assert pace.seconds_left(a_view(step=0), 50.0) is None
    assert pace.seconds_left(a_view(step=1), 60.0) == 9.0
    assert pace.seconds_left(a_view(step=2), 63.0) == 16.0
    assert pace.seconds_left(a_view(step=10), 90.0) == 0.0


def test_steps_of_before_are_not_counted_into_the_pace() -> None:
    pace = Pace(5)

    assert pace.seconds_left(a_view(step=5), 50.0) is None
    assert pace.seconds_left(a_view(step=6), 60.0) == 4.0
    assert pace.seconds_left(a_view(step=7), 63.0) == 6.0
    assert Pace(10).seconds_left(a_view(step=10), 0.0) == 0.0


def test_a_pace_outlives_a_start_from_an_earlier_checkpoint() -> None:
    pace = Pace(5)

    assert pace.seconds_left(a_view(step=4), 50.0) is None
    assert pace.seconds_left(a_view(step=5), 60.0) == 5.0


def test_a_duration_that_is_not_known_is_a_dash() -> None:
    assert duration(None) == "-"


async def test_a_summary_holds_before_and_after() -> None:
    progress = await refreshed(
        [point("evaluation/accuracy", 0, 0.25), point("evaluation/accuracy", 9, 0.9), point("lag/max", 3, 1.0)]
    )

    summary = summarise(progress, wall_seconds=3.0, checkpoints=[], logs=None, plot=None)

    assert (summary.accuracy_before, summary.accuracy_after, summary.max_lag_trained) == (0.25, 0.9, 1.0)
    assert summary.checkpoint is None


async def test_a_summary_holds_the_successes_of_episodes() -> None:
    name = "evaluation/grader/environment/success/mean"
    progress = await refreshed([point(name, 0, 0.25), point(name, 9, 0.75)])

    summary = summarise(progress, wall_seconds=3.0, checkpoints=[], logs=None, plot=None)

    assert (summary.success_before, summary.success_after) == (0.25, 0.75)
    assert any("25.0% -> 75.0%" in line for line in shown_to_a_person(progress))


async def test_successes_of_episodes_without_an_environment_are_those_with_the_reward_one() -> None:
    points = [point("evaluation/accuracy", step, value) for step, value in ((0, 0.125), (9, 0.75))]
    turns = point("evaluation/grader/episode/turns/mean", 0, 1.5)

    summaries = [
        summarise(await refreshed(each), wall_seconds=3.0, checkpoints=[], logs=None, plot=None)
        for each in (points, [*points, turns])
    ]

    assert [(each.success_before, each.success_after) for each in summaries] == [(None, None), (0.125, 0.75)]


def shown_to_a_person(progress: Progress, **more: Any) -> list[str]:
    """Lay a summary out as a terminal shows it, without the frame."""
    summary = summarise(progress, wall_seconds=3.0, checkpoints=[], logs=None, plot=None, **more)
    console = Console(width=200, file=io.StringIO())
    console.print(summary_table(summary, took="this command took"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [" ".join(line.strip("│ ").split()) for line in lines]


async def test_a_summary_says_why_groups_were_not_trained_and_how_long_they_were() -> None:
    progress = await refreshed([])
    progress.ledger = Ledger(
        dropped={"stale": 4},
        failed={"unheard_of": 2},
        lengths={"dropped": {"stale": {256: 3, 512: 1}}, "failed": {"unheard_of": {0: 1, 32: 1}}},
    )

    lines = shown_to_a_person(progress)

    stale = "older than asynchrony.max_lag (stale); groups by sampled tokens: 3 up to 256, 1 up to 512"
    assert f"dropped │ 4: {stale}" in lines
    assert "failed │ 2: unheard_of; groups by sampled tokens: 1 up to 0, 1 up to 32" in lines


async def test_a_summary_of_a_run_that_failed_begins_with_why_and_shows_nothing_that_is_not_there() -> None:
    progress = await refreshed([point("evaluation/accuracy", 0, 0.0)])
    progress.view = a_view(problem={"component": "reward", "cause": "no answer", "at": "2026-01-01T00:00:00Z"})

    lines = shown_to_a_person(progress, run=Path("runs/other"))

    assert lines[0] == "other (trial-1): running"
    assert lines[2] == "problem │ reward: no answer"
    assert "held-out accuracy │ 0.0%" in lines
    assert not any("lag" in line or line.endswith(("-", "- versions")) for line in lines)


async def test_a_summary_says_what_its_reward_is_the_mean_of() -> None:
    progress = await refreshed([point("reward/mean", step, step / 10) for step in range(1, 8)])
    progress.ledger = Ledger(filtered={"zero_spread": 3}, trained=4, issued=7)
    progress.series["lag/max"] = Points([(1, 1, 1.0)])

    lines = shown_to_a_person(progress)

    assert "training reward │ 0.500, mean of the last 5 steps, of the groups that were not filtered" in lines
    assert "largest lag trained │ 1 version" in lines
    assert "filtered │ 3: all answers had the same reward, which teaches nothing (zero_spread)" in lines


async def test_a_job_without_rewards_shows_its_losses_and_no_lag() -> None:
    losses = [point("loss/total", step, 1 / step) for step in range(1, 5)]
    held_out = [point("held_out/loss", 0, 2.0), point("held_out/loss", 4, 0.5)]
    progress = await refreshed([*losses, *held_out])
    progress.ledger = Ledger(tokens=TokenCounts(generated=9, trained=9))

    lines = shown_to_a_person(progress)

    assert {"held-out loss │ 2.000 -> 0.500", "tokens │ 9 read, 9 trained"} < set(lines)
    assert "training loss │ 0.521, mean of the last 4 steps" in lines
    assert not any("reward" in line or "lag" in line for line in lines)
    line = live_line(progress, 3.0, None)
    assert "loss 0.521 (last 4) held-out loss 0.500 queues" in line and "lag" not in line


async def test_a_line_says_a_finding_once_that_ended_the_experiment() -> None:
    progress = await refreshed([])
    finding = {"check": "no_signal", "component": "reward", "since_step": 0, "at": "", "seen": "flat", "advice": "x"}
    problem = {"component": "reward", "cause": "9 groups: no_signal, flat", "at": "2026-01-01T00:00:00Z"}
    progress.view = a_view(health=(finding,))
    assert live_line(progress, 1, None).count("no_signal") == 1

    progress.view = a_view(health=(finding,), problem=problem)
    assert live_line(progress, 1, None).count("no_signal") == 1


async def test_one_evaluation_is_no_improvement() -> None:
    progress = await refreshed([point("evaluation/accuracy", 0, 0.25)])

    summary = summarise(progress, wall_seconds=3.0, checkpoints=[], logs=None, plot=None)

    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, None)


@pytest.mark.parametrize(("left", "pause"), [(None, 0.5), (60.0, 2.0), (6.0, 1.0), (1.0, 0.5), (0.0, 0.5)])
def test_a_gateway_is_asked_as_often_as_is_shown_but_where_something_is_near(left: float | None, pause: float) -> None:
    assert following.pause_before_the_next(left, following.LINE_SECONDS) == pause


async def test_following_as_json_writes_a_line_per_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(following, "REFRESH_SECONDS", 0.0)
    states = iter([(1, "running"), (1, "running"), (2, "completed")])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/experiments/trial-1":
            step, state = next(states)
            return httpx.Response(200, content=a_view(step=step, state=state).model_dump_json())
        return ScriptedGateway([point("reward/mean", 1, 0.5)])(request)

    async with client_of(answer) as client:
        await following.follow_as_json(Progress(a_view()), client)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["state"], line["reward"]) for line in lines] == [
        (1, "running", 0.5),
        (2, "completed", 0.5),
    ]


async def test_an_evaluation_alone_says_what_was_answered_and_all_that_was_found() -> None:
    progress = await refreshed(
        [
            point("evaluation/accuracy", 0, 0.25),
            point("evaluation/pass@4", 0, 0.5),
            point("evaluation/num_graded_rows", 0, 7),
            point("evaluation/num_rows", 0, 9),
            point("evaluation/lag_versions", 0, 0),
        ]
    )
    progress.view = a_view(step=0, total_steps=0, policy_version=0)
    progress.ledger = Ledger(issued=9, outstanding=2, trained=7, tokens=TokenCounts(generated=70))

    assert "7 of 9 problems answered" in live_line(progress, elapsed=1, left=None)
    summary = summarise(progress, wall_seconds=3.0, checkpoints=[], logs=None, plot=None)
    counts = {"num_graded_rows": 7.0, "num_rows": 9.0}
    assert summary.evaluation == {"accuracy": 0.25, "lag_versions": 0.0, "pass@4": 0.5} | counts
    shown = shown_to_a_person(progress)
    assert {"accuracy │ 25.0% of 7 of 9 rows", "pass@4 │ 50.0%", "tokens │ 70 in the answers"} <= set(shown)
    assert any("9 groups issued = 7 evaluated" in line for line in shown)
    assert not any(line.startswith(("steps", "held-out", "lag_versions")) for line in shown)


@pytest.mark.parametrize(
    ("graded", "live", "last"),
    [
        (64, "held-out accuracy 0.500 of 64 rows", "0.0% -> 50.0% of 64 rows"),
        (43, "held-out accuracy 0.500 of 43 of 64 rows", "0.0% of 64 rows -> 50.0% of 43 of 64 rows"),
    ],
)
async def test_an_accuracy_says_of_how_many_rows_it_is(graded: int, live: str, last: str) -> None:
    points = [("accuracy", 0, 0.0), ("num_graded_rows", 0, 64), ("num_rows", 0, 64), ("accuracy", 3, 0.5)]
    points += [("num_graded_rows", 3, graded), ("num_rows", 3, 64)]
    progress = await refreshed([point(f"evaluation/{name}", step, value) for name, step, value in points])

    assert live in live_line(progress, elapsed=1, left=None)
    console = Console(file=io.StringIO(), width=300)
    console.print(live_view(progress, elapsed=1, left=None))
    assert " ".join(live.split()[2:]) in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"held-out accuracy │ {last}" in shown_to_a_person(progress)
    summary = summarise(progress, wall_seconds=1, checkpoints=(), logs=None, plot=None)
    assert summary.document()["held_out"] == {
        "metric": "accuracy",
        "points": [
            {"step": 0, "version": 0, "value": 0.0, "graded_rows": 64, "rows": 64},
            {"step": 3, "version": 3, "value": 0.5, "graded_rows": graded, "rows": 64},
        ],
    }
    assert following.facts_of(progress)["held_out"] == {
        "metric": "accuracy",
        "value": 0.5,
        "graded_rows": graded,
        "rows": 64,
    }


def test_a_line_says_what_a_run_waits_for_before_its_first_step() -> None:
    services = [a_rollout("r1"), a_rollout("r2"), a_rollout("r3")]
    loading, done = (ObservedState(state=state) for state in (WorkState.STARTING, WorkState.RUNNING))
    services = [each.model_copy(update={"observed": loading}) for each in services[:2]]
    services.append(a_rollout("r3").model_copy(update={"observed": done}))
    starting = Progress(a_view(state=ExperimentState.STARTING, step=0), services=services)
    evaluating = Progress(a_view(step=0), evaluation=Ledger(issued=512, outstanding=500))
    troubled = Progress(
        a_view(
            state=ExperimentState.STARTING, step=0, problem={"component": "rollout", "cause": "no memory", "at": "x"}
        )
    )

    assert "waits for 2 rollout to load" in live_line(starting, 1, None)
    assert "evaluates before the first step: 12 of 512 problems answered" in live_line(evaluating, 1, None)
    assert "waits" not in live_line(troubled, 1, None)
    assert "evaluates" not in live_line(Progress(a_view(), evaluation=Ledger(issued=512, outstanding=500)), 1, None)
