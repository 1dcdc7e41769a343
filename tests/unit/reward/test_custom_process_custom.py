import asyncio
from pathlib import Path

import pytest

from flotilla.services.reward.verifiers.custom_process import CustomVerifier, load_function
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

FUNCTIONS = """
import asyncio, threading, time
from flotilla.shared.schemas.grading import Grade

def length(sample):
    return len(sample.response)

async def later(sample):
    await asyncio.sleep(0)
    return 0.25

def none(sample):
    return None

def grade(sample):
    return Grade.scored(0.5, components={"style": 1.0})

def mapping(sample):
    return {"reward": 2, "metrics": {"words": 3}}

def nan(sample):
    return float("nan")

def text(sample):
    return "good"

def digits(sample):
    return "1.0"

def is_right(sample):
    return True

def mapping_of_a_string(sample):
    return {"reward": "1.0"}

def mapping_of_a_bool(sample):
    return {"reward": True}

def numpy_bool(sample):
    import numpy
    return numpy.bool_(True)

def numpy_float(sample):
    import numpy
    return numpy.float32(0.5)

def mapping_of_numpy(sample):
    import numpy
    return {"reward": numpy.int64(2)}

def array(sample):
    import numpy
    return numpy.zeros(2)

def raises(sample):
    x = 1
    raise KeyError("colour")

def leaves(sample):
    raise SystemExit(3)

def times_out_itself(sample):
    raise TimeoutError("its own")

async def hangs(sample):
    await asyncio.Event().wait()

def hangs_in_thread(sample):
    threading.Event().wait()

def two(sample, other):
    return 1.0

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "graders.py"
    path.write_text(FUNCTIONS)
    return path


async def grade_by(file: Path, function: str, timeout_seconds: float = 5.0) -> Grade:
    verifier = CustomVerifier(CustomConfig(path=f"{file}:{function}", timeout_seconds=timeout_seconds))
    (grade,) = await verifier.score([a_sample("four")])
    return grade


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("length", 4.0),
        ("later", 0.25),
        ("grade", 0.5),
        ("mapping", 2.0),
        ("numpy_float", 0.5),
        ("mapping_of_numpy", 2.0),
    ],
)
async def test_what_a_function_returns_is_the_reward(file: Path, function: str, reward: float) -> None:
    assert (await grade_by(file, function)).reward == reward


async def test_none_is_an_abstention(file: Path) -> None:
    assert (await grade_by(file, "none")).status is GradeStatus.ABSTAINED


async def test_an_exception_is_an_error_with_its_type_and_line(file: Path) -> None:
    grade = await grade_by(file, "raises")

    line = FUNCTIONS.splitlines().index('    raise KeyError("colour")') + 1
    assert grade.status is GradeStatus.ERROR
    assert grade.reason == f"KeyError at graders.py:{line}: 'colour'"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nan", "not finite"),
        ("text", "got the string 'good'"),
        ("digits", "a finite number (int or float), got the string '1.0'"),
        ("is_right", "got the bool true"),
        ("mapping_of_a_string", "reward: a reward is a finite number (int or float), got the string '1.0'"),
        ("mapping_of_a_bool", "got the bool true"),
        ("numpy_bool", "got a value of type bool"),
        ("array", "one finite number, got a value of type ndarray"),
        ("leaves", "SystemExit"),
        ("times_out_itself", "its own"),
    ],
)
async def test_what_is_no_reward_is_an_error(file: Path, function: str, reason: str) -> None:
    grade = await grade_by(file, function)

    assert grade.status is GradeStatus.ERROR
    assert reason in (grade.reason or "")


@pytest.mark.parametrize("function", ["hangs", "hangs_in_thread"])
async def test_a_function_that_hangs_is_an_error_after_its_time(file: Path, function: str) -> None:
    grade = await grade_by(file, function, timeout_seconds=0.02)

    assert grade.status is GradeStatus.ERROR
    assert "longer than 0.02 s" in (grade.reason or "")


async def test_cancelling_reaches_the_caller(file: Path) -> None:
    verifier = CustomVerifier(CustomConfig(path=f"{file}:hangs"))
    running = asyncio.create_task(verifier.score([a_sample()]))
    await asyncio.sleep(0)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("missing.py:f", "there is no file"),
        ("graders.py:f", "no function 'f'; it has: .*length"),
        ("graders.py:constant", "no function 'constant'"),
        ("graders.py:two", r"one argument.*two\(sample, other\)"),
        ("broken.py:f", "importing it failed: ZeroDivisionError at broken.py:2"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_start(file: Path, reference: str, message: str) -> None:
    (file.parent / "broken.py").write_text("x = 1\nx / 0\n")

    with pytest.raises(InvalidSpec, match=message):
        load_function(str(file.parent / reference))
