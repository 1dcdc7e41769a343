"""``flotilla prune`` says what would go, and deletes only what it is told to."""

import json
from typing import Any

import httpx
import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.commands.prune import written_size
from flotilla.cli.exit_codes import ExitCode
from tests.unit.cli.gateway import serve

PART = {
    "experiment_id": "sum-aa11",
    "part": "samples",
    "bytes": 1_500_000,
    "ended_at": "2030-01-01T12:00:00Z",
    "why": "it ended 31.0 days ago, samples are kept for 30",
}
KEPT = {**PART, "part": "checkpoints", "why": "sum-bb22 began from its step 2"}


def answer(**changes: Any) -> dict[str, Any]:
    """Make what a gateway answers."""
    return {"dry_run": True, "removed": [PART], "kept": [KEPT], "bytes": 1_500_000} | changes


def asked(monkeypatch: pytest.MonkeyPatch, words: list[str], **changes: Any) -> dict[str, Any]:
    """Run the command; return the body that it sent."""
    serve(monkeypatch, [], {"/fleet/prunings": answer(**changes)})
    bodies: list[dict[str, Any]] = []
    send = httpx.AsyncClient.send

    async def keep(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return await send(client, request, **options)

    monkeypatch.setattr(httpx.AsyncClient, "send", keep)
    assert main(["prune", *words]) == ExitCode.DONE
    return bodies[0]


def test_without_yes_it_is_a_dry_run_that_says_what_goes_what_stays_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = asked(monkeypatch, ["--run-days", "30", "--max-size", "500GB"])

    said = capsys.readouterr().out
    assert {name: value for name, value in body.items() if value is not None} == {
        "run_days": 30,
        "max_bytes": 500_000_000_000,
        "dry_run": True,
    }
    assert "would be deleted" in said
    assert "samples are kept for 30" in said
    assert "sum-bb22 began from its step 2" in said
    assert "with --yes this is deleted, and frees 1.5 MB" in said


def test_with_yes_it_deletes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    body = asked(monkeypatch, ["--samples-days", "0.5", "--yes"], dry_run=False)

    assert (body["samples_days"], body["dry_run"]) == (0.5, False)
    assert "deleted, which freed 1.5 MB" in capsys.readouterr().out


def test_json_is_the_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked(monkeypatch, ["--json"])

    assert json.loads(capsys.readouterr().out) == answer()


def test_nothing_to_delete_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked(monkeypatch, [], removed=[], kept=[], bytes=0)

    assert capsys.readouterr().out == "nothing would be deleted\n"


@pytest.mark.parametrize("words", [["--max-size", "5 GiB"], ["--max-size", "-1"], ["--run-days", "never"]])
def test_what_is_no_size_or_age_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prune", *words])

    assert "must be a" in capsys.readouterr().err


def test_sizes_are_written_as_people_read_them() -> None:
    assert [written_size(each) for each in (0, 999, 1_000, 2_540_000, 3 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "3.0 TB",
    ]
