"""Weights travel in a whole fleet as the spec says: mapped on one host, or broadcast, rounded and as patches."""

import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import make_experiment, running_fleet

STEPS = 4


async def publications_of(client: GatewayClient, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Train an experiment to its end and list what it published."""
    view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
    path = f"/v1/experiments/{view['id']}"
    await client.call("POST", f"{path}/start", deadline_seconds=60)
    end = time.monotonic() + 240
    while view["state"] != "completed":
        assert view["state"] != "failed" and time.monotonic() < end, view
        await anyio.sleep(0.2)
        view = await client.call("GET", path, deadline_seconds=60)
    listed = await client.call("GET", f"{path}/publications", deadline_seconds=60)
    items: list[dict[str, Any]] = listed["items"] if isinstance(listed, dict) else listed
    return items


def transports(publications: list[dict[str, Any]]) -> list[list[str]]:
    return [[member["transport"] for member in each["members"]] for each in publications]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(580)
async def test_each_experiment_publishes_as_its_spec_says(tmp_path: Path) -> None:
    few = {"steps": STEPS, "groups_per_mini_batch": 4}
    chosen = {"publication": {"transport": "auto"}}
    mapped = make_experiment(tmp_path, name="mapped", optimisation=few, asynchrony=chosen)
    # Steps too small to move a weight of 8 significant bits: the versions differ in few blocks, if in any.
    patched = make_experiment(
        tmp_path,
        name="patched",
        optimisation={**few, "learning_rate": 1e-9},
        asynchrony={"publication": {"transport": "group", "wire_dtype": "bfloat16", "delta": {"block_kilobytes": 4}}},
    )
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            as_mapped = await publications_of(client, mapped)
            as_patched = await publications_of(client, patched)

    assert [each["phase"] for each in as_mapped + as_patched] == ["committed"] * 2 * STEPS
    assert transports(as_mapped) == [["shared_memory"]] * STEPS
    assert transports(as_patched) == [["gloo"]] * STEPS
    assert [each["is_delta"] for each in as_patched] == [False, True, True, True]
    assert not any(each["is_delta"] for each in as_mapped)
