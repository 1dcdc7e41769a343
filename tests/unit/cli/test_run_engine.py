"""A run whose fleet could never start the engine is refused before anything is made."""

import sys
from typing import Any

import pytest

from flotilla.packages import check_engine
from shared.errors import InvalidRequest, InvalidSpec
from tests.unit.gateway.builders import a_spec


def an_engine(**fields: Any) -> Any:
    return a_spec(rollout={"engine": {"kind": "sglang", **fields}})


def test_sglang_needs_an_interpreter_or_a_server() -> None:
    with pytest.raises(InvalidSpec, match=r"needs FLOTILLA_SGLANG_PYTHON.*or rollout\.engine\.url"):
        check_engine(an_engine(), {})
    with pytest.raises(InvalidRequest, match="must be the absolute path of a Python interpreter, got 'python3'"):
        check_engine(an_engine(), {"FLOTILLA_SGLANG_PYTHON": "python3"})

    check_engine(an_engine(), {"FLOTILLA_SGLANG_PYTHON": sys.executable})
    check_engine(an_engine(url="http://127.0.0.1:30000"), {})
    check_engine(a_spec(), {})
