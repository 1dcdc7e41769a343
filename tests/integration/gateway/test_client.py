"""The Python client, asynchronous and not, against a real gateway with scripted services."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

import flotilla
from flotilla.client import AsyncClient
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.shared.errors import Conflict, DeadlineExceeded, InvalidSpec, NotFound, Unauthorized, Unavailable
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import ExperimentState
from tests.integration.gateway.fleet import (
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_gateway,
    a_spec,
)
from tests.unit.gateway.stored import store_checkpoint
from tests.unit.trainer.test_storage import a_state


def a_spec_file(folder: Path, **changes: Any) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(a_spec(folder, **changes)))
    return path


def train_from_a_script(url: str, spec: Path) -> None:
    """What a user would write; called on a thread, as the gateway runs on this one."""
    with flotilla.Client(url, TOKEN) as client:
        draft = client.create(spec, overrides={"optimisation.steps": 3, "name": "mine"})
        assert (draft.state, draft.name, draft.total_steps) == (ExperimentState.DRAFT, "mine", 3)
        client.start("mine")

        events = list(client.events("mine"))
        view = client.wait(draft.id, timeout_seconds=60)

        assert (view.state, view.step) == (ExperimentState.COMPLETED, 3)
        assert [event.id for event in events] == sorted({event.id for event in events})
        assert [event.data["state"] for event in events if event.type == "experiment_state"][-1] == "completed"
        assert next(client.events("mine", after=events[-2].id)) == events[-1]
        train, evaluation = client.ledger("mine")
        assert (train.issued, train.trained, train.balanced, evaluation.issued) == (6, 6, True, 0)
        assert [point.step for point in client.metrics("mine", ["loss"])] == [1, 2, 3]
        assert [point.step for point in client.follow_metrics("mine", ["loss"])] == [1, 2, 3]
        assert {point.name for point in client.follow_metrics(draft.id)} >= {"loss"}
        assert client.checkpoints("mine") == []  # the scripted trainer records none
        assert {service.kind for service in client.services()} == {"rollout", "reward", "trainer"}
        assert client.fleet().experiments == ()
        assert client.diagnosis("mine").problem is None
        client.delete("mine")
        assert client.experiments() == []


async def test_a_script_trains_and_reads_everything(tmp_path: Path, redis_url: str) -> None:
    settings = GatewaySettings(token=TOKEN, redis_url=redis_url, data=tmp_path / "data")
    async with (
        a_gateway(settings) as (url, _),
        a_fleet(url, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer),
    ):
        await asyncio.to_thread(train_from_a_script, url, a_spec_file(tmp_path))


async def test_the_asynchronous_client_finds_changes_and_stops(url: str, tmp_path: Path) -> None:
    async with AsyncClient(url, TOKEN) as client:
        first = await client.create(a_spec(tmp_path), start=True)
        with pytest.raises(DeadlineExceeded, match="is starting at step 0 after 0 s"):
            await client.wait(first.id, timeout_seconds=0)
        assert (await client.experiment()).id == first.id

        changed = await client.change(first.id, {"weight": 2.5})
        second = await client.create(a_spec(tmp_path))

        assert changed.spec["resources"]["weight"] == 2.5
        assert (await client.experiment("tiny")).id == first.id, "a name means the active one"
        with pytest.raises(Conflict, match=second.id):
            await client.experiment("tiny-")
        assert {each.id for each in await client.experiments()} == {first.id, second.id}
        await client.stop(first.id)
        stopped = await client.wait(first.id, lambda view: view.state is ExperimentState.STOPPED, timeout_seconds=60)

        store_checkpoint(Path(stopped.directory), 1, dict(stopped.spec))
        fork = await client.fork(first.id, {"name": "other", "seed": 5}, step=1)
        extended = await client.extend(first.id, stopped.total_steps + 1)

        assert fork.origin is not None
        assert (fork.origin.experiment_id, fork.step, fork.spec["seed"]) == (first.id, 1, 5)
        assert (extended.state, extended.total_steps) == (ExperimentState.STARTING, stopped.total_steps + 1)


async def test_errors_say_what_was_wrong(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOTILLA_GATEWAY_URL", raising=False)
    with pytest.raises(Unavailable, match="start one with `flotilla up --data"):
        AsyncClient(data=tmp_path)
    with pytest.raises(Unavailable, match="start one with `flotilla up --data"):
        flotilla.Client(data=tmp_path)
    async with AsyncClient(url, "wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.experiments()
    async with AsyncClient(url, TOKEN) as client:
        with pytest.raises(NotFound, match="there is no experiment; `flotilla start FILE` makes one"):
            await client.start("nobody")
        with pytest.raises(InvalidSpec, match=r"optimisation\.stepps"):
            await client.create(a_spec_file(tmp_path), overrides={"optimisation.stepps": 1})
        with pytest.raises(ValueError, match="overrides apply to a file"):
            await client.create(a_spec(tmp_path), overrides={"seed": 1})


WEIGHTS = bytes(range(256)) * 4000


async def a_checkpoint(gateway: GatewayClient, experiment_id: str, directory: Path, step: int) -> Path:
    """Write a checkpoint and record it, as a trainer does."""

    def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / "model.safetensors").write_bytes(WEIGHTS)
        (folder / "optimizer.safetensors").write_bytes(b"moments")

    storage = CheckpointStorage(directory / "checkpoints", keep=5)
    path = storage.write(step, fill, lambda files: a_state(step, files, experiment_id=experiment_id))
    body = {"step": step, "version": step, "path": str(path), "at": "2026-01-01T00:00:00Z"}
    await gateway.call("POST", f"/v1/experiments/{experiment_id}/checkpoints", body=body)
    return path


async def test_a_model_is_found_here_or_fetched_through_the_gateway(
    url: str, client: GatewayClient, tmp_path: Path
) -> None:
    async with AsyncClient(url, TOKEN) as user:
        made = await user.create(a_spec(tmp_path))
        with pytest.raises(NotFound, match="has no checkpoint yet"):
            await user.fetch_model(made.id)
        paths = [await a_checkpoint(client, made.id, Path(made.directory), step) for step in (1, 2)]

        assert await user.fetch_model(made.id) == paths[1] / "model"
        assert await user.fetch_model(made.id, step=1) == paths[0] / "model"

        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "model.safetensors.part").write_bytes(WEIGHTS[:1000])
        fetched = await user.fetch_model(made.id, tmp_path / "mine")
        assert {path.name: path.read_bytes() for path in fetched.iterdir()} == {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
        }

        files = f"/v1/experiments/{made.id}/checkpoints/2/files"
        for name in ("no", "state.json", "%2e%2e/%2e%2e/secret", "model/../../../secret"):
            with pytest.raises(NotFound):
                await client.call("GET", f"{files}/{name}")
        (paths[0] / "model" / "config.json").unlink()
        with pytest.raises(NotFound, match=r"is not at .* it was removed \(checkpoint.keep\),"):
            await user.fetch_model(made.id, tmp_path / "first", step=1)
        with pytest.raises(NotFound, match="no checkpoint of step 9"):
            await user.fetch_model(made.id, step=9)
    async with AsyncClient(url, "wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.fetch_model(made.id, tmp_path / "theirs")
