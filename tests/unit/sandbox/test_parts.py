"""The pure parts of the guard: confinement, files, output, and what is counted of a program."""

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers import code
from flotilla.services.sandbox import limits
from flotilla.services.sandbox.guard import watch
from flotilla.services.sandbox.guard.agent import check_kill_scope
from flotilla.services.sandbox.guard.files import read_plainly
from flotilla.services.sandbox.guard.job import (
    STARVED,
    TIMED_OUT,
    Confinement,
    PhaseResult,
)
from flotilla.services.sandbox.guard.process import Drain
from flotilla.services.sandbox.guard.watch import ProcessStatus, directory_usage
from flotilla.services.sandbox.isolation import Isolation, Place, Slot
from flotilla.services.sandbox.limits import Limits
from flotilla.shared.schemas.sandbox import (
    IsolationLevel,
    RunCodeRequest,
    RunCodeResponse,
)

PLACE = Place("/usr/bin/python3", "/tmp/code", ("/opt/packages",))


def a_phase_result(**fields: Any) -> PhaseResult:
    return PhaseResult(**{"name": "run", "outcome": "exited", "return_code": 0, "seconds": 0.1} | fields)


def a_tree(cpu_seconds: float) -> dict[int, ProcessStatus]:
    return {7: ProcessStatus(parent=1, threads=1, resident_bytes=0, cpu_seconds=cpu_seconds)}


def test_a_shared_uid_is_never_signalled_as_a_whole() -> None:
    shared = Slot(0, None, Path("/slots/0"))
    own = Slot(0, 61000, Path("/slots/0"))

    assert Isolation(IsolationLevel.C, PLACE).confinement(shared).kill_scope == "descendants"
    assert Isolation(IsolationLevel.C, PLACE).confinement(shared).denies_metadata
    assert Isolation(IsolationLevel.C, PLACE).confinement(own).kill_scope == "uid"
    assert Isolation(IsolationLevel.A, PLACE).confinement(shared).kill_scope == "namespace"


@pytest.mark.parametrize("confinement", [Confinement("namespace"), Confinement("uid", 4_000_000)])
def test_the_guard_refuses_to_signal_all_where_it_is_not_alone(confinement: Confinement) -> None:
    with pytest.raises(PermissionError):
        check_kill_scope(confinement)


def test_the_schema_takes_sandbox_fusions_defaults() -> None:
    request = RunCodeRequest.model_validate(
        {
            "compile_timeout": 10,
            "run_timeout": 10,
            "memory_limit_MB": -1,
            "code": "x",
            "stdin": None,
            "language": "python",
            "files": {},
            "fetch_files": [],
            "args": [],
        }
    )
    answer = {"status": "Success", "message": "", "executor_pod_name": None, "files": {}}

    assert request.language == "python"
    assert RunCodeResponse.model_validate(answer).isolation is None
    with pytest.raises(ValidationError):
        RunCodeRequest.model_validate({"code": "x"})


def test_a_file_is_read_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "up").symlink_to(tmp_path)

    assert read_plainly(str(tmp_path), "file", 3) == b"abc"
    for path in ("link", "up/file"):
        with pytest.raises(OSError):
            read_plainly(str(tmp_path), path, 10)
    with pytest.raises(OSError, match="more bytes than allowed"):
        read_plainly(str(tmp_path), "file", 2)


def test_usage_counts_blocks_and_names(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(bytes(8192))
    (tmp_path / "link").symlink_to("/usr")

    used, number = directory_usage(str(tmp_path), Limits())

    assert number == 3
    assert used >= 8192


def test_counting_stops_at_the_limit(tmp_path: Path) -> None:
    for name in range(10):
        (tmp_path / str(name)).touch()

    assert directory_usage(str(tmp_path), Limits(files=4))[1] == 5


def test_a_stream_is_cut_with_a_note() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"abcdef")
    os.close(writing)
    drain = Drain(reading, 4)

    drain.read_rest()
    os.close(reading)

    phase = a_phase_result(stdout=drain.text())
    assert phase.output()[0] == "abcd\n[output cut after 4 bytes]\n"


@pytest.mark.parametrize(
    ("elapsed", "cpu", "queued", "verdict"),
    [
        (1.9, 1.9, 0.0, None),
        (2.0, 0.0, 0.0, TIMED_OUT),  # it slept
        (5.0, 1.5, 3.2, None),  # others used the processor
        (5.0, 2.0, 3.2, TIMED_OUT),  # it had its time all the same
        (5.0, 1.5, 2.9, TIMED_OUT),
        (20.0, 0.1, 19.9, STARVED),  # even so there is an end, which is not the program's fault
        (20.0, 2.1, 19.9, TIMED_OUT),
    ],
)
def test_only_a_programs_own_time_counts(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, cpu: float, queued: float, verdict: str | None
) -> None:
    monkeypatch.setattr(watch, "queued_seconds", lambda pid: queued if pid == 7 else 4.0)

    assert watch.time_verdict(a_tree(cpu), elapsed, 2.0, watch.Baseline(guard_seconds=4.0)) == verdict


def test_what_a_process_waited_counts_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = {7: 0.0, 8: 0.0, 9: 0.0}
    monkeypatch.setattr(watch, "queued_seconds", lambda pid: queued.get(pid, 0.0))
    before, parent = watch.Baseline(), a_tree(0.1)

    for child in (8, 9):
        queued[child] = 2.0
        before.look(parent | {child: parent[7]})

    assert watch.time_verdict(parent, 5.5, 2.0, before) is None
    assert watch.time_verdict(parent, 6.0, 2.0, before) == TIMED_OUT


def test_a_program_of_which_no_process_is_left_is_over_and_not_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "queued_seconds", lambda _: 0.0)

    assert watch.time_verdict({}, 5.0, 2.0, watch.Baseline()) is None
    assert watch.time_verdict({}, 20.0, 2.0, watch.Baseline()) == STARVED


def test_a_program_may_wait_for_a_guard_that_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "queued_seconds", lambda pid: 0.1 if pid == 7 else 4.0)

    assert watch.time_verdict(a_tree(0.1), 5.0, 2.0, watch.Baseline(guard_seconds=0.5)) is None
    assert watch.time_verdict(a_tree(0.1), 5.0, 2.0, watch.Baseline(guard_seconds=1.5)) == TIMED_OUT


def test_time_in_which_all_of_a_program_is_blocked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "queued_seconds", lambda pid: 0.0)
    blocked = ProcessStatus(parent=1, threads=1, resident_bytes=0, cpu_seconds=0.1, is_blocked=True)
    asleep = ProcessStatus(parent=1, threads=1, resident_bytes=0, cpu_seconds=0.1)
    blockage, of_a_parent = watch.Blockage(), watch.Blockage()

    for now in (0.0, 1.0, 2.0):
        blockage.look({7: blocked}, now)
        of_a_parent.look({7: blocked, 8: asleep}, now)
    blockage.look({7: asleep}, 2.5)
    blockage.look({7: blocked}, 9.0)

    assert (blockage.seconds, of_a_parent.seconds) == (2.0, 0.0)
    assert watch.time_verdict(a_tree(0.1), 3.9, 2.0, watch.Baseline(), blockage.seconds) is None
    assert watch.time_verdict(a_tree(0.1), 4.0, 2.0, watch.Baseline(), blockage.seconds) == TIMED_OUT
    assert watch.time_verdict(a_tree(0.1), 20.0, 2.0, watch.Baseline(), 19.9) == watch.STARVED


def test_what_was_used_before_a_cell_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "queued_seconds", lambda pid: 9.0 if pid == 7 else 0.0)

    assert watch.time_verdict(a_tree(9.0), 2.5, 2.0, watch.Baseline(8.0, {7: 8.0})) is None
    assert watch.time_verdict(a_tree(9.0), 2.5, 2.0, watch.Baseline(8.0, {7: 8.6})) == TIMED_OUT
    assert watch.time_verdict(a_tree(9.0), 2.5, 2.0, watch.Baseline(7.0, {7: 8.0})) == TIMED_OUT


def test_the_reward_service_waits_as_long_as_the_sandbox_does() -> None:
    assert code.EXTENSION_SECONDS == limits.EXTENSION_SECONDS
