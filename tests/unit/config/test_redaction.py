"""What others may not see of a spec is left out of it, and nothing else is."""

import time
from typing import Any

import pytest

from flotilla.shared.config.redaction import redacted, redacted_line
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


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer SeCrEt-SeCrEt-SeCrEt",
        "Authorization: Token SeCrEt",
        "FLOTILLA_TOKEN=SeCrEt-SeCrEt-SeCrEt",
        "http://h/v1/gradings/1?experiment=e&token=SeCrEt-SeCrEt-SeCrEt",
        '{"api_key": "SeCrEt-SeCrEt-SeCrEt"}',
        r'{"body": "{\"api_key\": \"SeCrEt\"}"}',
        r'"{\\\"password\\\": \\\"SeCrEt\\\"}"',
        "GET /x?sig=SeCrEt HTTP/1.1",
        "https://host/x?v=1&key=SeCrEt",
        "s3://bucket/x?X-Amz-Signature=SeCrEt",
        "X-Auth: SeCrEt",
        "'x-auth-key': 'SeCrEt'",
        "Cookie: SeCrEt",
        "python serve.py --api-key SeCrEt --port 80",
        "['serve', '--api-key', 'SeCrEt']",
        "serve --hf-token=SeCrEt",
        "redis://:SeCrEt-SeCrEt-SeCrEt@host:6379/0",
        "the token flt_SeCrEt-SeCrEt-SeCrEt was used",
        "key sk-SeCrEtSeCrEtSeCrEt",
        "x" * 60 + "_token=SeCrEt",
    ],
)
def test_what_looks_like_a_secret_is_left_out_of_a_line(text: str) -> None:
    assert "SeCrEt" not in redacted_line(text)


@pytest.mark.parametrize(
    "text",
    [
        "num_tokens 12, tokens/s 4.5; the token budget is 8 of group 3 at http://host:80/x",
        "num_tokens=12 tokenizer: /models/x key=tasks --max-tokens 12 --port 80",
        "the author: nobody; KeyError: 'x' of http://host/x?page=2&keyword=y",
    ],
)
def test_ordinary_words_stay_in_a_line(text: str) -> None:
    assert redacted_line(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "x",
        "token",
        "-",
        "--token ",
        "?",
        "?token",
        "&sig",
        "://",
        "a@",
        "\\",
        'token\\"',
        "token ",
        " ",
        "bearer ",
        "=",
        "sk-",
    ],
)
def test_a_line_is_read_in_proportion_to_its_length_whatever_it_repeats(piece: str) -> None:
    text = piece * (100_000 // len(piece))

    began = time.process_time()
    redacted_line(text)

    # A pattern that is quadratic in such a text takes minutes, one in proportion some hundredths of a second.
    assert time.process_time() - began < 5


@pytest.mark.parametrize("piece", ["-", "--token", "--x", "api-", "--token="])
def test_the_arguments_of_a_spec_are_read_in_proportion_to_their_length(piece: str) -> None:
    text = piece * (100_000 // len(piece))

    began = time.process_time()
    redacted({"command": [text, text]})

    assert time.process_time() - began < 5
