"""The gateway answers what ``/openapi.json`` says, whatever it is asked, with each kind of token and with none."""

import ast
import re
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
from flotilla.shared.errors import all_errors
from flotilla.shared.net.server.description import (
    CHANGING,
    EVERYWHERE,
    OF_EXPERIMENT,
    PROBLEM,
    WITH_PARAMETERS,
    WITH_TOKEN,
    declared,
    error_of,
)
from flotilla.shared.net.server.serving import PROBLEM_JSON
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


ROOT = Path(__file__).parents[3]
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


def described() -> set[tuple[int, str]]:
    """List status and code of all refusals, but for those whose code another server chooses."""
    found = set()
    for operations in SCHEMA.raw_schema["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                problem = answer.get("content", {}).get(PROBLEM_JSON)
                schema = {} if problem is None else problem["schema"]
                found |= {(int(status), code) for code in schema.get("properties", {}).get("code", {}).get("enum", ())}
    return found


def raised_in(function: ast.AST) -> set[str]:
    """Find the classes that a function raises in its own lines."""
    raised = [each.exc for each in ast.walk(function) if isinstance(each, ast.Raise)]
    return {each.func.id for each in raised if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}


def test_every_code_has_the_status_of_its_class_and_is_on_the_page() -> None:
    pairs = described()
    page = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", page, re.MULTILINE)
    known = {each.code for each in all_errors()}
    written = {(int(status), code) for status, text in rows for code in re.findall(r"`(\w+)`", text) if code in known}

    assert {(each.status, each.code) for each in all_errors()} >= pairs
    assert written - pairs == {(422, "prompt_too_long")}, "which an episode's rollout answers"
    assert pairs - written == set()


def test_what_a_route_raises_itself_is_declared() -> None:
    """What it calls may raise more: the requests above are for that."""
    usual = {each.__name__ for each in (*EVERYWHERE, *WITH_TOKEN, *WITH_PARAMETERS, *OF_EXPERIMENT, *CHANGING)}
    find, raised, undeclared = error_of("flotilla.services.gateway"), 0, []
    for path in sorted((ROOT / "services" / "gateway" / "routes").glob("*.py")):
        for route in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(route, ast.AsyncFunctionDef) and any(
                "router." in ast.unparse(d) for d in route.decorator_list
            ):
                said = {each.__name__ for each in declared(ast.get_docstring(route) or "", find).refusals}
                raised += len(raised_in(route))
                undeclared += [(path.stem, route.name, each) for each in raised_in(route) - said - usual]

    assert raised >= 5
    assert undeclared == []


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
