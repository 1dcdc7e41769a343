"""What ``/openapi.json`` says besides what the routes say themselves: tokens, and every status of a refusal."""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from flotilla.shared.net.server.serving import PROBLEM_JSON

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
    429: "Too many requests from this address, none with a token that is let in, were refused: `Retry-After`.",
    431: "The headers are too large.",
    503: "Something that is needed does not answer now: try again.",
    504: "It took too long: try again.",
}
WITH_TOKEN = {401: "No token, or one that is unknown, revoked or expired.", 403: "The token is not for this."}
WITH_PARAMETERS = {404: "What the path names is not there."}
CHANGING = {409: "The present state does not allow it."}
INTERNAL = {
    "name": "internal",
    "description": "What services of a fleet call, all of one version: it may be another thing in any release.",
}
"""The tag of routes that are for no user."""
CLOSED_READING = "/v1/"
"""What can be read below it is not for everybody."""


_HEADING = re.compile(r"^Raises:[ ]*\n", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?=\S)", re.MULTILINE)
_STATUSES = re.compile(r"\s*\((\d{3}(?:, \d{3})*)(?:, [^)]*)?\)\.?$")


def without_raises(description: str) -> tuple[str, dict[int, str]]:
    """Take the section ``Raises`` out of a docstring.

    Args:
        description: with entries such as ``NotFound: there is no such experiment (404).``.

    Returns:
        What is left, and for each status why it is answered.
    """
    text, *sections = _HEADING.split(description, maxsplit=1)
    reasons: dict[int, list[str]] = defaultdict(list)
    for entry in _ENTRY.split(sections[0])[1:] if sections else ():
        reason = " ".join(entry.partition(":")[2].split())
        found = _STATUSES.search(reason)
        if found is not None:
            for status in found[1].split(", "):
                reasons[int(status)].append(reason[: found.start()])
    return text.strip(), {status: _sentence("; or ".join(each)) for status, each in reasons.items()}


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def describe(
    app: FastAPI,
    is_open: Callable[[str, str], bool],
    scopes: Callable[[str, str], list[str]] | None = None,
    schemas: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Let an app's description name its security scheme and statuses.

    It takes a second to make, once, and so it is made and sent on a thread.

    Args:
        app: with all its routes.
        is_open: tells of a method and a path whether no token is needed.
        scopes: lists the scopes that may use them, where there are any.
        schemas: by name, to which routes refer that describe their bodies themselves.
    """
    plain, making = app.openapi, threading.Lock()

    def openapi() -> dict[str, Any]:
        with making:
            return made()

    def made() -> dict[str, Any]:
        is_made = app.openapi_schema is not None
        document = plain()
        if not is_made:
            known = document.setdefault("components", {}).setdefault("schemas", {})
            twice = sorted(name for name in known.keys() & schemas.keys() if known[name] != schemas[name])
            assert not twice, f"two schemas have one name: {twice}"
            known.update(schemas)
            _complete(document, is_open, scopes)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    app.router.routes[:] = [each for each in app.router.routes if getattr(each, "path", None) != app.openapi_url]

    # No coroutine: the framework runs it on a thread. Its own would make the description on the event loop.
    @app.get(app.openapi_url or "", include_in_schema=False)
    def description() -> Response:
        return JSONResponse(app.openapi())


def only_reading_is_open(method: str, path: str) -> bool:
    """Return whether a request needs no token: read-only routes outside ``CLOSED_READING``."""
    return method == "GET" and not path.startswith(CLOSED_READING)


def problem_answer(text: str) -> dict[str, Any]:
    """Describe an answer that is a problem document."""
    return {
        "description": text,
        "content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    }


def _complete(
    document: dict[str, Any], is_open: Callable[[str, str], bool], scopes: Callable[[str, str], list[str]] | None
) -> None:
    tags: dict[str, dict[str, str]] = {}
    components = document["components"]
    components["schemas"]["ProblemDocument"] = PROBLEM
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "A token of the fleet; docs/security.md."}
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses: dict[int, str] = dict(EVERYWHERE)
            if not is_open(method.upper(), path):
                operation["security"] = [{"token": []}]
                if scopes is not None:
                    operation["x-scopes"] = scopes(method.upper(), path)
                statuses |= WITH_TOKEN
            if "{" in path or method != "get":
                statuses |= WITH_PARAMETERS
            if method != "get":
                statuses |= CHANGING
            if "description" in operation:
                operation["description"], said = without_raises(operation["description"])
                statuses |= said
            for status, text in statuses.items():
                operation["responses"][str(status)] = problem_answer(text)
            if is_internal(operation.get("x-scopes", ())):
                operation["tags"] = [INTERNAL["name"]]
            tags |= {name: {"name": name} for name in operation.setdefault("tags", ["other"])}
    internal = tags.pop(INTERNAL["name"], None)
    document["tags"] = [*tags.values(), *([INTERNAL] if internal else [])]


def is_internal(scopes: Sequence[str]) -> bool:
    """Return whether only services of the fleet and operators may use a route."""
    return any(scope.startswith("service") for scope in scopes) and not {"reader", "agent"} & {*scopes}
