"""The errors that cross a service boundary, and how they look on the wire.

    FlotillaError                    500  internal
    ├── InvalidRequest               422  invalid_request       (carries one entry per offending field)
    │   ├── UnreadableRequest        400  invalid_request
    │   ├── InvalidSpec              422  invalid_spec
    │   └── PromptTooLong            422  prompt_too_long
    ├── RequestTooSlow               408  request_too_slow
    ├── HeadersTooLarge              431  headers_too_large
    ├── NotFound                     404  not_found
    ├── MethodNotAllowed             405  method_not_allowed
    ├── Unauthorized                 401  unauthorized
    │   └── TooManyRefused           429  too_many_refused
    ├── TooManyRequests              429  too_many_requests     (retryable)
    ├── Forbidden                    403  forbidden
    ├── Conflict                     409  conflict
    │   ├── ActionNotAllowed         409  action_not_allowed
    │   ├── NotAssigned              409  not_assigned
    │   ├── SpecRefused              409  spec_refused
    │   ├── IdempotencyMismatch      409  idempotency_mismatch
    │   ├── RequestInFlight          409  request_in_flight
    │   └── StalePolicyVersion       409  stale_policy_version
    ├── QuotaExceeded                429  quota_exceeded
    ├── Unavailable                  503  unavailable           (retryable)
    │   ├── NotLeading               503  not_leading           (retryable)
    │   └── TokenExpired             503  token_expired         (retryable)
    ├── DeadlineExceeded             504  deadline_exceeded     (retryable)
    ├── ClaimLost                    409  claim_lost
    ├── DataError                    422  data_error
    ├── ModelError                   422  model_error
    ├── EpisodeFailed                502  episode_failed
    │   └── EnvironmentDiverged      502  environment_diverged
    ├── GradingFailed                502  grading_failed
    ├── WeightTransferFailed         502  weight_transfer_failed
    └── WorkerDied                   500  worker_died
        └── ServerUnreachable        500  server_unreachable

A server sends one as ``application/problem+json`` (RFC 9457); ``net/client/client.py`` raises the same class on the
other side. ``code`` is stable, ``detail`` is for people.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

Scalar = str | int | float | bool | None
MAX_ERRORS = 20
"""Entries of ``errors`` that are listed; of the others a problem gives the number."""


class FlotillaError(Exception):
    """Base of all errors that a caller of this project may want to catch by type.

    Args:
        detail: one sentence for a person: what was wrong and what is allowed.
        errors: for bad input, one entry per offending field.
        context: scalar facts that help to find the cause; they travel with the problem.
    """

    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, *, errors: Sequence[Mapping[str, Scalar]] = (), **context: Scalar) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = [dict(entry) for entry in errors]
        self.context = context


class InvalidRequest(FlotillaError):
    """The request is malformed: each entry of ``errors`` names a field, the value and what is allowed."""

    code, title, status = "invalid_request", "The request is not valid", 422


class UnreadableRequest(InvalidRequest):
    """The request is no HTTP, or its body cannot be read."""

    title, status = "The request cannot be read", 400


class RequestTooSlow(FlotillaError):
    """The head or the body of a request did not arrive in time."""

    code, title, status = "request_too_slow", "The request did not arrive in time", 408


class HeadersTooLarge(FlotillaError):
    """A request has more headers, or more bytes of them, than are read."""

    code, title, status = "headers_too_large", "The headers are too large", 431


class InvalidSpec(InvalidRequest):
    """An experiment spec does not validate."""

    code, title = "invalid_spec", "The experiment spec is not valid"


class PromptTooLong(InvalidRequest):
    """A prompt is longer than allowed, or does not fit the engine's context together with its completion."""

    code, title = "prompt_too_long", "The prompt is too long"


class CannotBeShown(InvalidRequest):
    """An engine's server cannot be shown the sequence that a turn continues with."""

    code, title = "cannot_be_shown", "The sequence cannot be shown to the engine"


class NotFound(FlotillaError):
    """The named resource does not exist."""

    code, title, status = "not_found", "Not found", 404


class MethodNotAllowed(FlotillaError):
    """The path exists, but not with this HTTP method; ``allowed`` lists the methods."""

    code, title, status = "method_not_allowed", "Method not allowed", 405


class Unauthorized(FlotillaError):
    """The bearer token is missing or wrong."""

    code, title, status = "unauthorized", "Not authorised", 401


class TooManyRefused(Unauthorized):
    """Without a token that is let in, and one of very many such requests from its address."""

    code, title, status = "too_many_refused", "Too many requests were refused", 429


class TooManyRequests(FlotillaError):
    """The token has as many requests of this sort open as it may."""

    code, title, status, retryable = "too_many_requests", "Too many requests are open", 429, True


class Forbidden(FlotillaError):
    """The token is known, but is not for this; the detail names the scope that is."""

    code, title, status = "forbidden", "The token is not for this", 403


class Conflict(FlotillaError):
    """The request contradicts the present state."""

    code, title, status = "conflict", "Conflict with the present state", 409


class ActionNotAllowed(Conflict):
    """The experiment's state does not allow this action; the detail lists the allowed actions."""

    code, title = "action_not_allowed", "The state does not allow this action"


class NotAssigned(Conflict):
    """The token is of a service that does not work for the experiment any more, or of an earlier epoch."""

    code, title = "not_assigned", "The service is not assigned to this experiment now"


class SpecRefused(Conflict):
    """The experiment's stored spec is not valid under this release, so nothing can be done with it but to delete it."""

    code, title = "spec_refused", "The stored spec is not valid under this release"


class IdempotencyMismatch(Conflict):
    """An idempotency key was used again with another body."""

    code, title = "idempotency_mismatch", "Idempotency key was used with another body"


class RequestInFlight(Conflict):
    """An engine samples a request of this id already."""

    code, title = "request_in_flight", "The request is being sampled already"


class StalePolicyVersion(Conflict):
    """A publication's version is not newer than the current one."""

    code, title = "stale_policy_version", "Policy version is not newer than the current one"


class QuotaExceeded(FlotillaError):
    """The token has as much as its quota allows; the context names which, ``used`` and ``allowed``."""

    code, title, status = "quota_exceeded", "The token's quota is used up", 429


class Unavailable(FlotillaError):
    """A component that is needed does not answer now."""

    code, title, status, retryable = "unavailable", "Temporarily unavailable", 503, True


class NotLeading(Unavailable):
    """Another gateway works on this database; the context names its address as ``leader``, where it is known."""

    code, title = "not_leading", "Another gateway leads"


class TokenExpired(Unavailable):
    """The pass of this service has expired while the gateway could not be reached; it gets another by registering."""

    code, title = "token_expired", "The service's pass has expired"


class NotUnderstood(FlotillaError):
    """The other side is of a later release, and asks for what this one does not know."""

    code, title, status = "not_understood", "Of a later release", 422


class DeadlineExceeded(FlotillaError):
    """A call did not finish within its deadline."""

    code, title, status, retryable = "deadline_exceeded", "Deadline exceeded", 504, True


class ClaimLost(FlotillaError):
    """The caller no longer holds the claim, so its result was thrown away."""

    code, title, status = "claim_lost", "The claim is held by another service", 409


class DataError(FlotillaError):
    """A dataset cannot be read as the spec says."""

    code, title, status = "data_error", "The dataset cannot be used", 422


class ModelError(FlotillaError):
    """A model directory cannot be loaded as the spec says."""

    code, title, status = "model_error", "The model cannot be used", 422


class EpisodeFailed(FlotillaError):
    """An environment or a tool did not answer. Never a reward of zero."""

    code, title, status = "episode_failed", "The episode failed", 502


class EnvironmentDiverged(EpisodeFailed):
    """Replayed from its seed and the recorded actions, an environment shows something else than before."""

    code, title = "environment_diverged", "The environment cannot be replayed"


class GradingFailed(FlotillaError):
    """A grader did not produce a grade. Never a reward of zero."""

    code, title, status = "grading_failed", "Grading failed", 502


class WeightTransferFailed(FlotillaError):
    """A publication's bytes did not reach this member intact."""

    code, title, status = "weight_transfer_failed", "Weight transfer failed", 502


class WeightsDiverged(WeightTransferFailed):
    """What an engine serves after loading is not what was published: it serves nothing until it has loaded again."""

    code, title = "weights_diverged", "The weights that serve are not those that were published"


class WorkerDied(FlotillaError):
    """A worker process ended; the detail carries exit code and last lines."""

    code, title, status = "worker_died", "A worker process ended", 500


class ServerUnreachable(WorkerDied):
    """An external server that was reached before cannot be reached now; it may come back."""

    code, title, status = "server_unreachable", "A server cannot be reached", 500


def all_errors(root: type[FlotillaError] = FlotillaError) -> list[type[FlotillaError]]:
    """List a class and all below it that are imported, each behind its subclasses."""
    return [*(each for child in root.__subclasses__() for each in all_errors(child)), root]


def error_for_code(code: str) -> type[FlotillaError]:
    """Find the class that sends ``code``; the base class for a code of a newer server."""
    # The last: a subclass that inherits its code may be made of other arguments, and does not replace its parent.
    return {each.code: each for each in all_errors()}.get(code, FlotillaError)
