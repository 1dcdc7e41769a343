"""A run whose fleet could never start the engine is refused before anything is made."""

import sys
from typing import Any

import pytest

from flotilla.packages import check_engine
from flotilla.shared.environment.settings import ENGINE_PYTHONS
from flotilla.shared.errors import InvalidRequest, InvalidSpec
from tests.unit.gateway.builders import a_spec


@pytest.mark.parametrize(("kind", "variable"), ENGINE_PYTHONS.items())
def test_a_server_needs_an_interpreter_or_an_address(kind: str, variable: str) -> None:
    def an_engine(**fields: Any) -> Any:
        return a_spec(rollout={"engine": {"kind": kind, **fields}})

    with pytest.raises(InvalidSpec, match=rf"needs {variable}.*or rollout\.engine\.url"):
        check_engine(an_engine(), {})
    with pytest.raises(InvalidRequest, match="must be the absolute path of a Python interpreter, got 'python3'"):
        check_engine(an_engine(), {variable: "python3"})

    check_engine(an_engine(), {variable: sys.executable})
    check_engine(an_engine(url="http://127.0.0.1:30000"), {})
    check_engine(a_spec(), {})
