"""The HTTP interface itself: tokens, problems, idempotency, pages, events, health."""

import asyncio
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flotilla.services.gateway.access.policy import OPEN_PATHS
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.body_limits import limit_of
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import (
    ActionNotAllowed,
    DataError,
    Forbidden,
    InvalidRequest,
    InvalidSpec,
    ModelError,
    NotFound,
    Unauthorized,
)
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.samples.folder import SampleFolder
from tests.integration.gateway.fleet import PATIENCE_SECONDS, TOKEN, a_spec, until
from tests.unit.samples.builders import a_step

AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
REGISTRATION = {"kind": "rollout", "address": "http://h", "host": "h", "pid": 1, "incarnation": "i"}


def routes_of(settings: GatewaySettings) -> list[tuple[str, str]]:
    document = create_app(settings).openapi()
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


async def test_nothing_but_health_answers_without_the_token(url: str, settings: GatewaySettings) -> None:
    routes = routes_of(settings)
    mutating = [route for route in routes if route[0] != "GET"]
    assert len(mutating) >= 14 and len(routes) >= 30, "the walk must see every route"
    async with httpx.AsyncClient(base_url=url) as http:
        for method, template in routes:
            path = re.sub(r"\{\w+\}", "1" * 32, template)
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                answer = await http.request(method, path, headers=headers, content=b"{}")
                if template in OPEN_PATHS and method == "GET":
                    assert answer.status_code == 200, path
                else:
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["content-type"] == "application/problem+json"
                    assert answer.json()["code"] == "unauthorized"


async def test_a_made_token_may_do_what_its_scope_is_for_until_it_is_revoked(url: str, client: GatewayClient) -> None:
    made = await client.call("POST", "/v1/tokens", body={"name": "dash", "scope": "reader"})
    async with GatewayClient(url, made["token"]) as reader:
        assert (await reader.call("GET", "/v1/experiments"))["items"] == []
        assert (await reader.call("GET", "/v1/tokens/self"))["name"] == "dash"
        with pytest.raises(
            Forbidden, match=r"needs the scope operator; this token \(reader dash\) has the scope reader"
        ):
            await reader.call("POST", "/v1/tokens", body={"name": "mine", "scope": "operator"})
        listed = (await client.call("GET", "/v1/tokens"))["items"]

        await client.call("DELETE", "/v1/tokens/dash")

        with pytest.raises(Unauthorized):
            await reader.call("GET", "/v1/experiments")
    assert [(each["name"], each["created_by"]) for each in listed] == [("dash", "operator")]
    assert "token" not in listed[0]


async def test_no_token_is_in_the_database(url: str, client: GatewayClient, settings: GatewaySettings) -> None:
    made = await client.call("POST", "/v1/tokens", body={"name": "dash", "scope": "operator"})
    registered = await client.call("POST", "/v1/services", body=REGISTRATION)

    kept = b"".join(path.read_bytes() for path in settings.data.glob("gateway.sqlite*"))

    assert hashlib.sha256(made["token"].encode()).hexdigest().encode() in kept
    for secret in (made["token"], registered["token"], registered["peers"]["trainer"], TOKEN):
        assert secret.encode() not in kept


async def test_the_audit_trail_names_who_it_was(url: str, client: GatewayClient, tmp_path: Path) -> None:
    made = await client.call("POST", "/v1/tokens", body={"name": "anna", "scope": "operator"})
    async with GatewayClient(url, made["token"]) as anna:
        created = await anna.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    await client.call("POST", f"/v1/experiments/{created['id']}/start")

    records = (await client.call("GET", f"/v1/experiments/{created['id']}/audit"))["items"]

    assert [(each["action"], each["actor"]) for each in records] == [("start", "operator"), ("create", "operator anna")]


async def test_a_service_registers_as_what_its_token_is_for(url: str, client: GatewayClient) -> None:
    made = await client.call("POST", "/v1/tokens", body={"name": "gpu", "scope": "service", "kind": "rollout"})
    async with GatewayClient(url, made["token"]) as joining:
        with pytest.raises(Forbidden, match="registers services of kind rollout, not trainer"):
            await joining.call("POST", "/v1/services", body=REGISTRATION | {"kind": "trainer"})
        registered = await joining.call("POST", "/v1/services", body=REGISTRATION)
        joining.adopt(registered["token"])
        own = f"/v1/services/{registered['service_id']}"
        assert (await joining.call("PUT", f"{own}/status", body={}))["state"] == "idle"
        with pytest.raises(Forbidden):
            await joining.call("POST", f"{own}/drain")
        await joining.call("DELETE", own)


def test_every_route_is_in_the_documentation(settings: GatewaySettings) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rest.md").read_text()

    missing = [f"{method} {path}" for method, path in routes_of(settings) if f"{method} {path}" not in page]

    assert missing == []


async def test_the_interface_describes_itself(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        document = (await http.get("/openapi.json")).json()

    body = document["paths"]["/v1/experiments"]["post"]["requestBody"]["content"]
    assert "optimisation" in body["application/json"]["schema"]["properties"]


async def test_a_status_call_gets_the_same_answer_by_the_short_way_and_by_its_route(
    url: str, client: GatewayClient
) -> None:
    service_id = (await client.call("POST", "/v1/services", body=REGISTRATION))["service_id"]
    kinds = ["application/json", "application/json; charset=utf-8"]
    async with httpx.AsyncClient(base_url=url, headers=AUTHORISED) as http:
        for path, body, status in (
            (f"/v1/services/{service_id}/status", '{"state": "idle"}', 200),
            (f"/v1/services/{service_id}/status?wait=0.1", "{}", 200),
            (f"/v1/services/{service_id}/status", '{"state": 3}', 422),
            (f"/v1/services/{service_id}/status?wait=-1", "{}", 422),
            ("/v1/services/rollout-1/status?wait=1", "{}", 404),
        ):
            short, long = [await http.put(path, content=body, headers={"Content-Type": kind}) for kind in kinds]
            assert short.status_code == long.status_code == status
            assert (short.json(), short.headers["content-type"]) == (long.json(), long.headers["content-type"])


async def test_a_caller_that_hangs_up_while_it_waits_keeps_a_short_rest_of_its_lease(
    served: tuple[str, GatewayState], client: GatewayClient
) -> None:
    url, gateway = served
    service_id = (await client.call("POST", "/v1/services", body=REGISTRATION))["service_id"]
    path = f"/v1/services/{service_id}/status"
    tag = (await client.call("PUT", path, body={}))["tag"]
    service = gateway.registry.get(service_id)
    # Less than the lease would last that it gets for its waiting.
    async with asyncio.timeout(20.0), httpx.AsyncClient(base_url=url, headers=AUTHORISED, timeout=60.0) as http:
        waiting = asyncio.create_task(http.put(path, json={"acknowledged": tag}, params={"wait": 30}))
        while service.lease_ends < time.monotonic() + 25:
            await asyncio.sleep(0.01)
        waiting.cancel()
        while service.lease_ends > time.monotonic() + gateway.settings.rest_seconds:
            await asyncio.sleep(0.01)


async def test_health_and_gauges_are_open(url: str, client: GatewayClient) -> None:
    await client.call("POST", "/v1/services", body=REGISTRATION)
    async with httpx.AsyncClient(base_url=url) as http:
        alive, ready, gauges = [await http.get(path) for path in ("/healthz", "/readyz", "/metrics")]

    assert (alive.json(), ready.json()) == ({"status": "ok"}, {"status": "ready"})
    assert 'flotilla_services{kind="rollout"} 1' in gauges.text


async def test_the_gauges_name_no_experiment_without_the_token(url: str, client: GatewayClient, tmp_path: Path) -> None:
    name = (await client.call("POST", "/v1/experiments", body=a_spec(tmp_path)))["id"]
    await client.call("POST", f"/v1/experiments/{name}/start")

    async with httpx.AsyncClient(base_url=url) as http:
        bare, wrong = [await http.get("/metrics", headers=each) for each in ({}, {"Authorization": "Bearer no"})]
        full = await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})

    assert (name in bare.text, name in wrong.text, name in full.text) == (False, False, True)


async def test_the_database_is_its_owners_alone(settings: GatewaySettings, url: str) -> None:
    made = [path for path in settings.data.iterdir() if path.name.startswith("gateway.sqlite")]

    assert [oct(path.stat().st_mode & 0o077) for path in made if not path.name.endswith(".lock")] == ["0o0"] * 3
    assert url


async def test_a_spec_comes_in_json_or_yaml(url: str, tmp_path: Path) -> None:
    spec = a_spec(tmp_path)
    async with httpx.AsyncClient(base_url=url, headers=AUTHORISED) as http:
        from_json = await http.post("/v1/experiments", json=spec)
        from_yaml = await http.post(
            "/v1/experiments", content=yaml.safe_dump(spec), headers={"Content-Type": "application/yaml"}
        )

    assert from_json.status_code == from_yaml.status_code == 201
    assert from_json.json()["spec"] == from_yaml.json()["spec"]
    assert from_json.json()["state"] == "draft"


async def test_a_bad_spec_names_every_field(client: GatewayClient, tmp_path: Path) -> None:
    spec = a_spec(tmp_path) | {"optimisation": {"steps": 0, "learning_rte": 1}, "sed": 1}

    with pytest.raises(InvalidSpec) as error:
        await client.call("POST", "/v1/experiments", body=spec)

    assert {entry["path"] for entry in error.value.errors} == {"optimisation.steps", "optimisation.learning_rte", "sed"}
    assert any("learning_rate" in str(entry["allowed"]) for entry in error.value.errors)


@pytest.mark.parametrize(
    ("section", "values", "kind", "words"),
    [
        ("data", {"path": "/nowhere/rows.jsonl"}, DataError, "there is no file"),
        ("data", {"path": "rows.jsonl"}, InvalidSpec, "absolute path"),
        ("data", {"prompt_column": "question"}, DataError, "columns there: label, prompt"),
        ("model", {"path": "/nowhere/model"}, ModelError, "there is no directory"),
        ("evaluation", {"path": "/nowhere/heldout.jsonl"}, DataError, "there is no file"),
        (
            "reward",
            {"components": [{"kind": "custom", "path": "/nowhere/f.py:g"}]},
            InvalidSpec,
            "FLOTILLA_CODE_FOLDERS",
        ),
    ],
)
async def test_what_a_spec_points_to_is_checked_before_anything_starts(
    client: GatewayClient, tmp_path: Path, section: str, values: dict[str, Any], kind: type[Exception], words: str
) -> None:
    spec = a_spec(tmp_path)
    spec[section] = spec.get(section, {}) | values

    with pytest.raises(kind, match=words):
        await client.call("POST", "/v1/experiments", body=spec)

    assert (await client.call("GET", "/v1/experiments"))["items"] == []


async def test_an_action_that_is_not_allowed_says_which_are(client: GatewayClient, tmp_path: Path) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    path = f"/v1/experiments/{created['id']}"

    with pytest.raises(ActionNotAllowed, match="allowed now: start, delete"):
        await client.call("POST", f"{path}/pause")

    await client.call("DELETE", path)
    with pytest.raises(NotFound):
        await client.call("GET", path)
    audit = (await client.call("GET", f"{path}/audit"))["items"]
    assert [entry["action"] for entry in audit] == ["delete", "create"]


async def test_an_experiment_that_cannot_start_says_what_it_waits_for_within_a_second(
    client: GatewayClient, tmp_path: Path
) -> None:
    seconds = []
    for _ in range(4):  # a machine that is busy elsewhere delays one, not all of them
        created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path), params={"start": True})
        started = time.monotonic()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (view := await client.call("GET", f"/v1/experiments/{created['id']}"))["problem"] is None:
                await asyncio.sleep(0.02)
        seconds.append(time.monotonic() - started)
        assert view["state"] == "starting"
        assert view["problem"]["component"] == "scheduler"
        assert view["problem"]["cause"] == "waiting for 1 trainer and 1 rollout and 1 reward to register"

    assert min(seconds) < 1.0


async def test_the_same_key_and_body_get_the_first_answer_again(
    served: tuple[str, GatewayState], tmp_path: Path
) -> None:
    url, gateway = served
    spec = json.dumps(a_spec(tmp_path))
    headers = AUTHORISED | {"Idempotency-Key": "one"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        first, second = await asyncio.gather(*(http.post("/v1/experiments", content=spec) for _ in range(2)))
        other_body = await http.post("/v1/experiments", content=spec.replace("tiny", "other"))
        other_query = await http.post("/v1/experiments?start=true", content=spec)
        refused = [await http.post("/v1/experiments", content="[]", headers={"Idempotency-Key": "two"}) for _ in "ab"]
        unauthorised = await http.post("/v1/experiments", content=spec, headers={"Authorization": "Bearer wrong"})

    assert (first.status_code, first.json()) == (second.status_code, second.json())
    assert first.status_code == 201 and len(list(gateway.repository)) == 1
    for answer in (other_body, other_query):
        assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_mismatch")
    assert [answer.status_code for answer in refused] == [422, 422]
    assert refused[0].json() == refused[1].json()
    assert unauthorised.status_code == 401, "a stored answer is behind the token too"


async def test_bodies_have_a_limit(url: str) -> None:
    body = b"x" * (limit_of("POST", "/v1/experiments").max_bytes + 1)

    async def in_parts() -> Any:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    async with httpx.AsyncClient(base_url=url, headers=AUTHORISED) as http:
        for content in (body, in_parts()):
            answer = await http.post("/v1/experiments", content=content)
            assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_lists_are_paged(client: GatewayClient) -> None:
    for number in range(5):
        await client.call(
            "POST",
            "/v1/services",
            body=REGISTRATION | {"incarnation": f"i{number}", "pid": number + 1, "address": f"http://h:{number + 1}"},
        )
    seen: list[str] = []
    cursor = None
    while True:
        page = await client.call("GET", "/v1/services", params={"limit": 2, "after": cursor})
        seen += [item["service_id"] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break

    assert len(seen) == len(set(seen)) == 5
    assert (await client.call("GET", "/v1/services", params={"kind": "sandbox"}))["items"] == []
    assert len((await client.call("GET", "/v1/services", params={"kind": "rollout"}))["items"]) == 5
    with pytest.raises(InvalidRequest):
        await client.call("GET", "/v1/services", params={"after": "nonsense"})


async def test_metrics_are_stored_once_per_step_and_followed_by_cursor(client: GatewayClient, tmp_path: Path) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    path = f"/v1/experiments/{created['id']}/metrics"
    for step, loss in ((1, 0.5), (2, 0.4), (2, 0.3)):
        await client.call("POST", path, body={"step": step, "version": step, "values": {"loss": loss, "kl": 0.0}})

    page = await client.call("GET", path, params={"names": "loss"})
    assert [(item["step"], item["value"]) for item in page["items"]] == [(1, 0.5), (2, 0.3)]
    assert await client.call("GET", path, params={"after": page["next"], "names": "loss"}) == {
        "items": [],
        "next": None,
    }
    with pytest.raises(InvalidRequest):
        await client.call("POST", path, body={"step": -1, "version": 0, "values": {}})


async def test_a_metric_that_no_run_has_is_refused_with_those_near(client: GatewayClient, tmp_path: Path) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    path = f"/v1/experiments/{created['id']}/metrics"
    await client.call("POST", path, body={"step": 1, "version": 1, "values": {"mine/scores": 0.5}})

    assert (await client.call("GET", path, params={"names": "kl/mean"}))["items"] == [], "it has not begun"
    for name in ("mine/score", "mine/*"):
        with pytest.raises(InvalidRequest, match="did you mean mine/scores"):
            await client.call("GET", path, params={"names": f"kl/mean,{name}"})
    seen = await client.call("GET", path, params={"names": "mine/scores"})
    later = await client.call("GET", path, params={"names": "mine/scores", "after": seen["next"]})
    assert [len(page["items"]) for page in (seen, later)] == [1, 0]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "null"])
async def test_a_metric_that_is_no_finite_number_is_refused_by_name(
    url: str, client: GatewayClient, tmp_path: Path, value: str
) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    body = '{"step": 1, "version": 1, "values": {"kl": 0.5, "loss": VALUE}}'.replace("VALUE", value)
    headers = AUTHORISED | {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        answer = await http.post(f"/v1/experiments/{created['id']}/metrics", content=body)

    assert answer.status_code == 422
    assert "loss" in answer.json()["errors"][0]["path"]


async def test_checkpoints_are_listed_by_step(client: GatewayClient, tmp_path: Path) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    path = f"/v1/experiments/{created['id']}/checkpoints"
    for step in (20, 10):
        body = {
            "step": step,
            "version": step,
            "path": f"{created['directory']}/checkpoints/step-{step:08}",
            "at": "2026-01-01T00:00:00.000Z",
        }
        await client.call("POST", path, body=body)

    assert [item["step"] for item in (await client.call("GET", path))["items"]] == [10, 20]
    view = await client.call("GET", f"/v1/experiments/{created['id']}")
    assert view["step"] == 20, "what a checkpoint contains was done, whether the trainer said so or not"


async def test_samples_are_filtered_ordered_and_paged(client: GatewayClient, tmp_path: Path) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path))
    directory = Path(created["directory"])
    directory.mkdir(parents=True)
    folder = SampleFolder(directory, SamplesConfig())
    for step in (1, 2):
        folder.write(a_step(step))
    path = f"/v1/experiments/{created['id']}/samples"

    worst = await client.call("GET", path, params={"order": "worst", "step": 2, "limit": 1, "tokens": "true"})
    rest = await client.call("GET", path, params={"order": "worst", "step": 2, "after": worst["next"]})
    with pytest.raises(InvalidRequest, match="allowed: trained, filtered"):
        await client.call("GET", path, params={"kind": "trained,good"})

    assert [(item["step"], item["reward"]) for item in worst["items"] + rest["items"]] == [
        (2, 0.0),
        (2, 0.0),
        (2, 1.0),
        (2, 1.0),
    ]
    assert len(worst["items"][0]["tokens"]["token_ids"]) == 8
    assert rest["next"] is None


async def read_events(
    http: httpx.AsyncClient, path: str, headers: dict[str, str], count: int, events: list[dict[str, str]] | None = None
) -> list[dict[str, str]]:
    """Read some events of a stream, comments included, or all until it ends; into ``events`` as they come."""
    events = [] if events is None else events
    fields: dict[str, str] = {}
    async with http.stream("GET", path, headers=headers, timeout=PATIENCE_SECONDS) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        async for line in stream.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name or "comment"] = value
            else:
                events.append(fields)
                fields = {}
            if len(events) == count:
                return events
    return events


async def test_events_are_replayed_from_the_last_one_seen_and_the_stream_ends_with_the_experiment(
    url: str, client: GatewayClient, tmp_path: Path
) -> None:
    created = await client.call("POST", "/v1/experiments", body=a_spec(tmp_path), params={"start": True})
    path = f"/v1/experiments/{created['id']}"
    async with httpx.AsyncClient(base_url=url, headers=AUTHORISED) as http:
        first = await read_events(http, f"{path}/events", {}, 3)
        rest: list[dict[str, str]] = []
        resuming = {"Last-Event-ID": first[0]["id"]}
        resumed = asyncio.create_task(read_events(http, f"{path}/events", resuming, 1000, rest))
        await until(lambda: {"comment": "nothing new"} in rest)
        await client.call("POST", f"{path}/stop")
        await asyncio.wait_for(resumed, PATIENCE_SECONDS)

    assert [event["event"] for event in first] == ["experiment_created", "experiment_state", "waiting"]
    named = [event for event in rest if "id" in event]
    assert named[:2] == first[1:3]
    assert json.loads(named[-1]["data"])["data"]["state"] == "stopped"


async def test_a_readers_stream_ends_with_its_token_and_no_reader_sees_passwords_of_a_spec(
    url: str, client: GatewayClient, tmp_path: Path
) -> None:
    grader = {"kind": "remote", "url": "http://me:hunter2@grader.example/x?token=t0ps3cret"}
    body = a_spec(tmp_path, reward={"components": [grader]})
    created = await client.call("POST", "/v1/experiments", body=body)
    path = f"/v1/experiments/{created['id']}"
    made = await client.call("POST", "/v1/tokens", body={"name": "dashboard", "scope": "reader"})
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {made['token']}"}) as reader:
        seen = [(await reader.get(each)).text for each in ("/v1/experiments", path, f"{path}/audit")]
        events: list[dict[str, str]] = []
        reading = asyncio.create_task(read_events(reader, f"{path}/events", {}, 1000, events))
        await until(lambda: {"comment": "nothing new"} in events)
        await client.call("DELETE", f"/v1/tokens/{made['id']}")
        await asyncio.wait_for(reading, PATIENCE_SECONDS)
        assert (await reader.get(path)).status_code == 401
    as_operator = await client.call("GET", path)

    for text in seen:
        assert "hunter2" not in text and "t0ps3cret" not in text
    assert "http://***@grader.example/x?token=***" in seen[1]
    assert as_operator["spec"]["reward"]["components"][0]["url"] == grader["url"]


async def test_unknown_paths_and_methods_are_problems(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, headers=AUTHORISED) as http:
        unknown = await http.get("/v1/nothing")
        wrong = await http.put("/v1/experiments")

    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.headers["content-type"]) == (405, "application/problem+json")
    assert wrong.headers["allow"] == "GET, POST"
    assert {name: wrong.json()[name] for name in ("status", "code", "detail")} == {
        "status": 405,
        "code": "method_not_allowed",
        "detail": "PUT is not allowed on /v1/experiments; allowed: GET, POST",
    }


def test_every_route_has_a_docstring(settings: GatewaySettings) -> None:
    paths = create_app(settings).openapi()["paths"]

    assert len(paths) > 20
    assert [path for path, routes in paths.items() if not all("description" in each for each in routes.values())] == []
