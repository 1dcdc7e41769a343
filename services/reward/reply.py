"""Reading what a grader answered: grades or a ``GradingFailed``, soon and in little memory, whoever wrote it.

The bytes are bounded before they are parsed, and so is the number of values: parsing holds the event loop, for as long
as it makes objects.
"""

import math
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.client.bounded_json import parse_json
from flotilla.shared.schemas.grading import GRADING_SCHEMA, Grade
from flotilla.shared.schemas.reward_number import reward_number

MAX_ANSWER_BYTES: Final = 1024 * 1024
MAX_NAMES: Final = 64
"""Most components, and most metrics, of one sample."""
MAX_NAME_CHARACTERS: Final = 200


def read_json(content: bytes) -> object:
    """Parse a bounded answer; whole numbers become floats.

    Raises:
        GradingFailed: it is not JSON, or has too many values or levels.
    """
    if len(content) > MAX_ANSWER_BYTES:
        raise GradingFailed(f"the grader's answer is longer than {MAX_ANSWER_BYTES} bytes")
    try:
        return parse_json(content)
    except ValueError as error:
        raise GradingFailed(f"the grader's answer {error}") from None


def parse_grades(answer: object, num_samples: int, name: str) -> list[Grade]:
    """Read an answer in our own schema (``GradingResponse``). A bad grade is an error of its sample alone.

    Args:
        answer: the parsed JSON.
        num_samples: how many grades it must have.
        name: id of the request; the answer need not have it, but must not have another one.

    Raises:
        GradingFailed: the answer as a whole does not say what belongs to which sample.
    """
    if not isinstance(answer, Mapping) or not isinstance(grades := answer.get("grades"), list):
        raise GradingFailed("the answer has no list `grades`")
    if answer.get("version", GRADING_SCHEMA) != GRADING_SCHEMA:
        version = answer["version"]
        given = f"{version:g}" if isinstance(version, float) else f"of a {type(version).__name__}"
        raise GradingFailed(f"the answer has schema version {given}, this one reads {GRADING_SCHEMA}")
    if answer.get("id") not in (None, name):
        raise GradingFailed("the answer has the id of another request")
    if len(grades) != num_samples:
        raise GradingFailed(f"the answer has {len(grades)} grades for {num_samples} samples")
    return [_grade(given) for given in grades]


def _grade(given: object) -> Grade:
    for field in ("components", "metrics"):
        named = given.get(field) if isinstance(given, Mapping) else None
        if isinstance(named, Mapping) and not _are_short(named):
            return Grade.error(
                f"the grader's {field} have over {MAX_NAMES} names, or longer than {MAX_NAME_CHARACTERS} characters"
            )
    try:
        return Grade.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "grade"
        return Grade.error(f"the grader's {where} is not valid: {first['msg'].removeprefix('Value error, ')}")
    except RecursionError:
        return Grade.error("the grader's grade has too many levels")


def _are_short(named: Mapping[object, object]) -> bool:
    return len(named) <= MAX_NAMES and all(len(str(name)) <= MAX_NAME_CHARACTERS for name in named)


def parse_openrlhf(answer: object, num_samples: int) -> list[Grade]:
    """Read an answer in OpenRLHF's form: lists ``rewards`` and, optionally, ``scores`` and ``extra_logs`` by name.

    A reward of null is an abstention. ``scores`` and ``extra_logs`` become metrics.

    Raises:
        GradingFailed: a list is missing or has another length than there are samples, or there are too many names.
    """
    if not isinstance(answer, Mapping):
        raise GradingFailed("the answer is not an object")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise GradingFailed("`extra_logs` is not an object")
    if not _are_short(logs):
        raise GradingFailed(
            f"`extra_logs` has more than {MAX_NAMES} names, or longer than {MAX_NAME_CHARACTERS} characters"
        )
    columns = {str(name): column for name, column in logs.items()}
    if answer.get("scores") is not None:
        columns["score"] = answer["scores"]
    for name, column in {"rewards": answer.get("rewards"), **columns}.items():
        if not isinstance(column, list) or len(column) != num_samples:
            length = len(column) if isinstance(column, list) else "no list of"
            raise GradingFailed(f"the answer has {length} {name} for {num_samples} samples")
    grades = []
    for index, reward in enumerate(answer["rewards"]):
        metrics = {name: float(column[index]) for name, column in columns.items() if _is_finite(column[index])}
        if reward is None:
            grades.append(Grade.abstained())
        else:
            grades.append(_scored(reward, metrics))
    return grades


def _scored(reward: object, metrics: Mapping[str, float]) -> Grade:
    try:
        return Grade.scored(reward_number(reward), metrics=metrics)
    except ValueError as error:
        return Grade.error(f"the grader's reward is not valid: {error}")


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
