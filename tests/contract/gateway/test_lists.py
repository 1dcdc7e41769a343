"""``/openapi.json`` says of every list what it holds, and a list answers no more than that."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings

EXPERIMENT = "/v1/experiments/{experiment_id}"
LISTS = {
    "/v1/experiments": "ExperimentView",
    "/v1/services": "ServiceView",
    "/v1/tokens": "TokenView",
    f"{EXPERIMENT}/audit": "AuditEntry",
    f"{EXPERIMENT}/checkpoints": "ListedCheckpoint",
    f"{EXPERIMENT}/log": "Event",
    f"{EXPERIMENT}/metrics": "MetricPoint",
    f"{EXPERIMENT}/profiles": "ProfileView",
    f"{EXPERIMENT}/publications": "Publication",
    f"{EXPERIMENT}/samples": "SampleView",
}


@pytest.fixture(scope="module")
def document() -> Any:
    return create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere"))).openapi()


def answer_of(document: Any, operation: Any) -> Any:
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


@pytest.mark.parametrize(("path", "item"), LISTS.items())
def test_a_list_says_what_it_holds(path: str, item: str, document: Any) -> None:
    answer = answer_of(document, document["paths"][path]["get"])

    assert answer["properties"]["items"]["items"] == {"$ref": f"#/components/schemas/{item}"}


def test_no_list_is_left_out_here(document: Any) -> None:
    """What takes ``after`` and ``limit`` is a list."""
    found = {
        path
        for path, operations in document["paths"].items()
        for parameters in [{each["name"] for each in operations.get("get", {}).get("parameters", ())}]
        if "limit" in parameters
    }

    assert found == LISTS.keys()
