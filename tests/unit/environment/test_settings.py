"""A service that is told something wrong says which variable, and what is allowed, before it does anything."""

from pathlib import Path

import pytest

from flotilla.shared.environment.settings import Secrets, read_for_libraries, read_settings, secret_from, token_from
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


SECRETS = ("FLOTILLA_TOKEN", "FLOTILLA_SERVICE_TOKEN", "FLOTILLA_REDIS_URL", "FLOTILLA_DATABASE_URL")


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_read_from_the_file_that_its_variable_with_file_names(name: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hidden\n")

    assert secret_from({f"{name}_FILE": str(file)}, name) == "hidden"
    assert secret_from({f"{name}_FILE": str(file), name: "said"}, name) == "said"
    assert secret_from({}, name) == ""


def test_services_read_token_and_data_plane_from_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "redis").write_text("redis://:p@10.0.0.1:6379/0\n")

    found = read_settings(
        {"FLOTILLA_TOKEN_FILE": str(tmp_path / "token"), "FLOTILLA_REDIS_URL_FILE": str(tmp_path / "redis")}
    )

    assert (found.token, found.redis_url) == ("t", "redis://:p@10.0.0.1:6379/0")


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_without_a_secret_is_named_and_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")

    with pytest.raises(InvalidRequest, match=rf"empty \({name}_FILE\) is empty"):
        secret_from({f"{name}_FILE": str(tmp_path / "empty")}, name)
    with pytest.raises(InvalidRequest, match=rf"absent \({name}_FILE\) cannot be read: No such file"):
        secret_from({f"{name}_FILE": str(tmp_path / "absent")}, name)


def test_a_token_in_a_file_that_is_none_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("two words")

    with pytest.raises(InvalidRequest, match=r"\(FLOTILLA_SERVICE_TOKEN_FILE\) holds no token") as refusal:
        token_from({"FLOTILLA_SERVICE_TOKEN_FILE": str(tmp_path / "token")}, "FLOTILLA_SERVICE_TOKEN")

    assert "two words" not in refusal.value.detail


def test_a_service_without_a_data_plane_is_not_asked_for_one() -> None:
    assert read_settings({"FLOTILLA_TOKEN": "t"}, needs_redis=False).redis_url == ""
    assert read_settings(NEEDED, needs_redis=False).redis_url == "", "nor does it keep what it is told"
    with pytest.raises(InvalidRequest, match="FLOTILLA_REDIS_URL or FLOTILLA_REDIS_URL_FILE must be set"):
        read_settings({"FLOTILLA_TOKEN": "t"})


def test_a_secret_that_a_spec_names_is_read_from_variable_or_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    secrets = Secrets({"ONE": "1", "KEY_FILE": str(tmp_path / "key")})

    assert (secrets["ONE"], secrets["KEY"], secrets.get("OTHER")) == ("1", "s3cret", None)


def test_libraries_find_their_secrets_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hf_1\n")
    values = {"HF_TOKEN_FILE": str(tmp_path / "key")}

    read_for_libraries(values)

    assert values["HF_TOKEN"] == "hf_1"
