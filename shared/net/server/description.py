"""What ``/openapi.json`` adds to the routes' own descriptions: tokens, and every error status."""

import builtins
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from flotilla.shared.errors import (
    ActionNotAllowed,
    Conflict,
    DeadlineExceeded,
    FlotillaError,
    Forbidden,
    HeadersTooLarge,
    IdempotencyMismatch,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTooSlow,
    SpecRefused,
    TooManyRefused,
    Unauthorized,
    Unavailable,
    UnreadableRequest,
    all_errors,
)
from flotilla.shared.net.server.request_body import BodyTooLarge
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
Refusals = Mapping[type[FlotillaError], str]
"""Errors that a route answers, with why."""

EVERYWHERE: Refusals = {
    UnreadableRequest: "The body cannot be read.",
    MethodNotAllowed: "The path knows other methods: `Allow` lists them.",
    RequestTooSlow: "The body did not arrive in time.",
    BodyTooLarge: "The body is too large.",
    InvalidRequest: "The request is not valid.",
    TooManyRefused: (
        "Too many requests from this address, none with a token that is let in, were refused: `Retry-After`."
    ),
    HeadersTooLarge: "The headers are too large.",
    Unavailable: "Something that is needed does not answer now: try again.",
    DeadlineExceeded: "It took too long: try again.",
}
WITH_TOKEN: Refusals = {
    Unauthorized: "No token, or one that is unknown, revoked or expired.",
    Forbidden: "The token is not for this.",
}
WITH_PARAMETERS: Refusals = {NotFound: "What the path names is not there."}
OF_EXPERIMENT: Refusals = {SpecRefused: "This release refuses the experiment's spec."}
CHANGING: Refusals = {
    Conflict: "The present state does not allow it.",
    ActionNotAllowed: "The present state does not allow it.",
    IdempotencyMismatch: "The idempotency key came with another request.",
}
INTERNAL = {
    "name": "internal",
    "description": "What services of a fleet call, all of one version: it may be another thing in any release.",
}
"""The tag of routes that are for no user."""
CLOSED_READING = "/v1/"
"""What can be read below it is not for everybody."""


_HEADING = re.compile(r"^Raises:[ ]*\n", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?=\S)", re.MULTILINE)
_PASSED_ON = re.compile(r"\s*\((\d{3}(?:, \d{3})*)\)\.?$")


class Declared(NamedTuple):
    """The errors that a route documents.

    Attributes:
        text: its description without that.
        refusals: by class.
        passed_on: why other statuses are answered, whose codes another server chooses.
    """

    text: str
    refusals: Refusals
    passed_on: Mapping[int, str]


def declared(description: str, find: Callable[[str], type[FlotillaError] | None]) -> Declared:
    """Read the section ``Raises`` of a docstring.

    Args:
        description: with entries such as ``NotFound: there is no such experiment.``; one that ends with statuses, such
            as ``(400, 422)``, is of answers of another server that are passed on.
        find: the error of a name; None for what is no answer.
    """
    text, *sections = _HEADING.split(description, maxsplit=1)
    refusals: dict[type[FlotillaError], list[str]] = defaultdict(list)
    passed_on: dict[int, str] = {}
    for entry in _ENTRY.split(sections[0])[1:] if sections else ():
        names, _, words = entry.partition(":")
        reason = " ".join(words.split()).removesuffix(".")
        found = _PASSED_ON.search(reason)
        if found is not None:
            passed_on |= {int(status): _sentence(reason[: found.start()]) for status in found[1].split(", ")}
            continue
        for error in map(find, names.split(", ")):
            if error is not None:
                refusals[error].append(reason)
    return Declared(text.strip(), {error: _sentence("; or ".join(each)) for error, each in refusals.items()}, passed_on)


def error_of(package: str) -> Callable[[str], type[FlotillaError] | None]:
    """Return what finds the errors that routes of a package name: those of the package, and the shared ones."""
    own = (f"{package}.", "flotilla.shared.")
    known = {each.__name__: each for each in all_errors() if f"{each.__module__}.".startswith(own)}

    def find(name: str) -> type[FlotillaError] | None:
        if name not in known and not hasattr(builtins, name):
            raise LookupError(f"{package} names {name}, which is no error of its own or of all")
        return known.get(name)

    return find


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def describe(
    app: FastAPI,
    package: str,
    is_open: Callable[[str, str], bool],
    scopes: Callable[[str, str], list[str]] | None = None,
    make_schemas: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Let an app's description name its security scheme and statuses.

    It takes a second to make, once, and so it is made and sent on a thread.

    Args:
        app: with all its routes.
        package: of the service, whose errors its routes may name.
        is_open: whether a method and path need no token.
        scopes: lists the scopes that may use them, where there are any.
        make_schemas: makes those, by name, to which routes refer that describe their bodies themselves.
    """
    plain, making = app.openapi, threading.Lock()

    def openapi() -> dict[str, Any]:
        with making:
            return made()

    def made() -> dict[str, Any]:
        is_made = app.openapi_schema is not None
        schemas: Mapping[str, Any] = {} if is_made else make_schemas()
        document = plain()
        if not is_made:
            known = document.setdefault("components", {}).setdefault("schemas", {})
            twice = sorted(name for name in known.keys() & schemas.keys() if known[name] != schemas[name])
            assert not twice, f"two schemas have one name: {twice}"
            known.update(schemas)
            _complete(document, is_open, scopes, error_of(package))
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


def _problem_answer(text: str, codes: Sequence[str] = ()) -> dict[str, Any]:
    """Describe an answer that is a problem document.

    Args:
        text: why it is given.
        codes: that it may have; any if empty.
    """
    schema: dict[str, Any] = {"$ref": "#/components/schemas/ProblemDocument"}
    if codes:
        schema = {"allOf": [schema], "properties": {"code": {"enum": sorted(codes)}}}
    return {"description": text, "content": {PROBLEM_JSON: {"schema": schema}}}


def _answers(usual: Refusals, said: Declared) -> dict[str, Any]:
    """Describe all refusals of a route, by status: why, in the words of the route where it has some, and the codes."""
    statuses = {each.status for each in (*usual, *said.refusals)} | set(said.passed_on)
    found = {}
    for status in sorted(statuses):
        own = [text for error, text in said.refusals.items() if error.status == status]
        own += [text for its_status, text in said.passed_on.items() if its_status == status]
        errors = [error for error in (*usual, *said.refusals) if error.status == status]
        reasons = own or [usual[error] for error in errors]
        first, *others = dict.fromkeys(each.removesuffix(".") for each in reasons)
        text = "; or ".join([first, *(f"{each[:1].lower()}{each[1:]}" for each in others)])
        codes = {error.code for error in errors if status not in said.passed_on}
        found[str(status)] = _problem_answer(f"{text}.", sorted(codes))
    return found


def _complete(
    document: dict[str, Any],
    is_open: Callable[[str, str], bool],
    scopes: Callable[[str, str], list[str]] | None,
    find: Callable[[str], type[FlotillaError] | None],
) -> None:
    tags: dict[str, dict[str, str]] = {}
    components = document["components"]
    components["schemas"]["ProblemDocument"] = PROBLEM
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "A token of the fleet; docs/security.md."}
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            usual = dict(EVERYWHERE)
            if not is_open(method.upper(), path):
                operation["security"] = [{"token": []}]
                if scopes is not None:
                    operation["x-scopes"] = scopes(method.upper(), path)
                usual |= WITH_TOKEN
            if "{" in path or method != "get":
                usual |= WITH_PARAMETERS
            if "{experiment_id}" in path:
                usual |= OF_EXPERIMENT
            if method != "get":
                usual |= CHANGING
            said = declared(operation.get("description", ""), find)
            if "description" in operation:
                operation["description"] = said.text
            operation["responses"] |= _answers(usual, said)
            if is_internal(operation.get("x-scopes", ())):
                operation["tags"] = [INTERNAL["name"]]
            tags |= {name: {"name": name} for name in operation.setdefault("tags", ["other"])}
    internal = tags.pop(INTERNAL["name"], None)
    document["tags"] = [*tags.values(), *([INTERNAL] if internal else [])]


def is_internal(scopes: Sequence[str]) -> bool:
    """Return whether only services of the fleet and operators may use a route."""
    return any(scope.startswith("service") for scope in scopes) and not {"reader", "agent"} & {*scopes}
