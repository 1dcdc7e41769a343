"""How large the body of each request may be: what its route has a use for.

A body that is parsed holds the event loop, in which everybody waits, for as long as it has values; so those are bounded
as well as its bytes. A route that is not in the table has small bodies.
"""

from re import Pattern
from typing import Final

from starlette.routing import compile_path

from flotilla.services.gateway.tinker.bodies import MOST_BYTES
from flotilla.shared.net.server.limits import BodyLimit

KIBIBYTE: Final = 1024
MEBIBYTE: Final = 1024 * KIBIBYTE

SMALL: Final = BodyLimit(64 * KIBIBYTE, max_values=2000)
SPEC: Final = BodyLimit(MEBIBYTE)
"""Read as YAML, which bounds itself."""
CHAT: Final = BodyLimit(8 * MEBIBYTE)
"""Passed on as it is: the rollout parses it."""

LIMITS: Final[dict[tuple[str, str], BodyLimit]] = {
    # Sent most often by far, so it is found first. It has a gauge or two for each component.
    ("PUT", "/v1/services/{service_id}/status"): BodyLimit(256 * KIBIBYTE, max_values=5000),
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/completions"): CHAT,
    ("POST", "/v1/responses"): CHAT,
    ("POST", "/v1/messages"): CHAT,
    ("POST", "/v1/messages/count_tokens"): CHAT,
    ("POST", "/api/v1/forward_backward"): BodyLimit(MOST_BYTES),
    ("POST", "/api/v1/asample"): BodyLimit(4 * MEBIBYTE, max_values=200_000),
    ("POST", "/api/v1/telemetry"): BodyLimit(4 * MEBIBYTE),
    ("POST", "/v1/experiments"): SPEC,
    ("PATCH", "/v1/experiments/{experiment_id}"): SPEC,
    ("POST", "/v1/experiments/{experiment_id}/fork"): BodyLimit(MEBIBYTE, max_values=20_000),
    # The task's answer of a reward, and what is said of it.
    ("POST", "/v1/gradings/{grading_id}"): BodyLimit(MEBIBYTE),
    # 4096 names of up to 256 characters.
    ("POST", "/v1/experiments/{experiment_id}/metrics"): BodyLimit(2 * MEBIBYTE, max_values=5000),
    # A line for each plan that the data plane still has.
    ("POST", "/v1/experiments/{experiment_id}/takeovers"): BodyLimit(MEBIBYTE, max_values=20_000),
    # A line for each tensor of the model: there are models of 50,000, and 8 values in each line.
    ("POST", "/v1/experiments/{experiment_id}/publications"): BodyLimit(8 * MEBIBYTE, max_values=500_000),
}

_COMPILED: Final[list[tuple[str, Pattern[str], BodyLimit]]] = [
    (method, compile_path(template)[0], limit) for (method, template), limit in LIMITS.items()
]


def limit_of(method: str, path: str) -> BodyLimit:
    """Return what the body of a request may have."""
    for its_method, pattern, limit in _COMPILED:
        if its_method == method and pattern.fullmatch(path):
            return limit
    return SMALL
