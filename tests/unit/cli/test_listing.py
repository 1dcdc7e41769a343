"""Experiments and checkpoints are listed in the order in which they are looked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.command_line import STATES
from flotilla.cli.commands.listing import describe_checkpoints
from flotilla.cli.exit_codes import ExitCode
from flotilla.shared.schemas.experiment import ExperimentState, ListedCheckpoint, UploadCheck, UploadView
from tests.unit.cli.gateway import serve
from tests.unit.cli.test_progress import a_view
from tests.unit.cli.test_reference import DRAFT, ENDED, RUNNING, views

KNOWN = views(("sum-aa11", RUNNING), ("sum-bb22", ENDED), ("product-cc33", ENDED), ("chess-dd44", DRAFT))


def test_the_states_that_can_be_asked_for_are_those_there_are() -> None:
    assert tuple(ExperimentState) == STATES


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ([], ["sum-aa11", "chess-dd44", "product-cc33", "sum-bb22"]),
        (["--active"], ["sum-aa11"]),
        (["sum"], ["sum-aa11", "sum-bb22"]),
        (["*-cc33", "chess"], ["chess-dd44", "product-cc33"]),
        (["--state", "completed", "--last", "1"], ["product-cc33"]),
        (["--state", "failed"], []),
    ],
)
def test_active_ones_come_first_then_the_newest(
    words: list[str], ids: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(monkeypatch, KNOWN, {})

    assert main(["ls", *words, "--json"]) == 0

    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ids


def test_a_list_for_people_has_whole_ids(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve(monkeypatch, KNOWN, {})

    assert main(["ls"]) == 0

    said = capsys.readouterr().out
    assert all(view.id in said for view in KNOWN)
    assert "2/10" in said


def test_an_empty_list_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve(monkeypatch, KNOWN, {})

    assert main(["ls", "nothing"]) == 0

    assert capsys.readouterr().out == "none of 4 experiments matches\n"


def test_a_name_that_several_have_deletes_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve(monkeypatch, KNOWN, {})

    assert main(["delete", "sum"]) == ExitCode.REFUSED

    assert "sum-aa11 (running), sum-bb22 (completed)" in capsys.readouterr().err
    assert not any(asked.startswith("DELETE") for asked in gateway.asked)


def test_what_is_deleted_is_named_with_what_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve(monkeypatch, KNOWN, {})

    assert main(["delete", "product"]) == 0

    assert gateway.asked[-1] == "DELETE /experiments/product-cc33"
    assert "its directory stays (--files deletes it, too): /data/trial-1" in capsys.readouterr().out

    assert main(["delete", "product", "--files"]) == 0
    assert "its directory is deleted, too: /data/trial-1" in capsys.readouterr().out


def made(directory: Path, *steps: int) -> list[ListedCheckpoint]:
    return [
        ListedCheckpoint(step=step, version=step // 5, path=str(directory / f"step-{step}"), at="2026-01-01T00:00:00Z")
        for step in steps
    ]


def test_newest_and_best_are_among_those_that_are_kept(tmp_path: Path) -> None:
    found = made(tmp_path, 5, 10, 15, 20)
    for each in found[1:]:
        Path(each.path).mkdir()

    rows = describe_checkpoints(found, {1: 0.9, 2: 0.7, 3: 0.5}, tmp_path)

    assert [row.is_kept for row in rows] == [False, True, True, True]
    assert [row.is_best for row in rows] == [False, True, False, False]
    assert [row.is_newest for row in rows] == [False, False, False, True]
    assert [row.held_out for row in rows] == [0.9, 0.7, 0.5, None]


def test_on_another_machine_nobody_knows_what_is_kept(tmp_path: Path) -> None:
    rows = describe_checkpoints(made(tmp_path / "elsewhere", 5), {}, tmp_path / "elsewhere")

    assert (rows[0].is_kept, rows[0].is_newest, rows[0].is_best) == (None, True, False)


def test_paths_of_checkpoints_are_printed_whole_outside_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = a_view(directory=str(tmp_path))
    found = made(tmp_path, 5, 10)
    Path(found[1].path).mkdir()
    evaluations: list[dict[str, Any]] = [
        {"name": "evaluation/reward_mean", "step": 10, "version": 2, "value": 0.75},
        {"name": "loss", "step": 10, "version": 2, "value": 9.0},
    ]
    listed = [each.model_dump(mode="json") for each in found]
    paths = {f"/experiments/{view.id}/checkpoints": listed, f"/experiments/{view.id}/metrics": evaluations}
    serve(monkeypatch, [view], paths)

    assert main(["checkpoints", "trial"]) == 0

    said = capsys.readouterr().out
    assert f"\nstep 10     {found[1].path}\n" in said
    assert "0.750" in said and "newest, best" in said
    assert "1 older one was removed (checkpoint.keep); --all lists it" in said
    assert main(["checkpoints", "trial", "--all"]) == 0
    everything = capsys.readouterr().out
    assert "removed" in everything and "--all" not in everything
    assert found[0].path not in said + everything


def test_where_the_copies_are_and_whether_they_are_whole_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = a_view(directory=str(tmp_path))
    uploads = [
        UploadView(state="removed", url="s3://team/trial-1/step-00000005"),
        UploadView(state="uploaded", url="s3://team/trial-1/step-00000010", at="2026-01-01T00:05:00.000Z"),
        UploadView(state="failed", url="s3://team/trial-1/step-00000015", cause="the store is away"),
        UploadView(state="pending", url="s3://team/trial-1/step-00000020"),
    ]
    found = made(tmp_path, 5, 10, 15, 20)
    for each in found[1:]:
        Path(each.path).mkdir()
    listed = [
        each.model_copy(update={"upload": upload}).model_dump(mode="json")
        for each, upload in zip(found, uploads, strict=True)
    ]
    serve(monkeypatch, [view], {f"/experiments/{view.id}/checkpoints": listed, f"/experiments/{view.id}/metrics": []})

    assert main(["checkpoints", "trial"]) == 0
    said = capsys.readouterr().out
    assert main(["checkpoints", "trial", "--json"]) == 0

    assert "s3://team/trial-1/step-00000010 (whole, since 2026-01-01 00:05:00)\n" in said
    assert "s3://team/trial-1/step-00000015 (not there: the store is away; it is tried again)\n" in said
    assert "s3://team/trial-1/step-00000020 (pending)\n" in said
    assert "step-00000005" not in said
    rows = json.loads(capsys.readouterr().out)
    assert [row["upload"]["state"] for row in rows] == ["removed", "uploaded", "failed", "pending"]


def test_copies_are_looked_at_now_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = a_view(directory=str(tmp_path))
    found, url = made(tmp_path, 5, 10), "s3://team/trial-1/step-"
    checks, listed = {}, []
    for each, missing in zip(found, ((), ("optimizer.safetensors",)), strict=True):
        Path(each.path).mkdir()
        upload = UploadView(state="uploaded", url=f"{url}{each.step:08d}", at="2026-01-01T00:05:00.000Z")
        listed.append(each.model_copy(update={"upload": upload}).model_dump(mode="json"))
        check = UploadCheck(step=each.step, url=upload.url, is_whole=not missing, missing=missing)
        checks[f"/experiments/{view.id}/checkpoints/{each.step}/upload"] = check.model_dump(mode="json")
    lists = {f"/experiments/{view.id}/checkpoints": listed, f"/experiments/{view.id}/metrics": []}
    serve(monkeypatch, [view], lists | checks)

    assert main(["checkpoints", "trial", "--verify"]) == ExitCode.FAILED
    said = capsys.readouterr().out
    assert main(["checkpoints", "trial", "--verify", "--json"]) == ExitCode.FAILED

    assert f"{url}00000005 (whole)\n" in said and f"{url}00000010 (lacks optimizer.safetensors)\n" in said
    rows = json.loads(capsys.readouterr().out)
    assert [row["copy"]["is_whole"] for row in rows] == [True, False]
