"""Whether outputs agree with a case's expectation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.goldens.case import Case

INTEGER_TOLERANCE = 0.0


@dataclass(frozen=True)
class AtMost:
    """An output for which smaller is better: any value up to the expected one is right."""

    value: float


@dataclass(frozen=True)
class Difference:
    """One output that does not agree."""

    field: str
    detail: str


def differences(case: Case, outputs: dict[str, Any]) -> Iterator[Difference]:
    """Compare every output with the expectation of the same name.

    Rows of tokens are compared where ``response_mask`` is 1, gradients everywhere; integers exactly.
    """
    mask = case.inputs.get("response_mask")
    for name, expected in case.expected.items():
        if name in outputs:
            yield from _compare(case, name, outputs[name], expected, mask)


def unchecked(case: Case, outputs: dict[str, Any]) -> Iterator[str]:
    """Name the expectations that no output was compared with."""
    for name, expected in case.expected.items():
        if name not in outputs:
            yield name
        elif isinstance(expected, dict):
            yield from (f"{name}.{key}" for key in expected if key not in outputs[name])


def _compare(case: Case, name: str, actual: Any, expected: Any, mask: Any) -> Iterator[Difference]:
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key in actual:
                yield from _compare(case, f"{name}.{key}", actual[key], value, None)
    elif isinstance(actual, AtMost):
        limit = float(expected)
        if not actual.value <= limit + 1e-6 * abs(limit):
            yield Difference(name, f"{actual.value} is above {limit}")
    elif isinstance(expected, Tensor):
        yield from _compare_tensors(case, name, torch.as_tensor(actual), expected, mask)
    elif isinstance(expected, list):
        if list(actual) != expected:
            yield Difference(name, f"{actual} is not {expected}")
    elif isinstance(expected, bool) or not isinstance(expected, (int, float)):
        if actual != expected:
            yield Difference(name, f"{actual!r} is not {expected!r}")
    else:
        relative, absolute = _tolerance(case, name, isinstance(expected, int))
        if not math.isclose(float(actual), expected, rel_tol=relative, abs_tol=absolute):
            yield Difference(name, f"{float(actual)!r} is not {expected!r}")


def _compare_tensors(case: Case, name: str, actual: Tensor, expected: Tensor, mask: Any) -> Iterator[Difference]:
    if actual.shape != expected.shape:
        yield Difference(name, f"shape {tuple(actual.shape)} is not {tuple(expected.shape)}")
        return
    relative, absolute = _tolerance(case, name, not expected.is_floating_point())
    close = torch.isclose(actual.detach().double(), expected.double(), rtol=relative, atol=absolute)
    if isinstance(mask, Tensor) and expected.shape[: mask.dim()] == mask.shape and "grad" not in name:
        close |= ~mask.bool()
    if not bool(close.all()):
        first = tuple(int(index) for index in (~close).nonzero()[0])
        worst = float((actual.double() - expected.double())[~close].abs().max())
        yield Difference(
            name,
            f"{float(actual[first])!r} is not {float(expected[first])!r} at {first}, largest difference {worst:.3g}",
        )


def _tolerance(case: Case, name: str, is_integer: bool) -> tuple[float, float]:
    if case.tolerance is not None:
        return float(case.tolerance.get("rtol", 1e-4)), float(case.tolerance.get("atol", 1e-5))
    if "grad" in name:
        return 1e-3, 1e-6
    return (INTEGER_TOLERANCE, INTEGER_TOLERANCE) if is_integer else (1e-4, 1e-5)
