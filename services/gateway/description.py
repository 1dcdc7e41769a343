"""What ``/openapi.json`` says besides what the routes say themselves: tokens, scopes, every status of a refusal."""

from typing import Any

from fastapi import FastAPI

from services.gateway.access.policy import OPERATING, RULES, needed
from services.gateway.middleware import OPEN_PATHS
from shared.serving import PROBLEM_JSON

PROBLEM = {
    "type": "object",
    "description": "What went wrong (RFC 9457).",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "Stable; docs/rest.md lists them."},
        "detail": {"type": "string"},
        "errors": {"type": "array", "items": {"type": "object"}},
    },
}
EVERYWHERE = {
    400: "The body cannot be read.",
    405: "The path knows other methods: `Allow` lists them.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    422: "The request is not valid.",
    431: "The headers are too large.",
    503: "Something that is needed does not answer now: try again.",
    504: "It took too long: try again.",
}
WITH_TOKEN = {401: "No token, or one that is unknown, revoked or expired.", 403: "The token is not for this."}
WITH_PARAMETERS = {404: "What the path names is not there."}
CHANGING = {409: "The present state does not allow it."}


def describe(app: FastAPI) -> None:
    """Let an app's description name its security scheme, scopes and statuses."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        is_made = app.openapi_schema is not None
        document = plain()
        if not is_made:
            _complete(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> None:
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = PROBLEM
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "A token of the fleet; docs/security.md."}
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = dict(EVERYWHERE)
            if path not in OPEN_PATHS:
                # Of a parameter that may hold slashes the description has the name alone.
                names = (path, path.replace("{name}", "{name:path}"))
                rule = next((found for name in names if (found := RULES.get((method.upper(), name)))), None)
                operation["security"] = [{"token": []}]
                operation["x-scopes"] = needed(rule or OPERATING)
                statuses |= WITH_TOKEN
            if "{" in path or method != "get":
                statuses |= WITH_PARAMETERS
            if method != "get":
                statuses |= CHANGING
            for status, text in statuses.items():
                operation["responses"][str(status)] = {
                    "description": text,
                    "content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}},
                }
