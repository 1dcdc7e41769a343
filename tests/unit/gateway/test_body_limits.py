"""What a request with very many mistakes costs: its answer is short, and it is not read to its end."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.body_limits import SMALL, limit_of
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.errors import MAX_ERRORS
from tests.unit.gateway.builders import a_gateway


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    gateway = a_gateway(token="t")
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    transport, headers = httpx.ASGITransport(with_state), {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
        yield client


def keys(count: int) -> dict[str, int]:
    return {f"k{number}": 1 for number in range(count)}


@pytest.mark.parametrize("count", [30_000, 3000])
async def test_a_registration_with_very_many_keys_is_not_read(client: httpx.AsyncClient, count: int) -> None:
    answer = await client.post("/v1/services", json=keys(count))

    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert len(answer.content) < 1000


@pytest.mark.parametrize(("path", "count"), [("/v1/tokens", 1900), ("/v1/experiments", 500)])
async def test_of_many_mistakes_the_first_are_named_and_the_others_counted(
    client: httpx.AsyncClient, path: str, count: int
) -> None:
    answer = await client.post(path, json=keys(count))

    problem = answer.json()
    assert (answer.status_code, len(problem["errors"])) == (422, MAX_ERRORS)
    assert problem["num_more_errors"] >= count - MAX_ERRORS
    assert len(answer.content) < 16_384


async def test_the_largest_batch_of_metrics_and_the_longest_list_of_tensors_have_room() -> None:
    batch = json.dumps({"step": 1, "version": 1, "values": {f"{number:0256}": 1.0e-7 for number in range(4096)}})
    tensor = {"name": "m" * 60, "shape": [7168, 2048], "dtype": "BF16", "start": 10**12, "end": 10**12}
    manifest = json.dumps({"manifest": {"tensors": [tensor] * 10_000}}, separators=(",", ":"))
    experiment = "/v1/experiments/e-1"

    for text, times, limit in (
        (batch, 1, limit_of("POST", f"{experiment}/metrics")),
        (manifest, 5, limit_of("POST", f"{experiment}/publications")),
    ):
        assert len(text) * times < limit.max_bytes
        assert limit.max_values is not None and sum(map(text.count, "[{,")) * times <= limit.max_values


def test_a_route_that_says_nothing_has_small_bodies() -> None:
    assert limit_of("POST", "/v1/tokens") is SMALL
    assert limit_of("GET", "/v1/chat/completions") is SMALL
