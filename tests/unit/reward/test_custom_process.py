"""A function of the user's in a process of its own grades as it does here, and what it does there stays there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla.services.reward.verifiers.custom_process import CustomProcessVerifier
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.errors import InvalidSpec, WorkerDied
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.grading import GradingSample

FUNCTIONS = """
import os, sys, time
def by_length(sample):
    print("chatter")
    return len(sample.response)
async def later(sample):
    return {"reward": 1.0, "metrics": {"m": 2.0}}
def raises(sample):
    raise KeyError("x")
def ends(sample):
    os._exit(7)
def hangs(sample):
    time.sleep(60)
def token(sample):
    return float("FLOTILLA_TOKEN" in os.environ)
def peeks(sample):
    open(f"/proc/{os.getppid()}/mem", "rb")
    return 1.0
def forges(sample):
    os.write(3, b'"nonsense"\\n')
    return 1.0
"""


def a_sample(response: str = "four") -> GradingSample:
    return GradingSample(id="1/0", prompt="p", response=response)


@asynccontextmanager
async def a_verifier(
    folder: Path, function: str, timeout_seconds: float = 30.0
) -> AsyncIterator[CustomProcessVerifier]:
    (folder / "f.py").write_text(FUNCTIONS)
    config = CustomConfig(path=f"{folder}/f.py:{function}", timeout_seconds=timeout_seconds)
    verifier = CustomProcessVerifier(config, Places(code=(folder,)))
    try:
        yield verifier
    finally:
        await verifier.aclose()


@pytest.mark.parametrize(
    ("function", "reward", "reason"),
    [
        ("by_length", 4.0, None),
        ("later", 1.0, None),
        ("token", 0.0, None),
        ("raises", None, "KeyError at f.py:9: 'x'"),
        ("ends", None, "the process of the custom function ended with code 7"),
        ("hangs", None, "the function took longer than 0.2 s"),
        ("peeks", None, "PermissionError"),
    ],
)
async def test_it_grades_and_says_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, reward: float | None, reason: str | None
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")
    async with a_verifier(tmp_path, function, 0.2 if function == "hangs" else 30.0) as verifier:
        (grade,) = await verifier.score([a_sample()])

    assert grade.reward == reward
    assert reason is None or reason in str(grade.reason)


async def test_a_process_that_ended_is_started_again_and_fails_nobody_elses_samples(tmp_path: Path) -> None:
    async with a_verifier(tmp_path, "by_length") as verifier:
        await verifier.start()
        assert verifier.code.child is not None
        verifier.code.child.process.kill()
        await verifier.code.child.ended()

        grades = await verifier.score([a_sample("a" * n) for n in range(20)])

    assert [grade.reward for grade in grades] == list(range(20))


async def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    async with a_verifier(tmp_path, "hangs") as verifier:
        scoring = asyncio.create_task(verifier.score([a_sample()]))
        while verifier.code.child is None or not verifier.code.num_waiting:
            await asyncio.sleep(0.01)
        child = verifier.code.child

    assert child.has_ended
    assert "ended with code" in str((await scoring)[0].reason)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("def g(sample): ...", "no function 'f'; it has: g"),
        ("1/0", "importing it failed"),
        ("import os; os._exit(1)", "ended while it loaded"),
    ],
)
async def test_what_cannot_be_loaded_is_said_at_the_start(tmp_path: Path, body: str, match: str) -> None:
    (tmp_path / "f.py").write_text(body)
    verifier = CustomProcessVerifier(CustomConfig(path=f"{tmp_path}/f.py:f"), Places(code=(tmp_path,)))

    with pytest.raises(InvalidSpec, match=match):
        await verifier.start()


async def test_who_is_killed_while_it_loads_is_no_fault_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    verifier = CustomProcessVerifier(CustomConfig(path=f"{tmp_path}/f.py:f"), Places(code=(tmp_path,)))

    with pytest.raises(WorkerDied, match="ended by SIGKILL while it loaded"):
        await verifier.start()


def test_code_is_only_run_from_where_the_operator_allows_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)

    with pytest.raises(InvalidSpec, match="FLOTILLA_CODE_FOLDERS"):
        CustomProcessVerifier(CustomConfig(path=f"{tmp_path}/f.py:by_length"), Places())
