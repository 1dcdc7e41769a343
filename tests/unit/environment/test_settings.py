"""A service that is told something wrong says which variable, and what is allowed, before it does anything."""

import pytest

from flotilla.shared.environment.settings import read_settings
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.streams.redis.connection import connect

NEEDED = {"FLOTILLA_TOKEN": "t", "FLOTILLA_REDIS_URL": "redis://127.0.0.1:6379/0"}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLOTILLA_LOG_LEVEL", "loud", "FLOTILLA_LOG_LEVEL must be DEBUG or INFO or .*, got 'LOUD'"),
        (
            "FLOTILLA_GATEWAY_URL",
            "gateway:8470",
            "'gateway:8470' is no address of a gateway: it is written http://HOST",
        ),
        ("FLOTILLA_PORT", "http", "FLOTILLA_PORT must be a number from 0 to 65535, got 'http'"),
        ("FLOTILLA_LEASE_SECONDS", "0", "FLOTILLA_LEASE_SECONDS must be a number of seconds above 0, got '0'"),
        ("FLOTILLA_TOKEN", "two words", "FLOTILLA_TOKEN holds no token: a token is one word"),
        ("FLOTILLA_GRADER_NETWORKS", "home", "FLOTILLA_GRADER_NETWORKS must be networks, such as"),
        ("FLOTILLA_SGLANG_PYTHON", "python", "FLOTILLA_SGLANG_PYTHON must be the absolute path of a Python"),
    ],
)
def test_a_wrong_variable_is_named_with_what_is_allowed(variable: str, value: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_settings({**NEEDED, variable: value})


def test_levels_are_read_in_either_case() -> None:
    assert read_settings({**NEEDED, "FLOTILLA_LOG_LEVEL": "debug"}).log_level == "DEBUG"
    assert read_settings({**NEEDED, "FLOTILLA_LOG_LEVEL": ""}).log_level == "INFO"


@pytest.mark.parametrize("url", ["localhost:6379", "http://:secret@h:1", "redis://:secret@h:99999/0", "secret"])
def test_what_is_no_address_of_a_redis_server_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is written redis://\[:PASSWORD@\]HOST:PORT/DB") as refusal:
        connect(url)

    assert "secret" not in refusal.value.detail
