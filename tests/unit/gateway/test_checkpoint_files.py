"""A checkpoint's files are those below the experiment's folder: no link that a trainer makes leads a reader further."""

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.lifecycle import origins
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.writes import PutCheckpoint
from flotilla.services.gateway.uploads.remote import RemoteCheckpoints
from flotilla.shared.checkpoints.folders import CHECKPOINTS, STATE_FILE, complete
from flotilla.shared.errors import FlotillaError
from flotilla.shared.samples.index import SampleIndex
from flotilla.shared.schemas.experiment import CheckpointView
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment
from tests.unit.gateway.stored import store_checkpoint

SECRET = "the gateway's token"
E = "tiny-1"
FILES = f"/v1/experiments/{E}/checkpoints/2/files"
LONGER = {"steps": 9, "groups_per_mini_batch": 2}


class Rig:
    """A gateway with an experiment whose trainer writes what it likes into its directory."""

    def __init__(self, gateway: GatewayState, data: Path, client: httpx.AsyncClient) -> None:
        self.gateway, self.data, self.client = gateway, data, client
        self.directory = data / "experiments" / E

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(path, headers={"Authorization": "Bearer t"})

    def forge(self, path: Path, **files: int) -> None:
        """Let a checkpoint say that it has more files, without checksums."""
        state = json.loads((path / STATE_FILE).read_text())
        state["files"] |= files
        (path / STATE_FILE).write_text(json.dumps(state))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    (tmp_path / "token").write_text(SECRET)
    gateway = a_gateway(data=tmp_path)
    directory = tmp_path / "experiments" / E
    spec = a_spec(optimisation=LONGER).model_dump(mode="json")
    await add_experiment(gateway, E, directory=str(directory), spec=spec)
    path = store_checkpoint(directory, 2, spec)
    async with gateway.store.transaction() as change:
        change.write(PutCheckpoint(E, CheckpointView(step=2, version=2, path=str(path), at="2030-01-01T00:00:00Z")))
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=tmp_path))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://x") as client:
        yield Rig(gateway, tmp_path, client)


async def test_a_file_is_sent_and_a_part_of_it(rig: Rig) -> None:
    name = "model/model.safetensors"
    part = await rig.client.get(f"{FILES}/{name}", headers={"Authorization": "Bearer t", "Range": "bytes=8-"})

    assert [file["name"] for file in (await rig.get(FILES)).json()["files"]] == [name, "optimizer.safetensors"]
    assert (await rig.get(f"{FILES}/{name}")).text == "weights of step 2"
    assert (part.status_code, part.text) == (206, "of step 2")


@pytest.mark.parametrize("path", ["/nowhere", "../../token", "{directory}", "{directory}/checkpoints/step-00000003"])
async def test_a_checkpoint_is_where_its_step_is_and_nowhere_else(rig: Rig, path: str) -> None:
    body = {"step": 4, "version": 4, "path": path.format(directory=rig.directory), "at": "2030-01-01T00:00:00Z"}
    answer = await rig.client.post(f"/v1/experiments/{E}/checkpoints", json=body, headers={"Authorization": "Bearer t"})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["allowed"] == f"{rig.directory}/checkpoints/step-00000004"
    assert [each.step for each in await rig.gateway.store.checkpoints(E)] == [2]


async def test_a_file_that_is_a_link_is_not_sent(rig: Rig) -> None:
    path = rig.directory / CHECKPOINTS / "step-00000002"
    (path / "token").symlink_to(rig.data / "token")
    rig.forge(path, token=len(SECRET))

    assert [(await rig.get(each)).status_code for each in (FILES, f"{FILES}/token")] == [404, 404]


@pytest.mark.parametrize("at", ["experiments/tiny-1", "experiments/tiny-1/checkpoints"])
async def test_a_folder_that_is_a_link_is_not_read(rig: Rig, at: str) -> None:
    elsewhere = rig.data / "elsewhere"
    (rig.data / at).rename(elsewhere)
    (rig.data / at).symlink_to(elsewhere)

    assert (await rig.get(FILES)).status_code == 404


@pytest.fixture
def swapped(rig: Rig) -> Any:
    """The checkpoint of step 2 as it was found whole; its folder has become a link to the gateway's own since."""
    path = rig.directory / CHECKPOINTS / "step-00000002"
    (path / "token").write_text("x" * len(SECRET))
    rig.forge(path, token=len(SECRET))
    [stored] = complete(path.parent, rig.directory.parent)
    path.rename(path.with_name("before"))
    path.symlink_to(rig.data)
    return stored


async def test_a_folder_that_becomes_a_link_after_it_was_looked_at_is_not_followed(swapped: Any) -> None:
    with pytest.raises(OSError, match="is a link"):
        swapped.open("token")


async def test_no_fork_takes_what_a_link_leads_to(rig: Rig, swapped: Any) -> None:
    target = rig.data / "experiments" / "fork-1"

    with pytest.raises((FlotillaError, OSError)):
        origins.take(swapped, a_spec(optimisation=LONGER), "fork-1", target)

    assert not target.exists()


async def test_no_copy_is_made_of_what_a_link_leads_to(rig: Rig, swapped: Any) -> None:
    remote = RemoteCheckpoints(f"file://{rig.data}/remote")

    with pytest.raises(OSError, match="is a link"):
        remote.upload(swapped, threading.Event())

    assert not list((rig.data / "remote").rglob("token"))


async def test_an_experiment_that_begins_from_another_by_name_follows_no_link(rig: Rig) -> None:
    path = rig.directory / CHECKPOINTS
    path.rename(rig.data / "elsewhere")
    path.symlink_to(rig.data / "elsewhere")
    commands: ExperimentCommands = rig.gateway.commands

    with pytest.raises(FlotillaError, match="no checkpoint"):
        await commands._stored(E)


async def test_samples_behind_links_are_not_read(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    folder = rig.directory / "samples"
    folder.mkdir()
    (folder / "step-00000001.parquet").symlink_to(rig.data / "token")
    (folder / ".index.sqlite").symlink_to(rig.data / "gateway.sqlite")
    index = SampleIndex(rig.directory)

    assert index.refresh(seconds=1.0) == (1, 0)

    index.close()
    assert "is a link" in caplog.text or "cannot be read" in caplog.text
    assert not (rig.data / "gateway.sqlite").exists()
