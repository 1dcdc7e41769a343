"""The code interpreter: a program's own failure is told to the policy, the sandbox's is an error of the episode."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flotilla.services.rollout.tools.base import ToolFailed
from flotilla.services.rollout.tools.code_interpreter import CodeInterpreter, InterpreterSession, Sandboxes
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.episodes import CodeInterpreterConfig, ToolEpisodesConfig
from flotilla.shared.errors import EpisodeFailed, InvalidSpec, Unavailable
from flotilla.shared.testing.builders import a_task

SESSION = {
    "id": "ses-1", "token": "secret", "isolation": "A", "cpu_seconds": 300, "idle_seconds": 300,
    "lifetime_seconds": 3600,
}  # fmt: skip


def cell(stdout: str = "", stderr: str = "", **fields: Any) -> dict[str, Any]:
    result = {"status": "Finished", "execution_time": 0.0, "return_code": 0, "stdout": stdout, "stderr": stderr}
    return {"status": "Success", "run_result": result, "files": {}, "isolation": "A", "is_alive": True, **fields}


class FakeSandbox:
    """Answers cells with what it is given, in order, and keeps the requests."""

    def __init__(self, *cells: dict[str, Any] | int, start: int | Exception = 201) -> None:
        self.cells, self.start = list(cells), start
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, request.url.path, body))
        assert request.headers["Authorization"] == "Bearer service token"
        if request.url.path == "/sessions":
            if isinstance(self.start, Exception):
                raise self.start
            return httpx.Response(self.start, json=SESSION if self.start == 201 else {"detail": "none is left"})
        assert request.headers["Session-Token"] == "secret"
        if request.method == "DELETE":
            return httpx.Response(204)
        found = self.cells.pop(0)
        if isinstance(found, int):
            return httpx.Response(found, json={"code": "x", "detail": "it was idle for 300 s"})
        return httpx.Response(200, json=found)


async def address() -> str:
    return "http://sandbox:1/"


def session_of(
    sandbox: Callable[[httpx.Request], httpx.Response], row: dict[str, Any] | None = None, **config: Any
) -> InterpreterSession:
    client = httpx.AsyncClient(transport=httpx.MockTransport(sandbox))
    made = CodeInterpreterConfig(kind="code_interpreter", **config)
    task = a_task(metadata=row or {})
    return CodeInterpreter(made, Sandboxes(address, lambda: "service token"), client).for_episode(task)


async def test_cells_of_an_episode_run_in_one_session_that_ends_with_it() -> None:
    sandbox = FakeSandbox(cell("1\n"), cell("2\n"))
    session = session_of(sandbox, run_seconds=3)

    told = [await session.call({"code": code}) for code in ("x = 1\nx", "x + 1")]
    await session.close()
    await session.close()

    assert told == ["1", "2"]
    assert [(method, path) for method, path, _ in sandbox.asked] == [
        ("POST", "/sessions"),
        ("POST", "/sessions/ses-1/run"),
        ("POST", "/sessions/ses-1/run"),
        ("DELETE", "/sessions/ses-1"),
    ]
    assert sandbox.asked[1][2] == {"code": "x = 1\nx", "run_timeout": 3.0, "fetch_files": []}


async def test_an_episode_that_runs_no_code_has_no_session() -> None:
    sandbox = FakeSandbox()

    await session_of(sandbox).close()

    assert sandbox.asked == []


@pytest.mark.parametrize(
    ("answer", "words", "starts"),
    [
        (cell("a\n", "ZeroDivisionError", status="Failed"), "^a\nZeroDivisionError$", 1),
        (cell(status="Failed", message="time limit exceeded: 5 s"), "time limit exceeded: 5 s$", 1),
        (cell(status="Failed", message="ended by signal 11", is_alive=False), "signal 11\n.*what earlier calls", 2),
        (410, "what earlier calls defined is lost. it was idle for 300 s", 2),
    ],
)
async def test_what_the_program_does_wrong_is_told_and_the_next_call_goes_on(
    answer: dict[str, Any] | int, words: str, starts: int
) -> None:
    sandbox = FakeSandbox(answer, cell("fine\n"))
    session = session_of(sandbox)

    with pytest.raises(ToolFailed, match=words):
        await session.call({"code": "1 / 0"})

    assert await session.call({"code": "'fine'"}) == "fine"
    assert sum(path == "/sessions" for _, path, _ in sandbox.asked) == starts


@pytest.mark.parametrize("arguments", [{}, {"code": 1}, {"code": "1", "language": "bash"}])
async def test_arguments_that_are_no_code_are_told(arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolFailed, match="code"):
        await session_of(FakeSandbox()).call(arguments)


@pytest.mark.parametrize(
    ("sandbox", "words"),
    [
        (FakeSandbox(start=503), "answered 503: none is left"),
        (FakeSandbox(start=httpx.ConnectError("refused")), "cannot be reached: ConnectError"),
        (FakeSandbox(404), "answered 404"),
        (FakeSandbox(500), "answered 500"),
        (FakeSandbox(cell(status="SandboxError", message="no space", is_alive=False)), "no space"),
        (FakeSandbox({"other": 1}), "no CellResponse"),
    ],
)
async def test_what_the_sandbox_does_not_do_is_an_error_of_the_episode(sandbox: FakeSandbox, words: str) -> None:
    with pytest.raises(EpisodeFailed, match=words):
        await session_of(sandbox).call({"code": "1"})


async def test_without_a_sandbox_the_episode_is_an_error() -> None:
    async def none_there() -> str:
        raise Unavailable("the fleet has none now")

    made = CodeInterpreterConfig(kind="code_interpreter")
    tool = CodeInterpreter(made, Sandboxes(none_there, lambda: "x"), httpx.AsyncClient())

    with pytest.raises(EpisodeFailed, match="the fleet has none now"):
        await tool.for_episode(a_task()).call({"code": "1"})


async def test_the_row_names_the_image_of_its_sandbox() -> None:
    sandbox = FakeSandbox(cell("1\n"))

    await session_of(sandbox, {"image": "swebench/task-1"}, image_column="image", language="shell").call({"code": "ls"})

    assert {"language": "shell", "image": "swebench/task-1"}.items() <= sandbox.asked[0][2].items()


@pytest.mark.parametrize("image", ["swebench/x\nRUN id", "a b", "x" * 501])
async def test_a_row_that_names_no_image_is_an_error_of_its_episode_alone(image: str) -> None:
    sandbox = FakeSandbox(cell())

    with pytest.raises(EpisodeFailed, match="the row names no image in 'image'"):
        await session_of(sandbox, {"image": image}, image_column="image", language="shell").call({"code": "ls"})

    assert sandbox.asked == []


CHECKED = {"language": "shell", "check_column": "tests"}


@pytest.mark.parametrize(("status", "reward"), [("Success", 1.0), ("Failed", 0.0)])
async def test_what_an_episode_leaves_is_graded_in_its_own_session(status: str, reward: float) -> None:
    sandbox = FakeSandbox(cell(), cell(status=status))
    session = session_of(sandbox, {"tests": "make test"}, **CHECKED)
    await session.call({"code": "touch x"})

    assert await session.check() == reward

    assert [path for _, path, _ in sandbox.asked] == ["/sessions", *["/sessions/ses-1/run"] * 2]
    assert sandbox.asked[2][2] == {"code": "make test", "run_timeout": 60.0, "fetch_files": []}


@pytest.mark.parametrize(
    ("sandbox", "row", "words"),
    [
        (FakeSandbox(cell(), cell(status="SandboxError", message="the box is gone")), {"tests": "t"}, "box is gone"),
        (FakeSandbox(cell(), 410), {"tests": "t"}, "ended before it was graded: it was idle"),
        (FakeSandbox(cell()), {}, "no text in 'tests', which check_column"),
    ],
)
async def test_what_cannot_be_graded_is_an_error_of_the_episode(
    sandbox: FakeSandbox, row: dict[str, Any], words: str
) -> None:
    session = session_of(sandbox, row, **CHECKED)
    await session.call({"code": "touch x"})

    with pytest.raises(EpisodeFailed, match=words):
        await session.check()


async def test_an_interpreter_without_a_check_grades_nothing() -> None:
    sandbox = FakeSandbox()

    assert await session_of(sandbox).check() is None
    assert sandbox.asked == []


@pytest.mark.parametrize(
    ("tool", "components", "words"),
    [
        ({"check_column": "tests"}, ["environment"], "check_column needs language shell"),
        ({"check_seconds": 5}, ["numeric"], "check_seconds has no effect without check_column"),
        (CHECKED, ["numeric"], "check_column, whose grade no entry of reward.components takes"),
        ({}, ["environment"], "give a tool of kind code_interpreter a check_column"),
        (CHECKED, ["environment"], ""),
    ],
)
def test_a_check_and_the_component_that_takes_its_grade_go_together(
    tool: dict[str, Any], components: list[str], words: str
) -> None:
    document: dict[str, Any] = {
        "name": "code",
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "rollout": {"episodes": {"kind": "tools", "tools": [{"kind": "code_interpreter", **tool}]}},
        "reward": {"components": [{"kind": kind} for kind in components]},
        "optimisation": {"steps": 1},
    }

    if not words:
        spec = validate_spec(document)
        assert validate_spec(spec.model_dump(mode="json")) == spec
        return
    with pytest.raises(InvalidSpec, match=words):
        validate_spec(document)


def test_an_experiment_with_an_interpreter_needs_a_sandbox() -> None:
    document: dict[str, Any] = {
        "name": "code",
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "rollout": {"episodes": {"kind": "tools", "tools": [{"kind": "code_interpreter"}]}},
        "reward": {"components": [{"kind": "numeric"}]},
        "optimisation": {"steps": 1},
        "resources": {"sandboxes": {"min": 1, "max": 2}},
    }

    spec = validate_spec(document)

    assert spec.runs_code and not spec.grades_code


def test_calls_that_wait_for_each_other_must_fit_into_a_step() -> None:
    slow = {"kind": "code_interpreter", "run_seconds": 20}

    with pytest.raises(ValueError, match="160 s, since calls of one interpreter wait"):
        ToolEpisodesConfig.model_validate({"kind": "tools", "tools": [slow]})
    ToolEpisodesConfig.model_validate({"kind": "tools", "tools": [slow], "max_parallel_calls": 2})
