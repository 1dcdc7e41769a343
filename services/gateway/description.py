"""What the gateway's ``/openapi.json`` says of tokens and scopes."""

from fastapi import FastAPI

from flotilla.services.gateway.access.policy import OPEN_PATHS, OPERATING, RULES, needed
from flotilla.services.gateway.routes.experiments import section_schemas
from flotilla.shared.net.server.description import describe


def describe_gateway(app: FastAPI) -> None:
    """Let the app's description name its security scheme, scopes and statuses."""
    describe(app, "flotilla.services.gateway", lambda _method, path: path in OPEN_PATHS, _scopes, section_schemas)


def _scopes(method: str, path: str) -> list[str]:
    # Of a parameter that may hold slashes the description has the name alone.
    names = (path, path.replace("{name}", "{name:path}"))
    rule = next((found for name in names if (found := RULES.get((method, name)))), None)
    return needed(rule or OPERATING)
