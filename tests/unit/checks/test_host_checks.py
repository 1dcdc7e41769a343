"""A service does what an order says, and nothing beyond it."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla.shared.checks import host_checks
from flotilla.shared.checks.facts import sources
from flotilla.shared.checks.host_checks import HostChecks, missing_in, write_into
from flotilla.shared.schemas.checks import LOOK, REACH, CheckOrder, CheckReport


def order(**changes: object) -> CheckOrder:
    return CheckOrder.model_validate({"check_id": "ab12", "phase": LOOK, "sent_at": time.time()} | changes)


async def test_it_looks_listens_and_writes_into_a_folder_that_is_there(tmp_path: Path) -> None:
    checks = HostChecks("127.0.0.1", "redis://127.0.0.1:1/0", listens=True)

    report = await checks.answer(order(folder=str(tmp_path)), "rollout-1", 5.0)

    checks.close()
    facts = report.facts
    assert facts is not None and facts.folder_problem is None and (tmp_path / "rollout-1").read_text() == "ab12"
    assert facts.redis_problem is not None and facts.redis_seconds is None
    assert facts.ports["data"] > 0 and report.received_at == 5.0 and report.sent_at > 5.0
    CheckReport.model_validate_json(report.model_dump_json())


async def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    report = await HostChecks("127.0.0.1").answer(order(folder=str(tmp_path / "other")), "reward-1", 5.0)

    assert report.facts is not None and report.facts.folder_problem == "No such file or directory"
    assert list(tmp_path.iterdir()) == [] and report.facts.ports == {}


def test_no_file_is_written_elsewhere_or_over_another(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "taken").write_text("kept")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "outside")

    problems = [write_into(str(tmp_path / "in"), name, "x") for name in ("../outside", "taken", "link")]

    assert None not in problems and not (tmp_path / "outside").exists()
    assert (tmp_path / "in" / "taken").read_text() == "kept"


async def test_files_that_others_wrote_are_missed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "FOLDER_SECONDS", 0.0)
    (tmp_path / "there").write_text("ab12")
    (tmp_path / "older").write_text("cd34")
    names = ("there", "older", "not there")

    report = await HostChecks("127.0.0.1").answer(order(phase=REACH, folder=str(tmp_path), files=names), "r", 5.0)

    assert report.unseen == ("older", "not there") == missing_in(str(tmp_path), names, "ab12")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.parent / "there")])
def test_what_has_a_files_name_and_is_none_is_missing_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "there").write_text("ab12")
    make(tmp_path / "rollout-1")
    looking = threading.Thread(target=missing_in, args=(str(tmp_path), ["rollout-1"], "ab12"), daemon=True)

    looking.start()
    looking.join(5)

    assert not looking.is_alive()
    assert missing_in(str(tmp_path), ["rollout-1", "../there", "there"], "ab12") == ("rollout-1", "../there")


async def test_an_order_of_a_later_release_is_answered_with_nothing() -> None:
    report = await HostChecks("127.0.0.1").answer(order(phase=3, later=True), "r", 5.0)

    assert json.loads(report.model_dump_json())["facts"] is None and report.attempts == ()


def test_sources_have_the_same_digest_until_one_changes(tmp_path: Path) -> None:
    (tmp_path / "shared" / "schemas").mkdir(parents=True)
    (tmp_path / "main.py").write_text("1")
    before = sources(tmp_path)
    (tmp_path / "main.py").write_text("2")
    code = sources(tmp_path)
    (tmp_path / "shared" / "schemas" / "task.py").write_text("1")

    assert code.code != before.code and code.schemas == before.schemas != sources(tmp_path).schemas
