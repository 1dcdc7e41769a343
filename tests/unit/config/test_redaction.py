"""What others may not see of a spec is left out of it, and nothing else is."""

from typing import Any

import pytest

from flotilla.shared.config.redaction import redacted
from flotilla.shared.config.spec import ExperimentSpec
from tests.unit.gateway.builders import a_spec


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://user:hunter2@grader:80/x?a=1", "http://***@grader:80/x?a=1"),
        ("https://tok3n@host", "https://***@host"),
        ("http://a:p@ss@host/", "http://***@host/"),
        ("https://host/x?token=abc&v=1", "https://host/x?token=***&v=1"),
        ("https://host/x?v=1&X-Api_Key=abc", "https://host/x?v=1&X-Api_Key=***"),
        ("https://host/x?sig=abc&se=2", "https://host/x?sig=***&se=2"),
        ("s3://bucket/x?AWSAccessKeyId=a&X-Amz-Signature=b", "s3://bucket/x?AWSAccessKeyId=***&X-Amz-Signature=***"),
        ("cannot read http://u:p@h/x: no", "cannot read http://***@h/x: no"),
        ("postgresql://me:pw@db/mlflow", "postgresql://***@db/mlflow"),
        ("who@example.org", "who@example.org"),
        ("http://host/@user/x", "http://host/@user/x"),
        ({"headers": {"X": "a"}, "env": {"B": "c"}}, {"headers": {"X": "***"}, "env": {"B": "***"}}),
        ({"api_key": "a", "Authorization": "b"}, {"api_key": "***", "Authorization": "***"}),
        (["serve", "--token=a", "--api-key", "b", "c"], ["serve", "--token=***", "--api-key", "***", "c"]),
        (
            {"secret_env": "NAME", "max_new_tokens": 3, "key": "x"},
            {"secret_env": "NAME", "max_new_tokens": 3, "key": "x"},
        ),
    ],
)
def test_secrets_are_left_out_and_nothing_else(given: Any, shown: Any) -> None:
    assert redacted(given) == shown


def test_a_spec_without_secrets_stays_as_it_is() -> None:
    spec: ExperimentSpec = a_spec()

    assert redacted(spec.model_dump(mode="json")) == spec.model_dump(mode="json")
