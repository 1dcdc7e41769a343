"""The gateway answers what ``/openapi.json`` says, whatever it is asked, with each kind of token and with none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
import starlette.testclient
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.net.server.description import PROBLEM
from tests.unit.gateway.builders import a_gateway

OPERATOR = "the-operators-token"
CHECKS = (
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
)
UNAVAILABLE = {503}
"""In memory there is neither a database nor a data plane that could be asked again."""


def an_app() -> Any:
    """Make a gateway in memory that nothing has to open."""
    gateway = a_gateway(token=OPERATOR)
    app = create_app(GatewaySettings(token=OPERATOR, redis_url="redis://nowhere", data=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await app(scope | {"state": {"gateway": gateway}}, receive, send)

    return with_state


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", an_app())


def ask(case: Any, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = case.call(headers=headers)
    case.validate_response(answer, checks=CHECKS)


SETTINGS = hypothesis.settings(
    max_examples=1,
    deadline=None,
    database=None,
    derandomize=True,
    # By day a few at random of each route; each bound and each type of each value by night (test_openapi_at_length.py).
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@SCHEMA.parametrize()
@SETTINGS
def test_an_operator_gets_documented_answers(case: Any) -> None:
    ask(case, OPERATOR)


@SCHEMA.include(method="POST").parametrize()
@hypothesis.settings(SETTINGS, max_examples=1)
def test_nobody_gets_documented_refusals(case: Any) -> None:
    ask(case, None)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref" and isinstance(value, str))
        yield from (each for value in node.values() for each in references(value))
    elif isinstance(node, list):
        yield from (each for value in node for each in references(value))


def test_every_reference_leads_to_a_schema() -> None:
    document = SCHEMA.raw_schema
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}

    assert set(references(document)) <= schemas
    assert "cause" in document["components"]["schemas"]["Problem"]["properties"], "of an experiment, not of a request"


def test_what_is_raised_is_among_the_answers_and_services_routes_stand_apart() -> None:
    document = SCHEMA.raw_schema
    paths = document["paths"]
    operations = {(path, method): each for path, methods in paths.items() for method, each in methods.items()}
    internal = {key for key, each in operations.items() if each["tags"] == ["internal"]}

    assert not [key for key, each in operations.items() if "Raises" in each.get("description", "")]
    complete = operations["/v1/episodes/{episode_id}/complete", "post"]["responses"]
    assert complete["410"]["description"] == "It ended otherwise."
    assert {("/v1/services", "post"), ("/v1/services/{service_id}/status", "put")} <= internal
    assert (
        not {("/v1/experiments", "post"), ("/v1/services", "get"), ("/v1/episodes/{episode_id}/complete", "post")}
        & internal
    )
    assert document["tags"][-1]["name"] == "internal"


def test_the_reference_can_be_read_without_a_script_or_another_host() -> None:
    answer = starlette.testclient.TestClient(an_app()).get("/docs")

    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in SCHEMA.raw_schema["paths"]:
        assert f" {path}</code>" in answer.text
    assert "<script" not in answer.text and "://" not in answer.text
    assert answer.text.index("<h2>experiments") < answer.text.index("<h2>internal")


def test_what_is_allowed_on_a_path_is_what_its_own_route_takes() -> None:
    client = starlette.testclient.TestClient(an_app(), headers={"Authorization": f"Bearer {OPERATOR}"})

    for path, allowed in (("/v1/tokens/self", "GET"), ("/v1/tokens/some", "DELETE"), ("/v1/tokens", "GET, POST")):
        answer = client.options(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_every_route_names_its_scopes_and_refusals() -> None:
    document = SCHEMA.raw_schema
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert document["components"]["schemas"]["ProblemDocument"] == PROBLEM
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = path in {"/healthz", "/readyz", "/metrics"}
            assert ("security" in operation) is not is_open, path
            assert is_open or operation["x-scopes"][0] == "operator"
            assert {"405", "422", "503"} <= operation["responses"].keys()
            assert is_open or {"401", "403"} <= operation["responses"].keys(), (method, path)
