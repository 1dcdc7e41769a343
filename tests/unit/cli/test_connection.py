"""Which gateway is meant, and what is missing to reach it, is said in words that can be typed."""

from pathlib import Path

import pytest

from flotilla.connection import open_client, typed
from shared.errors import Unauthorized, Unavailable


def test_a_missing_token_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(Unauthorized, match="set FLOTILLA_TOKEN, or FLOTILLA_TOKEN_FILE"):
        open_client("http://gateway", tmp_path, environment={})


async def test_a_token_is_taken_from_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from a file\n")

    for environment in ({"FLOTILLA_TOKEN": "t"}, {"FLOTILLA_TOKEN_FILE": str(file)}):
        await open_client("http://gateway", tmp_path, environment=environment).close()


def test_a_fleet_that_does_not_run_is_told_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=f"start one with `flotilla up --data {tmp_path}`"):
        open_client(None, tmp_path, environment={})


def test_after_a_run_its_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "arithmetic" / "fleet").mkdir(parents=True)

    with pytest.raises(Unavailable, match="runs/arithmetic are in `flotilla up --data runs/arithmetic/fleet`"):
        open_client(None, Path(".flotilla"), environment={})


@pytest.mark.parametrize(
    ("data", "command"),
    [(".flotilla", "flotilla down"), ("x", "flotilla down --data x"), ("a b", "flotilla down --data 'a b'")],
)
def test_a_command_names_the_directory_where_it_must(data: str, command: str) -> None:
    assert typed("down", Path(data)) == command
