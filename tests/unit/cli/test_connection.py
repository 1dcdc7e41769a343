"""Which gateway is meant, and what is missing to reach it, is said in words that can be typed."""

import json
import os
from pathlib import Path

import pytest

from flotilla.connection import FLEET_FILE, FleetInfo, open_client, typed
from flotilla.shared.children.processes import birth_of
from flotilla.shared.errors import InvalidRequest, Unauthorized, Unavailable


def test_a_missing_token_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(Unauthorized, match="set FLOTILLA_TOKEN, or FLOTILLA_TOKEN_FILE"):
        open_client("http://gateway", tmp_path, environment={})


async def test_a_token_is_taken_from_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-a-file\n")

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


@pytest.mark.parametrize(
    "url", ["localhost:8470", "http://", "gateway", "ftp://gateway", "http://[::1", "http://g:99999", "http://a b:1"]
)
def test_what_is_no_address_is_refused_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no address of a gateway: it is written http://HOST:PORT or https://"):
        open_client(url, tmp_path, environment={"FLOTILLA_TOKEN": "t"})


@pytest.mark.parametrize("url", ["http://[::1]:8470", "https://gateway.example.com/flotilla", "http://127.0.0.1:1/"])
async def test_an_address_may_be_of_any_host(url: str, tmp_path: Path) -> None:
    await open_client(url, tmp_path, environment={"FLOTILLA_TOKEN": "t"}).close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"two words", b"two\nlines", "t\u00f6ken".encode()])
def test_a_file_without_a_token_is_named_and_not_repeated(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)

    with pytest.raises(
        InvalidRequest, match=r"secret \(FLOTILLA_TOKEN_FILE\) (is empty|holds no token|cannot be read)"
    ) as refusal:
        open_client("http://gateway", tmp_path, environment={"FLOTILLA_TOKEN_FILE": str(file)})

    assert "two" not in refusal.value.detail


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere \(FLOTILLA_TOKEN_FILE\) cannot be read: No such file"):
        open_client("http://gateway", tmp_path, environment={"FLOTILLA_TOKEN_FILE": str(tmp_path / "nowhere")})


def fleet_of(data: Path, **fields: object) -> None:
    place = {"gateway_url": "http://127.0.0.1:1", "token": "t", "redis_url": "r"}
    (data / FLEET_FILE).write_text(json.dumps({"pid": os.getpid(), **place, **fields}))


def test_a_fleet_whose_process_lives_is_found(tmp_path: Path) -> None:
    fleet_of(tmp_path, birth=birth_of(os.getpid()))

    assert FleetInfo.read(tmp_path).is_running


def test_another_process_of_the_same_id_is_not_the_fleet(tmp_path: Path) -> None:
    """`down` would end it otherwise: after a power cut, an id is soon another program's."""
    fleet_of(tmp_path, birth="2f1c0000-0000-4000-8000-000000000000/4711")

    with pytest.raises(Unavailable, match="has ended: start one with"):
        FleetInfo.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"pid": null}', '{"pid": "x"}'])
def test_a_damaged_note_of_a_fleet_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / FLEET_FILE).write_text(text)

    with pytest.raises(Unavailable, match="no fleet runs with the data directory"):
        FleetInfo.read(tmp_path)
