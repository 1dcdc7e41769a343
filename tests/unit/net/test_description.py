"""What docstrings say to be raised becomes answers: statuses and codes are those of the classes."""

from typing import Any

import pytest
from fastapi import FastAPI

from flotilla.shared.errors import (
    DataError,
    FlotillaError,
    InvalidSpec,
    ModelError,
    NotFound,
    StalePolicyVersion,
    Unavailable,
)
from flotilla.shared.net.server.description import declared, describe, error_of


class Gone(FlotillaError):
    """Of this service alone."""

    code, title, status = "gone_for_good", "It is gone", 410


find = error_of(__name__)


def test_what_is_raised_is_taken_out_by_class() -> None:
    description = """Do it; at once.

Raises:
    NotFound: there is no such
        experiment.
    InvalidSpec: it has mistakes.
    DataError, ModelError: what it points to is gone.
    Unavailable: not now; try again.
    Gone: it is over.
    InvalidRequest: the rollout refuses it (400, 422).
    ValueError: which is no answer.
"""

    said = declared(description, find)

    assert said.text == "Do it; at once."
    assert said.refusals == {
        NotFound: "There is no such experiment.",
        InvalidSpec: "It has mistakes.",
        DataError: "What it points to is gone.",
        ModelError: "What it points to is gone.",
        Unavailable: "Not now; try again.",
        Gone: "It is over.",
    }
    assert said.passed_on == {400: "The rollout refuses it.", 422: "The rollout refuses it."}


def test_a_description_without_it_stays() -> None:
    assert declared("Look.", find) == ("Look.", {}, {})


def test_a_name_that_is_no_error_is_a_mistake() -> None:
    with pytest.raises(LookupError, match="names StalePolicyVersoin, which is no error of"):
        declared("Do it.\n\nRaises:\n    StalePolicyVersoin: it is old.\n", find)


def a_description() -> dict[str, Any]:
    app = FastAPI()

    @app.post("/v1/things/{name}")
    def change(name: str) -> None:
        """Change it.

        Raises:
            StalePolicyVersion: a newer one is there.
            Gone: it is over.
        """

    describe(app, __name__, lambda method, path: False)
    answers: dict[str, Any] = app.openapi()["paths"]["/v1/things/{name}"]["post"]["responses"]
    return answers


def codes_of(answer: dict[str, Any]) -> list[str]:
    schema = answer["content"]["application/problem+json"]["schema"]
    codes: list[str] = schema["properties"]["code"]["enum"]
    return codes


def test_an_answer_has_the_status_and_the_codes_of_its_classes() -> None:
    answers = a_description()

    assert answers["410"]["description"] == "It is over." and codes_of(answers["410"]) == ["gone_for_good"]
    assert answers["409"]["description"] == "A newer one is there."
    assert codes_of(answers["409"]) == sorted(
        ["action_not_allowed", "conflict", "idempotency_mismatch", StalePolicyVersion.code]
    )
    assert codes_of(answers["401"]) == ["unauthorized"] and codes_of(answers["400"]) == ["invalid_request"]
