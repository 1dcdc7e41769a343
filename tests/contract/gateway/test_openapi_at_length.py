"""Each bound and each type of each value of each request, with each kind of token and with none."""

from typing import Any

import hypothesis
import pytest

from tests.contract.gateway.test_openapi import OPERATOR, SCHEMA, SETTINGS, ask

pytestmark = pytest.mark.long


@SCHEMA.parametrize()
@pytest.mark.parametrize("token", [OPERATOR, None, "wrong"])
@hypothesis.settings(SETTINGS, max_examples=100, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
def test_everybody_gets_documented_answers(case: Any, token: str | None) -> None:
    ask(case, token)
