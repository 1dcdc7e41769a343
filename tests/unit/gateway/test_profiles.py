"""Traces of the profiler are listed and sent by their names, and nothing else that lies beside them."""

import gzip
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.telemetry.profiles import PROFILES, engine_trace, trainer_trace, write_trace
from tests.unit.gateway.builders import a_gateway, add_experiment

E = "tiny-1"
PATH = f"/v1/experiments/{E}/profiles"


def write_nothing(path: str) -> None:
    Path(path).write_text("{}")


async def test_whole_traces_alone_are_listed_and_sent(tmp_path: Path) -> None:
    gateway = a_gateway(data=tmp_path)
    directory = tmp_path / "experiments" / E
    directory.mkdir(parents=True)
    (tmp_path / "token").write_text("secret")
    await add_experiment(gateway, E, directory=str(directory))
    folder = directory / PROFILES
    names = [engine_trace(3, 77, "rollout-1f2e3d4c"), trainer_trace(4, 0)]
    for name in names:
        write_trace(folder, name, write_nothing)
    (folder / f".{trainer_trace(5, 0)}").write_text("{")
    (folder / "notes.txt").write_text("mine")
    (folder / trainer_trace(6, 0)).symlink_to(tmp_path / "token")
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=tmp_path))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://gateway") as client:

        async def get(path: str) -> httpx.Response:
            return await client.get(path, headers={"Authorization": "Bearer t"})

        listed = (await get(PATH)).json()["items"]
        sent = await get(f"{PATH}/{names[1]}")
        refused = [await get(f"{PATH}/{name}") for name in (trainer_trace(6, 0), "notes.txt", "..%2F..%2Ftoken")]

    assert [each["name"] for each in listed] == names
    assert sent.status_code == 200 and gzip.decompress(sent.content) == b"{}"
    assert [each.status_code for each in refused] == [404, 404, 404]
