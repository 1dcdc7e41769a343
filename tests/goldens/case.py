"""The golden files: their cases, decoded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class NotOffered(Exception):
    """A variant that this project deliberately does not have; the message says why."""


@dataclass(frozen=True)
class Case:
    """One golden case.

    Args:
        system: whose numbers these are.
        family: what they are about.
        name: for people.
        function: the upstream function, without its path.
        source: the upstream file that the function is in; "" where the case names none.
        config: settings as that system names them.
        inputs: tensors where the JSON holds numbers in rows, else as in the JSON.
        expected: likewise.
        tolerance: replaces the default one.
        flags: of nan_expected, system_defect, raises.
    """

    system: str
    family: str
    name: str
    function: str
    source: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    tolerance: dict[str, float] | None
    flags: frozenset[str] = field(default_factory=frozenset)


def read_folder(folder: Path) -> Iterator[Case]:
    """Read every case of every golden file in a folder."""
    for path in sorted(folder.glob("*.json")):
        yield from read_cases(path)


def read_cases(path: Path) -> Iterator[Case]:
    """Read every case of one golden file; none from a file of another schema."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "cases" in content:
        for case in content["cases"]:
            yield _case(content, case)


def _case(content: dict[str, Any], case: dict[str, Any]) -> Case:
    dtype = torch.float64 if case.get("dtype") == "float64" else torch.float32
    flags = {flag for flag in ("nan_expected", "system_defect") if case.get(flag)}
    if "raises" in case["expected"]:
        flags.add("raises")
    tolerance = case.get("tolerance")
    return Case(
        system=content["system"].lower(),
        family=content["family"],
        name=case["name"],
        function=case["function"].split("::")[-1],
        source=case["function"].rpartition("::")[0],
        config={name: _plain(value) for name, value in case["config"].items()},
        inputs={name: decoded(value, dtype) for name, value in case["inputs"].items()},
        expected={name: decoded(value, dtype) for name, value in case["expected"].items()},
        tolerance={"rtol": tolerance, "atol": tolerance} if isinstance(tolerance, float) else tolerance,
        flags=frozenset(flags),
    )


def _plain(value: Any) -> Any:
    """Decode the strings that stand for numbers, and leave rows as they are."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return SPECIAL.get(value, value) if isinstance(value, str) else value


def decoded(value: Any, dtype: torch.dtype) -> Any:
    """Turn rows of numbers into a tensor, and the strings that stand for NaN and infinities into floats."""
    if isinstance(value, str):
        return SPECIAL.get(value, value)
    if isinstance(value, dict):
        return {name: decoded(entry, dtype) for name, entry in value.items()}
    if not isinstance(value, list):
        return value
    leaves, is_rectangular = list(_leaves(value)), _is_rectangular(value)
    if not leaves or not is_rectangular or not all(_is_number(leaf) for leaf in leaves):
        return [decoded(entry, dtype) for entry in value]
    numbers = _replaced(value)
    is_integer = all(isinstance(leaf, int) for leaf in leaves)
    return torch.tensor(numbers, dtype=torch.long if is_integer else dtype)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


def _is_number(leaf: Any) -> bool:
    return (isinstance(leaf, (int, float)) and not isinstance(leaf, bool)) or (
        isinstance(leaf, str) and leaf in SPECIAL
    )


def _is_rectangular(value: Any) -> bool:
    if not isinstance(value, list) or not any(isinstance(entry, list) for entry in value):
        return True
    if not all(isinstance(entry, list) for entry in value):
        return False
    return len({len(entry) for entry in value}) == 1 and all(_is_rectangular(entry) for entry in value)


def _replaced(value: Any) -> Any:
    if isinstance(value, list):
        return [_replaced(entry) for entry in value]
    return SPECIAL[value] if isinstance(value, str) else value
