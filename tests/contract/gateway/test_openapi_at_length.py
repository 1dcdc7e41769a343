"""Each bound and each type of each value of each request, with each kind of token and with none."""

from typing import Any

import hypothesis
import pytest

from tests.contract.gateway.test_openapi import OPERATOR, SCHEMA, SETTINGS, ask

pytestmark = pytest.mark.long


SPECS = {"method": "POST", "path": "/v1/experiments"}
TOKENS = [OPERATOR, None, "wrong"]


@SCHEMA.exclude(**SPECS).parametrize()
@pytest.mark.parametrize("token", TOKENS)
@hypothesis.settings(SETTINGS, max_examples=100, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
def test_everybody_gets_documented_answers(case: Any, token: str | None) -> None:
    ask(case, token)


@SCHEMA.include(**SPECS).parametrize()
@pytest.mark.parametrize("token", TOKENS)
@hypothesis.settings(SETTINGS, max_examples=20)
def test_any_spec_gets_a_documented_answer(case: Any, token: str | None) -> None:
    """At random alone: a spec has hundreds of keys, and each bound of each makes thousands of requests."""
    ask(case, token)
