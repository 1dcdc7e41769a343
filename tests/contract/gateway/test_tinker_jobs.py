"""Training jobs of the Tinker API among the experiments: listed, shown, audited, with checkpoints and a ledger."""

import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.tinker.tinker import Tinker
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.queue import Request
from flotilla.shared.tinker.records import MANIFEST, Model, Saved, Session, Update
from flotilla.shared.tinker.sessions import ENDED, Run
from tests.unit.gateway.builders import a_gateway

TOKEN = "the-operators-token"
RUN = "s:train:0"
SAVED = "tinker://s:train:0/weights/a"


class MemoryRedis:
    """As much of queue and sessions as training jobs need, in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Run] = {}
        self.taken: set[str] = set()
        self.noted: list[Update] = []
        self.is_away = False

    async def session(self, session_id: str) -> Session:
        """Find a session."""
        return Session(owner="operator", created=0.0)

    async def submit(self, request: Request, digest: str, now: float, record: Model | None = None) -> bool:
        """Take a request."""
        is_new = request.id not in self.taken
        self.taken.add(request.id)
        if record is not None:
            self.kept[record.model_id] = Run(record, now, "", True, 3, 9, 7, 1, 1)
        return is_new

    async def model(self, model_id: str) -> Model | None:
        """Find a model."""
        return self.kept[model_id].model if model_id in self.kept else None

    async def runs(self, model_id: str, owner: str = "", offset: int = 0, limit: int = 100) -> tuple[int, list[Run]]:
        """List models, newest first."""
        if self.is_away:
            raise Unavailable("Redis is away")
        found = [run for name, run in reversed(self.kept.items()) if model_id in {"", name}]
        return len(found), found[offset : offset + limit]

    async def updates(self, model_id: str, after: int = 0) -> tuple[int, list[Update]]:
        """List what is known of a model's updates."""
        return len(self.noted), self.noted[after:]


@pytest.fixture
def redis() -> MemoryRedis:
    return MemoryRedis()


@pytest.fixture
async def client(redis: MemoryRedis, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    queue: Any = redis
    gateway: Any = a_gateway(token=TOKEN, data=tmp_path)
    tinker = Tinker(tmp_path, tmp_path, queue, queue, ManualClock())
    app = create_app(GatewaySettings(TOKEN, "redis://nowhere", tmp_path, tinker_model=tmp_path))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway, "tinker": tinker}}, receive, send)

    transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}", "X-API-Key": f"tml-{TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as found:
        yield found


async def make(client: httpx.AsyncClient, tmp_path: Path, number: int = 0) -> None:
    body = {"session_id": "s", "model_seq_id": number, "base_model": tmp_path.name, "lora_config": {"rank": 4}}
    answer = await client.post("/api/v1/create_model", json=body)
    assert answer.status_code == 200, answer.text


def save(data: Path) -> None:
    directory = SavedPath.read(SAVED).below(data)
    directory.mkdir(parents=True)
    saved = Saved(path=SAVED, owner="operator", created=5.0, step=3, num_bytes=1, has_optimizer=True)
    (directory / MANIFEST).write_text(saved.model_dump_json())


async def shown(client: httpx.AsyncClient, path: str = "") -> Any:
    answer = await client.get(f"/v1/experiments{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_training_job_is_listed_and_shown_as_an_experiment_without_a_spec(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await make(client, tmp_path)

    (listed,) = (await shown(client))["items"]

    assert listed == await shown(client, f"/{RUN}")
    facts = {name: listed[name] for name in ("id", "kind", "state", "step", "total_steps", "spec", "problem", "origin")}
    assert facts == {
        "id": RUN,
        "kind": "tinker",
        "state": "running",
        "step": 3,
        "total_steps": 0,
        "spec": {},
        "problem": None,
        "origin": None,
    }


@pytest.mark.parametrize(
    ("closed", "is_open", "state"),
    [("", False, "stopped"), (ENDED, False, "stopped"), ("request 5 was lost", False, "failed")],
)
async def test_one_whose_session_ended_is_stopped_and_one_whose_requests_were_lost_has_failed(
    client: httpx.AsyncClient, redis: MemoryRedis, closed: str, is_open: bool, state: str
) -> None:
    redis.kept[RUN] = Run(Model(model_id=RUN, session_id="s", owner="me"), 1.0, closed, is_open, 0, 1, 1, 0, 0)

    found = await shown(client, f"/{RUN}")

    assert found["state"] == state
    assert (found["problem"] or {}).get("cause") == ("request 5 was lost" if state == "failed" else None)


async def test_its_ledger_counts_its_requests(client: httpx.AsyncClient, tmp_path: Path) -> None:
    await make(client, tmp_path)

    found = await shown(client, f"/{RUN}/ledger")

    assert found == {"requests": {"accepted": 9, "answered": 7, "failed": 1, "waiting": 1}}


async def test_its_losses_are_series_by_update_and_a_cursor_continues_them(
    client: httpx.AsyncClient, redis: MemoryRedis, tmp_path: Path
) -> None:
    await make(client, tmp_path)
    redis.noted = [
        Update(step=step, grad_norm=0.5 * step, learning_rate=1e-3, loss=9.0 - step if step < 3 else None, seconds=step)
        for step in (1, 2, 3)
    ]

    found = await shown(client, f"/{RUN}/series?names=loss/*,grad_norm")
    later = await shown(client, f"/{RUN}/series?names=grad_norm&after=2")

    columns = {each["name"]: (each["steps"], each["values"], each["seconds"]) for each in found["items"]}
    assert columns == {
        "grad_norm": ([1, 2, 3], [0.5, 1.0, 1.5], [1.0, 2.0, 3.0]),
        "loss/total": ([1, 2], [8.0, 7.0], [1.0, 2.0]),
    }
    assert [(each["name"], each["steps"]) for each in later["items"]] == [("grad_norm", [3])]
    assert (found["next"], later["next"]) == ("3", "3")
    strange = await client.get("/v1/experiments/x:train:0/series?names=grad_norm")
    assert strange.status_code == 404


async def test_what_was_saved_of_it_are_its_checkpoints_and_what_came_of_them_its_lineage(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await make(client, tmp_path)
    save(tmp_path)
    body = {"session_id": "s", "model_seq_id": 1, "path": SAVED, "optimizer": True}

    await client.post("/api/v1/load_weights", json=body)

    (kept,) = (await shown(client, f"/{RUN}/checkpoints"))["items"]
    assert (kept["step"], kept["path"]) == (3, SAVED)
    origin = (await shown(client, "/s:train:1"))["origin"]
    assert (origin["experiment_id"], origin["step"], origin["path"]) == (RUN, 3, SAVED)


async def test_who_made_it_and_who_changed_what_was_saved_is_audited_once(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    for _ in range(2):
        await make(client, tmp_path)
    save(tmp_path)
    await client.post(f"/api/v1/training_runs/{RUN}/checkpoints/weights/a/publish")
    await client.delete(f"/api/v1/training_runs/{RUN}/checkpoints/weights/a")

    found = (await shown(client, f"/{RUN}/audit"))["items"]

    assert [each["action"] for each in found] == ["delete_checkpoint", "publish_checkpoint", "create"]
    assert {each["actor"] for each in found} == {"operator"}


async def test_a_load_that_is_asked_for_again_is_audited_once(client: httpx.AsyncClient, tmp_path: Path) -> None:
    await make(client, tmp_path)
    save(tmp_path)

    for _ in range(3):
        body = {"model_id": RUN, "seq_id": 1, "path": SAVED, "optimizer": True}
        assert (await client.post("/api/v1/load_weights", json=body)).status_code == 200

    found = (await shown(client, f"/{RUN}/audit"))["items"]
    assert [each["action"] for each in found] == ["load", "create"]


async def test_what_was_saved_for_it_is_downloaded_by_whoever_has_a_signed_address(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await make(client, tmp_path)
    path = SavedPath(RUN, Kind.EXTERNAL, "a")
    path.below(tmp_path).mkdir(parents=True)
    (path.below(tmp_path) / "adapter_config.json").write_text("{}")
    (path.below(tmp_path) / "adapter_model.safetensors").write_bytes(b"weights")
    saved = Saved(path=str(path), owner="operator", created=5.0, step=3, num_bytes=9)
    (path.below(tmp_path) / MANIFEST).write_text(saved.model_dump_json())
    asked = f"/api/v1/training_runs/{RUN}/checkpoints/external_weights/a/external_weights_urls"

    urls = (await client.get(asked)).json()["urls"]

    nobody: dict[str, str] = {"Authorization": "", "X-API-Key": ""}
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    url = urls["adapter_model.safetensors"]
    assert (await client.get(url, headers=nobody)).content == b"weights"
    wrong = (
        url.replace("adapter_model.safetensors", "adapter_config.json"),
        url.replace("expires=", "expires=9"),
        url.partition("&")[0],
        url.replace("/a/", "/b/"),
    )
    for each in wrong:
        assert (await client.get(each, headers=nobody)).status_code == 401, each
    assert (await client.get(asked.replace("/external_weights/", "/weights/"))).status_code == 404
    led = await client.get(asked.replace("external_weights_urls", "archive"))
    assert (led.status_code, "Expires" in led.headers) == (302, True)
    whole = await client.get(led.headers["Location"], headers=nobody)
    assert int(whole.headers["Content-Length"]) == len(whole.content)
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
        assert {each.name: tar.extractfile(each).read() for each in tar} == {  # type: ignore[union-attr]
            "adapter_config.json": b"{}",
            "adapter_model.safetensors": b"weights",
        }
    deleted = await client.delete(f"/api/v1/training_runs/{RUN}/checkpoints/external_weights/a")
    assert deleted.status_code == 204
    assert (await client.get(url, headers=nobody)).status_code == 404


@pytest.mark.parametrize(
    ("lora", "recipients", "detail"),
    [({"rank": 4}, ["age1x"], "age_encryption_recipients"), (None, None, "is of adapters here")],
)
async def test_what_cannot_be_saved_to_be_downloaded_is_refused(
    client: httpx.AsyncClient, tmp_path: Path, lora: dict[str, int] | None, recipients: list[str] | None, detail: str
) -> None:
    made = {"session_id": "s", "model_seq_id": 0, "base_model": tmp_path.name, "lora_config": lora}
    await client.post("/api/v1/create_model", json=made)
    body = {"model_id": RUN, "seq_id": 1, "path": "a", "age_encryption_recipients": recipients}

    answer = await client.post("/api/v1/save_weights_external", json=body)

    assert answer.status_code == 422
    assert detail in answer.json()["detail"]


async def test_experiments_are_listed_while_redis_is_away(client: httpx.AsyncClient, redis: MemoryRedis) -> None:
    redis.is_away = True

    assert (await shown(client))["items"] == []
    assert (await client.get(f"/v1/experiments/{RUN}")).status_code == 503


async def test_one_that_is_not_there_is_not_found_and_none_is_steered_from_here(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await make(client, tmp_path)

    for path in ("/s:train:7", "/s:train:7/ledger", "/s:train:7/checkpoints", f"/{RUN}/metrics", f"/{RUN}/events"):
        assert (await client.get(f"/v1/experiments{path}")).status_code == 404, path
    assert (await client.post(f"/v1/experiments/{RUN}/stop")).status_code == 404
