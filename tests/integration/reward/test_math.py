"""math-verify in its child process."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.reward.verifiers.comparing import MathVerifier
from flotilla.shared.config.sections.reward import MathConfig
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample


@asynccontextmanager
async def a_verifier(
    child: str | None = None, folder: Path | None = None, **fields: Any
) -> AsyncIterator[MathVerifier]:
    if child is None:
        verifier = MathVerifier(MathConfig(**fields))
    else:
        assert folder is not None
        (folder / "child.py").write_text(child)
        verifier = MathVerifier(MathConfig(**fields), command=(sys.executable, str(folder / "child.py")))
    try:
        yield verifier
    finally:
        await verifier.aclose()


async def test_equal_expressions_are_right() -> None:
    pairs = [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$x = 3$ hence \boxed{3}", "3", 1.0),
        (r"The answer is $\sqrt{8}$.", r"2\sqrt{2}", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{4}", "5", 0.0),
        ("I do not know.", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{12}", r"$12$", 1.0),
    ]

    async with a_verifier(timeout_seconds=60) as verifier:
        found = await verifier.score([a_sample(response, label) for response, label, _ in pairs])

    assert [(grade.reward, grade.reason) for grade in found] == [(reward, None) for _, _, reward in pairs]


async def test_a_label_that_is_not_mathematics_is_an_error() -> None:
    async with a_verifier(timeout_seconds=60) as verifier:
        (found,) = await verifier.score([a_sample(r"\boxed{3}", "")])

    assert (found.status, found.reward) == (GradeStatus.ERROR, None)


async def test_what_sympy_cannot_finish_is_an_error_and_the_next_sample_is_graded() -> None:
    hard = r"\boxed{9^{9^{9^{9}}}}"

    async with a_verifier(timeout_seconds=3) as verifier:
        started = time.monotonic()
        slow, fine = await verifier.score([a_sample(hard, r"9^{9^{9^{8}}}"), a_sample(r"\boxed{3}", "3")])

    # Whether sympy hangs, fails or tells them apart is its own affair; it must not take the next sample with it.
    assert slow.reward in (None, 0.0)
    assert fine.reward == 1.0
    assert time.monotonic() - started < 60


HANGS = """
import json, sys, time
input()
print('"serving"\\n{"ready": null}', flush=True)
for line in sys.stdin:
    number, asked = json.loads(line)
    if "hang" in line:
        while True:
            pass
    print(json.dumps([number, {"verdict": True}]), flush=True)
"""


async def test_an_over_time_comparison_is_an_error_and_its_process_is_replaced(tmp_path: Path) -> None:
    async with a_verifier(HANGS, tmp_path, timeout_seconds=0.5) as verifier:
        slow, fine = await verifier.score([a_sample("hang", "1"), a_sample("1", "1")])

    assert (slow.status, slow.reward) == (GradeStatus.ERROR, None)
    assert slow.reason == "the comparison took longer than 0.5 s"
    assert fine.reward == 1.0


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        (
            'print(\'"serving"\\n{"ready": null}\', flush=True)\ninput()\ninput()\nraise SystemExit(3)',
            "ended with code 3",
        ),
        ("raise SystemExit(1)", "did not start"),
        ("print('hello', flush=True)", "did not start"),
    ],
)
async def test_a_child_that_dies_is_an_error(tmp_path: Path, child: str, reason: str) -> None:
    async with a_verifier(child, tmp_path) as verifier:
        (found,) = await verifier.score([a_sample("1", "1")])

    assert (found.status, found.reward) == (GradeStatus.ERROR, None)
    assert reason in (found.reason or "")


async def test_cancelling_does_not_leave_a_stale_answer(tmp_path: Path) -> None:
    slow_then_false = HANGS.replace(
        "while True:\n            pass", "time.sleep(0.2); print(json.dumps([number, {'verdict': False}]))"
    )

    async with a_verifier(slow_then_false, tmp_path) as verifier:
        cancelled = asyncio.create_task(verifier.score([a_sample("hang", "1")]))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

        (found,) = await verifier.score([a_sample("1", "1")])

    assert found.reward == 1.0
