"""What the service asks of the guard, and what it makes of the answer."""

import json
from typing import Any

import pytest

from flotilla.services.sandbox.guard.job import (
    Confinement,
    Job,
    JobResult,
    Orders,
    Phase,
    PhaseResult,
)
from flotilla.services.sandbox.languages import Language
from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.services.sandbox.routes.run_code import make_response
from flotilla.shared.schemas.sandbox import (
    IsolationLevel,
    RunStatus,
    check_relative_path,
)


def a_phase_result(**fields: Any) -> PhaseResult:
    return PhaseResult(**{"name": "run", "outcome": "exited", "return_code": 0, "seconds": 0.1} | fields)


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


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "x" * 2000, "."])
def test_a_path_outside_the_working_directory_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a relative path"):
        check_relative_path(path)


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
