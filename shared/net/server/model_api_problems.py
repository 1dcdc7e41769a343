"""Problem documents that clients of a model's interface read as errors of theirs: OpenAI's and Anthropic's."""

import json
from typing import Any, Final

from fastapi import Response

from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.server.serving import PROBLEM_JSON, problem_response

MESSAGES: Final = "/v1/messages"
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
SERVER_ERRORS: Final = 500


def is_anthropic(path: str) -> bool:
    """Return whether Anthropic's clients ask for a path."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def problem_at(path: str, error: FlotillaError) -> Response:
    """Make the problem document for a path of the gateway, for a request that no route has seen."""
    return anthropic_problem(error) if is_anthropic(path) else problem_response(error)


def openai_problem(error: FlotillaError) -> Response:
    """Make a problem document that OpenAI's clients read as an error of theirs."""
    problem: dict[str, Any] = json.loads(bytes(problem_response(error).body))
    problem["error"] = {"message": problem["detail"], "type": error.code, "code": error.code, "param": None}
    return Response(json.dumps(problem), status_code=error.status, media_type=PROBLEM_JSON)


def anthropic_problem(error: FlotillaError) -> Response:
    """Make a problem document that Anthropic's clients read as an error of theirs; its ``type`` is what they want."""
    problem: dict[str, Any] = json.loads(bytes(problem_response(error).body))
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= SERVER_ERRORS else "invalid_request_error")
    document = {**problem, "type": "error", "error": {"type": kind, "message": problem["detail"]}}
    return Response(json.dumps(document), status_code=error.status, media_type=PROBLEM_JSON)
