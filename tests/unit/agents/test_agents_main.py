"""The command line of agents: rows are written, and what cannot be played is said in a sentence."""

import argparse
import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from flotilla.agents import __main__ as agents
from flotilla.agents import box
from flotilla.agents.harbor import HarborAgent
from flotilla.shared.errors import InvalidSpec
from tests.unit.agents.test_harbor_tasks import a_folder


@pytest.fixture(autouse=True)
def logging_configured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Keep the log of this process as it is; gives how the command would have configured it."""
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr(agents, "configure_logging", lambda *words: asked.append(words))
    return asked


def said(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["flotilla.agents", *words])
    return agents.main()


def test_rows_of_tasks_and_of_a_gyms_data_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_folder(tmp_path / "hello")
    line = {"responses_create_params": {"input": "1 + 1?", "instructions": "Be brief."}, "answer": 2}
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n\n")

    assert said(monkeypatch, "harbor-rows", str(tmp_path / "hello"), str(tmp_path / "new" / "rows.jsonl")) == 0
    assert said(monkeypatch, "nemo-gym-rows", str(tmp_path / "data.jsonl"), str(tmp_path / "gym.jsonl")) == 0

    assert capsys.readouterr().out == "1 rows\n1 rows\n"
    assert json.loads((tmp_path / "new" / "rows.jsonl").read_text())["harbor_task"] == "hello"
    row = json.loads((tmp_path / "gym.jsonl").read_text())
    assert [each["content"] for each in row["prompt"]] == ["Be brief.", "1 + 1?"]
    assert json.loads(row["nemo_gym"]) == line


def test_what_cannot_be_played_here_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "t")
    monkeypatch.setattr(box, "why_not", lambda: "bwrap is not installed")

    assert said(monkeypatch, "harbor-rows", str(tmp_path), str(tmp_path / "rows.jsonl")) == 2
    monkeypatch.setenv("FLOTILLA_TOKEN", "t")
    assert said(monkeypatch, "harbor", str(tmp_path), "experiment", "--harness", "true") == 2

    refused = capsys.readouterr().err.splitlines()
    assert "no Harbor task" in refused[0]
    assert refused[1] == "there are no boxes here: bwrap is not installed"


def test_what_plays_has_no_token_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[tuple[str, bool]]()

    async def run(_: object, token: str) -> int:
        seen.append((token, "FLOTILLA_TOKEN" in os.environ))
        return 3

    monkeypatch.setenv("FLOTILLA_TOKEN", "t")
    monkeypatch.setattr(agents, "_run", run)

    assert said(monkeypatch, "nemo-gym", "http://127.0.0.1:1", "experiment") == 0

    assert (seen, capsys.readouterr().out) == ([("t", False)], "3 episodes\n")


def test_networks_that_are_none_are_refused_with_what_they_are_like(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        said(monkeypatch, "nemo-gym", "http://127.0.0.1:1", "experiment", "--networks", "here")

    assert "must be networks, such as 127.0.0.0/8" in capsys.readouterr().err


def test_the_first_of_many_errors_is_said() -> None:
    first = InvalidSpec("this")

    assert agents.first_of(ExceptionGroup("all", [ExceptionGroup("lanes", [first]), InvalidSpec("that")])) is first


def test_what_others_code_plays_with_finds_no_token_of_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logging_configured: list[tuple[str, ...]],
) -> None:
    seen = list[object]()

    async def run(_: object, token: str) -> int:
        seen.extend([token, os.environ.get("FLOTILLA_TOKEN"), os.environ.get("FLOTILLA_REDIS_URL")])
        return 3

    monkeypatch.setenv("FLOTILLA_TOKEN", "t")
    monkeypatch.setenv("FLOTILLA_REDIS_URL", "redis://:secret@here")
    monkeypatch.setattr(agents, "_run", run)

    assert said(monkeypatch, "verifiers", "any", "experiment") == 0

    assert capsys.readouterr().out == "3 episodes\n"
    assert seen == ["t", None, None]
    assert logging_configured == [("agents", "WARNING", "plain")], "why an episode was given up is among the facts"


def test_an_interrupt_ends_what_is_played_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[Path]()

    async def run(arguments: argparse.Namespace, _: str) -> int:
        async with AsyncExitStack() as stack:
            play = await agents._play_of(arguments, stack)
            assert isinstance(play, HarborAgent) and play._harness.folder is not None
            folder = play._harness.folder
            stack.callback(lambda: ended.append(folder) if folder.exists() else None)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setenv("FLOTILLA_TOKEN", "t")
    monkeypatch.setattr(box, "why_not", lambda: None)
    monkeypatch.setattr(agents, "_tasks", lambda _: {})
    monkeypatch.setattr(agents, "_run", run)

    assert said(monkeypatch, "harbor", "any", "experiment", "--harness", "true") == 130
    assert [folder.exists() for folder in ended] == [False]
