"""Samples for tests of verifiers."""

from typing import Any

from flotilla.shared.schemas.grading import GradingSample


def a_sample(response: str = "", label: str | None = None, **fields: Any) -> GradingSample:
    return GradingSample(**{"id": "0/0", "prompt": "p", "response": response, "label": label} | fields)
