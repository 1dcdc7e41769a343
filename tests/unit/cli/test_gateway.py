"""A command that takes long says what it waits for, on standard error, and one that does not says nothing."""

import argparse
import asyncio
from pathlib import Path

import httpx
import pytest

from flotilla.cli import output
from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import telling
from flotilla.shared.errors import Unavailable


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(output, "AGAIN_SECONDS", 0.01)


async def until_told(capsys: pytest.CaptureFixture[str], words: str, times: int) -> None:
    said = ""
    async with asyncio.timeout(30):
        while said.count(words) < times:
            await asyncio.sleep(0.005)
            said += capsys.readouterr().err


async def test_a_long_wait_is_told_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    async with telling("waiting for rain"):
        await until_told(capsys, "waiting for rain (0 s)\n", 2)


async def test_a_short_one_is_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SILENT_SECONDS", 60.0)

    async with telling("waiting for rain"):
        await asyncio.sleep(0)

    assert capsys.readouterr().err == ""


async def test_what_fails_inside_fails_outside() -> None:
    with pytest.raises(Unavailable, match="no rain"):
        async with telling("waiting for rain"):
            raise Unavailable("no rain")


async def test_a_command_says_which_gateway_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered = asyncio.Event()

    async def send(client: httpx.AsyncClient, request: httpx.Request, **_: object) -> httpx.Response:
        await answered.wait()
        return httpx.Response(200, json={"experiments": [], "idle": {}}, request=request)

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    monkeypatch.setenv("FLOTILLA_TOKEN", "t")
    async with open_gateway(argparse.Namespace(gateway="http://far:1", data=str(tmp_path))) as client:
        call = asyncio.create_task(client.fleet())
        await until_told(capsys, "waiting for http://far:1: GET /v1/fleet, at most 10 s", 1)
        answered.set()

        assert (await call).experiments == ()
