"""The pure parts: limits, languages, job, isolation's command line, schema, queue."""

import json
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
    Job,
    JobResult,
    Orders,
    Phase,
    PhaseResult,
)
from flotilla.services.sandbox.guard.process import Drain
from flotilla.services.sandbox.guard.watch import ProcessStatus, directory_usage
from flotilla.services.sandbox.isolation import Isolation, Place, Slot, bwrap_command, candidates, ways_out
from flotilla.services.sandbox.languages import Language, choose
from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.services.sandbox.routes.run_code import make_response
from flotilla.services.sandbox.slots import lock_uid
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.schemas.sandbox import (
    IsolationLevel,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
    check_relative_path,
)

PLACE = Place("/usr/bin/python3", "/tmp/code", ("/opt/packages",))


def a_phase_result(**fields: Any) -> PhaseResult:
    return PhaseResult(**{"name": "run", "outcome": "exited", "return_code": 0, "seconds": 0.1} | fields)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="processes"):
        Limits(processes=0)


def test_a_call_can_only_lower_the_memory_limit() -> None:
    limits = Limits(memory_bytes=100 * MEBIBYTE)

    assert limits.with_memory(50 * MEBIBYTE).memory_bytes == 50 * MEBIBYTE
    assert limits.with_memory(200 * MEBIBYTE).memory_bytes == 100 * MEBIBYTE


@pytest.mark.parametrize("limits", [Limits(), Limits().with_memory(MEBIBYTE)])
def test_a_job_and_its_result_survive_the_wire(limits: Limits) -> None:
    confinement = Confinement("uid", 61000, ("/usr",), ("/work",), denies_metadata=True)
    orders = Orders("/work", {"PATH": "/bin"}, confinement, Limits())
    phase = Phase("run", ("/bin/true", "x"), 1.0, "eA==", is_tool=True)
    job = Job(orders, {"a": "eA=="}, (phase,), ("out",), limits)
    result = JobResult((a_phase_result(detail="d"),), {"out": "eA=="}, ("note",))

    given = Orders.from_wire(json.loads(json.dumps(orders.to_wire())))
    assert Job.from_wire(json.loads(json.dumps(job.to_wire())), given) == job
    assert JobResult.from_wire(json.loads(json.dumps(result.to_wire()))) == result


def test_a_compiled_language_has_two_phases() -> None:
    language = Language("cpp", "/usr/bin/g++", "main.cpp", ("-O2",), compiled="main")

    compiling, running = language.phases("/work", "eA==", 3.0, 4.0)

    assert compiling.argv == ("/usr/bin/g++", "-O2", "main.cpp", "-o", "main")
    assert (compiling.timeout_seconds, compiling.stdin, compiling.is_tool) == (3.0, "", True)
    assert (running.argv, running.timeout_seconds, running.stdin) == (("/work/main",), 4.0, "eA==")


def test_a_language_is_found_under_the_other_name() -> None:
    language = Language("javascript", "/usr/bin/node", "main.js")

    assert choose({"javascript": language}, "nodejs") is language
    with pytest.raises(InvalidRequest, match="available: javascript"):
        choose({"javascript": language}, "python")


def test_bwrap_opens_no_namespace_and_no_writable_root() -> None:
    command = bwrap_command(PLACE)

    for option in ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent"):
        assert option in command
    assert "--bind" not in command
    assert "--share-net" not in command
    assert command[command.index("--remount-ro", command.index("--remount-ro") + 1) + 1] == "/"


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


def test_level_d_is_only_tried_when_allowed() -> None:
    assert candidates(None, allows_unsafe=False) == ["A", "B", "C"]
    assert candidates(None, allows_unsafe=True) == ["A", "B", "C", "D"]
    assert candidates(IsolationLevel.B, allows_unsafe=False) == ["B"]
    with pytest.raises(Unavailable):
        candidates(IsolationLevel.D, allows_unsafe=False)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "x" * 2000, "."])
def test_a_path_outside_the_working_directory_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a relative path"):
        check_relative_path(path)


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


@pytest.mark.parametrize(
    ("phase", "status"),
    [
        (a_phase_result(), RunStatus.SUCCESS),
        (a_phase_result(return_code=1), RunStatus.FAILED),
        (a_phase_result(outcome="timed_out", return_code=-9), RunStatus.FAILED),
        (a_phase_result(outcome="over_limit", return_code=0), RunStatus.FAILED),
        (a_phase_result(outcome="not_started", return_code=None), RunStatus.SANDBOX_ERROR),
    ],
)
def test_only_a_clean_end_is_a_success(phase: PhaseResult, status: RunStatus) -> None:
    assert make_response(JobResult((phase,)), IsolationLevel.A).status is status


def test_a_compiler_that_fails_leaves_no_run_result() -> None:
    answer = make_response(JobResult((a_phase_result(name="compile", return_code=1),)), IsolationLevel.A)

    assert answer.status is RunStatus.FAILED
    assert answer.run_result is None


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


def test_a_uid_is_locked_once(tmp_path: Path) -> None:
    first = lock_uid(61000, tmp_path / "locks")
    second = lock_uid(61000, tmp_path / "locks")
    assert first is not None
    os.close(first)
    third = lock_uid(61000, tmp_path / "locks")
    assert third is not None
    os.close(third)

    assert second is None


@pytest.mark.parametrize(
    ("uid", "version", "works", "first"),
    [
        (1000, 5, None, "run it as root"),
        (1000, 0, None, "use a kernel with Landlock"),
        (0, 0, None, "use a kernel with Landlock"),
        (1000, 6, None, "let it make user namespaces"),
        (1000, 5, IsolationLevel.B, "set FLOTILLA_SANDBOX_LEVEL=B"),
    ],
)
def test_a_refusal_names_the_best_way_out_first(
    uid: int, version: int, works: IsolationLevel | None, first: str
) -> None:
    ways = ways_out(uid=uid, landlock_version=version, works=works)

    assert ways[0].startswith(first)
    assert (works is None) == ("FLOTILLA_UNSAFE_SANDBOX=1" in ways[-1])


def a_tree(cpu_seconds: float) -> dict[int, ProcessStatus]:
    return {7: ProcessStatus(parent=1, threads=1, resident_bytes=0, cpu_seconds=cpu_seconds)}


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
