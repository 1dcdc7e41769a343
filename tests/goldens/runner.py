"""Runs cases and collects what became of them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from tests.goldens.adapters import adapter_for
from tests.goldens.case import Case, NotOffered
from tests.goldens.compare import differences, unchecked


class Outcome(StrEnum):
    """What became of a case."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"
    HANDLED = "handled"
    """The system's own result is a defect, a NaN or an error: ours must be finite, or a ValueError."""


@dataclass(frozen=True)
class Result:
    """A case's outcome, with the reason for anything but a pass."""

    case: Case
    outcome: Outcome
    reason: str = ""
    unchecked: tuple[str, ...] = field(default=())


def run(cases: Iterable[Case]) -> Iterator[Result]:
    """Run the cases one after another."""
    for case in cases:
        yield run_case(case)


def run_case(case: Case) -> Result:
    """Translate a case, run it and compare."""
    try:
        outputs = adapter_for(case)(case)
    except NotOffered as reason:
        return Result(case, Outcome.NOT_APPLICABLE, str(reason))
    except ValueError as error:
        if "raises" in case.flags:
            return Result(case, Outcome.HANDLED, f"refused: {str(error).splitlines()[0]}")
        return Result(case, Outcome.FAILED, f"ValueError: {error}")
    except Exception as error:  # one broken case must not hide the others
        return Result(case, Outcome.FAILED, f"{type(error).__name__}: {error}")
    if case.flags:
        return _handled(case, outputs)
    found = list(differences(case, outputs))
    if found:
        return Result(case, Outcome.FAILED, "; ".join(f"{entry.field}: {entry.detail}" for entry in found))
    left = tuple(unchecked(case, outputs))
    if len(left) == len(case.expected):
        return Result(case, Outcome.FAILED, "nothing was compared")
    return Result(case, Outcome.PASSED, unchecked=left)


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Count outcomes per family and system, and collect reasons."""
    families: dict[str, Counter[str]] = {}
    failed, reasons, compared = [], Counter[str](), Counter[str]()
    for result in results:
        family = f"{result.case.family}.{result.case.system}"
        families.setdefault(family, Counter())[result.outcome] += 1
        if result.outcome is Outcome.FAILED:
            failed.append({"family": family, "name": result.case.name, "reason": result.reason})
        elif result.outcome is not Outcome.PASSED:
            reasons[f"{family}: {result.outcome}: {result.reason}"] += 1
        compared.update(f"{family}: {name}" for name in result.unchecked)
    totals = sum(families.values(), Counter[str]())
    return {
        "families": {family: dict(counts) for family, counts in sorted(families.items())},
        "totals": dict(totals),
        "failed": failed,
        "reasons": dict(reasons),
        "fields_without_counterpart": dict(compared),
    }


def _handled(case: Case, outputs: dict[str, Any]) -> Result:
    broken = [name for name, value in outputs.items() if not _is_finite(value)]
    if broken:
        return Result(case, Outcome.FAILED, f"not finite: {', '.join(broken)}")
    return Result(case, Outcome.HANDLED, f"{', '.join(sorted(case.flags))}: ours is finite, not compared")


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_finite(entry) for entry in value.values())
    if isinstance(value, (Tensor, float, int)):
        return bool(torch.isfinite(torch.as_tensor(value)).all())
    return True
