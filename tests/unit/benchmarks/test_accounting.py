"""What the benchmarks conclude from a run: accounts, deciles, and the report's words."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import lines_of, quantile
from benchmarks.streams import median_ratio
from flotilla.shared.errors import NotFound
from flotilla.shared.streams.intervals import IntervalSet
from tests.survival.accounting import Account, account, deciles_of, lag_of, newest_checkpoint
from tests.survival.report import markdown
from tests.unit.gateway.builders import a_spec

ROWS = 10


class Gateway:
    """Answers as the gateway of one stopped experiment does."""

    def __init__(self, directory: Path, ledger: dict[str, Any], plans: dict[int, dict[str, Any]]) -> None:
        spec = a_spec(asynchrony={"staleness_threshold": 1.0, "max_lag": 2}).model_dump(mode="json")
        self.answers: dict[str, Any] = {
            "/v1/experiments/e": {"spec": spec, "directory": str(directory)},
            "/v1/experiments/e/ledger": {"train": ledger},
            **{f"/v1/experiments/e/steps/{step}": plan for step, plan in plans.items()},
        }

    async def call(self, _method: str, path: str, *, deadline_seconds: float) -> Any:
        if path not in self.answers:
            raise NotFound(f"no {path}")
        return self.answers[path]


def a_run(directory: Path, **ledger: Any) -> Gateway:
    """Make what three steps of four groups leave behind: of 14 issued groups one was dropped and one was under way."""
    (directory / "checkpoints" / "step-3").mkdir(parents=True)
    state = {"step": 3, "trained": [[0, 5], [7, 12]]}
    (directory / "checkpoints" / "step-3" / "state.json").write_text(json.dumps(state))
    notes = [f"{group} {10 * (group % ROWS + 1)}\n" for group in range(14) for _ in range(2)]
    (directory / "lengths").write_text("".join(notes))
    plans = {
        step: {"group_ids": groups, "version": step - 1, "oldest_version": max(0, step - 2)}
        for step, groups in {1: [0, 1, 2, 3], 2: [4, 5, 7, 8], 3: [9, 10, 11, 12]}.items()
    }
    counts: dict[str, Any] = {"issued": 14, "trained": 12, "filtered": {}, "failed": {}, "balanced": True}
    counts["dropped"] = {"stale": 1, "experiment_ended": 1}
    return Gateway(directory, counts | ledger, plans)


async def accounted(gateway: Gateway, directory: Path) -> Account:
    return await account(gateway, "e", directory, rows=ROWS)  # type: ignore[arg-type]


async def test_a_sound_run_is_accounted_for_to_the_last_group(tmp_path: Path) -> None:
    found = await accounted(a_run(tmp_path), tmp_path)

    assert found.is_sound
    assert (found.steps, found.issued, found.trained, found.lost, found.trained_twice) == (3, 14, 12, 0, 0)
    assert (found.largest_lag, found.max_lag, found.over_max_lag_groups) == (1, 2, 0)
    # Group 6 was passed over; 13 was under way when the run ended.
    assert found.discarded_token_share == pytest.approx(70 / sum(10 * (group % ROWS + 1) for group in range(14)))
    assert found.graded_again_share == 0
    assert json.loads(json.dumps(found.to_dict()))["trained"] == 12


async def test_a_run_too_short_to_compare_lengths_says_so(tmp_path: Path) -> None:
    gateway = a_run(tmp_path)
    (tmp_path / "lengths").write_text("".join(f"{group} {200 - group}\n" for group in range(14)))
    (tmp_path / "checkpoints" / "step-3" / "state.json").write_text(json.dumps({"step": 3, "trained": [[0, 1]]}))

    assert (await accounted(gateway, tmp_path)).slowest_over_fastest is None


@pytest.mark.parametrize(("untrained", "is_sound"), [(1, True), (2, False)])
async def test_of_a_list_that_was_shortened_the_lineage_says_which_were_trained(
    tmp_path: Path, untrained: int, is_sound: bool
) -> None:
    gateway = a_run(tmp_path)
    state = {"step": 3, "trained": [[0, 12]], "closed": {"below": 9, "untrained": untrained}}
    (tmp_path / "checkpoints" / "step-3" / "state.json").write_text(json.dumps(state))

    assert (await accounted(gateway, tmp_path)).is_sound is is_sound


async def test_a_group_without_a_reason_is_lost(tmp_path: Path) -> None:
    found = await accounted(a_run(tmp_path, dropped={"experiment_ended": 1}), tmp_path)

    assert (found.lost, found.is_sound) == (1, False)


async def test_a_group_in_two_steps_was_trained_twice(tmp_path: Path) -> None:
    gateway = a_run(tmp_path)
    gateway.answers["/v1/experiments/e/steps/3"]["group_ids"].append(0)

    found = await accounted(gateway, tmp_path)

    assert (found.trained_twice, found.is_sound) == (1, False)


async def test_a_step_without_lineage_is_not_the_checkpoint(tmp_path: Path) -> None:
    gateway = a_run(tmp_path)
    del gateway.answers["/v1/experiments/e/steps/2"]

    found = await accounted(gateway, tmp_path)

    assert (found.is_lineage_checkpoint, found.is_sound) == (False, False)


async def test_every_group_of_a_step_with_a_token_too_old_counts(tmp_path: Path) -> None:
    gateway = a_run(tmp_path)
    gateway.answers["/v1/experiments/e/steps/3"] |= {"version": 5, "oldest_version": 2}

    found = await accounted(gateway, tmp_path)

    assert (found.largest_lag, found.over_max_lag_groups, found.is_sound) == (3, 4, False)


async def test_an_answer_that_was_graded_twice_is_counted_once_and_told(tmp_path: Path) -> None:
    gateway = a_run(tmp_path)
    with (tmp_path / "lengths").open("a") as notes:
        notes.write("0 10\n0 10\n")

    found = await accounted(gateway, tmp_path)

    assert found.graded_again_share == pytest.approx(2 / 30)


def test_the_newest_checkpoint_is_read(tmp_path: Path) -> None:
    for step in (4, 12):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        state = {"step": step, "trained": [[0, step - 1]], "lost_versions": [[9, 10]]}
        (folder / "state.json").write_text(json.dumps(state))

    assert newest_checkpoint(tmp_path) == (set(range(12)), 12, IntervalSet([9, 10]), {"below": 0, "untrained": 0})


def test_numbers_of_lost_versions_make_no_lag() -> None:
    plan = {"version": 11, "oldest_version": 8}

    assert (lag_of(plan, []), lag_of(plan, [9, 10]), lag_of(plan, [7, 8, 12])) == (3, 1, 3)


def test_deciles_go_from_the_shortest_answers_to_the_longest() -> None:
    lengths = {group: [100 - group % 20] for group in range(40)}

    deciles = deciles_of(lengths, issued=set(range(40)), trained=set(range(20)), rows=20)

    assert [decile.mean_length for decile in deciles] == sorted(decile.mean_length for decile in deciles)
    assert all((decile.issued, decile.trained) == (4, 2) for decile in deciles)


async def test_the_report_says_what_happened(tmp_path: Path) -> None:
    sound = (await accounted(a_run(tmp_path), tmp_path)).to_dict()
    common = {"seed": 7, "seconds": 61.5, "ledger_looks": 99, "unbalanced": []}
    quiet = {**sound, **common, "faults": 0, "faults_by_kind": {}, "recovery_seconds": {}}
    faulty = {
        **quiet,
        "faults": 3,
        "faults_by_kind": {"kill engine": 3},
        "recovery_seconds": {"kill engine": {"median": 1.5, "max": 4.25}},
        "is_lineage_checkpoint": False,
    }

    page = markdown(faulty, quiet)

    assert "| kill engine | 3 | 1.5 | 4.25 |" in page
    assert "| lineage and checkpoint hold the same groups | **no** | yes |" in page
    assert "dropped: stale 1" in page
    assert page.count("\n| 10 |") == 1


def test_quantiles_and_ratios_are_of_what_was_measured() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert median_ratio([1.0, 8.0, 3.0], [2.0, 2.0, 3.0]) == 1.0


def test_what_a_fleet_shall_keep_is_judged_by_what_was_measured() -> None:
    def kept(starts: dict[int, float], lost: int = 0, **cpu: float) -> list[bool | None]:
        results: list[dict[str, Any]] = [
            {"services": int(name[1:]), "publication_cpu_seconds": each, "lost_leases": 0} for name, each in cpu.items()
        ]
        results[-1]["lost_leases"] = lost
        return [line.is_kept for line in lines_of(results, starts)]

    starts = {1: 1.2, 4000: 1.5}
    assert kept(starts, s10=0.03, s100=0.1, s202=0.2, s1000=1.0) == [True, True, True]
    assert kept({1: 1.2, 4000: 2.5}, s100=0.1, s202=1.2, s1000=6.0) == [False, False, False]
    # A group that was formed again costs more.
    assert kept(starts, lost=9, s100=0.1, s202=0.2, s1000=2.0) == [True, None, True]
    assert kept(starts, s100=0.1, s202=0.2, s1000=2.0) == [True, False, True]
    # Of more members than those that are bounded a smaller cost says enough, and a larger one nothing.
    assert kept(starts, s10=0.03, s100=0.1, s1000=0.9)[0] is True
    assert kept(starts, s10=0.03, s100=0.1, s1000=1.1)[0] is None
    assert kept({1: 1.2, 400: 1.3}, s10=0.03) == [None, None, None]
