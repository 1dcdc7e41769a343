"""Authorisation: scopes, and passes, which are tokens that a gateway signs instead of storing.

A pass names its owner and its expiry; making one takes the fleet's operator token. So a gateway that
restarts knows the passes of the one before, without a database.
"""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from flotilla.shared.schemas.service import ServiceKind

PASS_PREFIX = "flp_"  # noqa: S105  no password
RENEWED_TOKEN = "Flotilla-Token"  # noqa: S105  no password
"""Header of an answer that brings the caller's next pass, once half the life of the present one is over."""


class Scope(StrEnum):
    """What a token is for."""

    OPERATOR = "operator"
    """Everything."""
    SERVICE = "service"
    """Being a member of the fleet, of one kind or any."""
    AGENT = "agent"
    """Taking part in the episodes of one experiment."""
    GRADER = "grader"
    """Grading for one experiment."""
    READER = "reader"
    """Looking."""
    TINKER = "tinker"
    """Training and sampling through the Tinker API: what it made itself, and nothing else."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity that a token has.

    Attributes:
        scope: what it may do.
        name: for people, in audit records.
        kind: of a service; None: of any kind.
        service_id: of a service that has registered; None: it may do nothing but register.
        experiment_id: the only experiment that it may touch; None: all.
        subject: what else it is bound to, such as one episode; read by the routes that issue such passes.
        epoch: of a trainer's assignment to the experiment; None: it does no work for an experiment.
        owner: whose token it is: it touches only experiments of the same owner. None: the fleet's own, which may touch
            all.
    """

    scope: Scope
    name: str
    kind: ServiceKind | None = None
    service_id: str | None = None
    experiment_id: str | None = None
    subject: str | None = None
    epoch: int | None = None
    owner: str | None = None

    @property
    def actor(self) -> str:
        """What audit records name, at most 64 characters."""
        return f"{self.scope} {self.name}"[:64] if self.name != self.scope else self.name


class PassKey:
    """Signs and reads passes.

    Args:
        secret: the fleet's operator token; the keys are derived from it.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._key = self._derive("passes")

    def sign(self, principal: Principal, expires_at: float | None) -> str:
        """Make a pass; ``expires_at`` in seconds since the epoch, None for one that does not expire."""
        claims: dict[str, Any] = {"scope": principal.scope, "name": principal.name, "expires_at": expires_at}
        for name in ("kind", "service_id", "experiment_id", "subject", "epoch"):
            if (value := getattr(principal, name)) is not None:
                claims[name] = value
        body = json.dumps(claims, separators=(",", ":")).encode()
        return self._written(body)

    def read(self, text: str) -> tuple[Principal, float | None] | None:
        """Return whom a pass is for and when it expires; None if it is not one of this key's."""
        try:
            raw = _decoded(text.removeprefix(PASS_PREFIX).partition(".")[0])
            is_ours = hmac.compare_digest(text.encode(), self._written(raw).encode())
        except ValueError:
            return None
        if not is_ours:
            return None
        claims = json.loads(raw)
        expires_at = claims.pop("expires_at")
        kind = claims.pop("kind", None)
        try:
            principal = Principal(**{**claims, "scope": Scope(claims["scope"])})
            return replace(principal, kind=None if kind is None else ServiceKind(kind)), expires_at
        except (ValueError, TypeError):
            # Of a later release: a claim that is not understood may be a restriction.
            return None

    def peer_token(self, kind: ServiceKind) -> str:
        """Return the token that other services show to those of a kind; it allows nothing else."""
        return self._derive(f"peers of {kind}").hex()

    def weights_token(self) -> str:
        """Return the token that rollouts show to each other to pull weights; it allows nothing else."""
        return self._derive("readers of weights").hex()

    def logs_token(self, service_id: str) -> str:
        """Return the token that the gateway shows to one service to read its logs; it allows nothing else."""
        return self._derive(f"readers of logs of {service_id}").hex()

    def joining(self, kind: ServiceKind) -> str:
        """Make the pass with which a service of a kind registers, and can do nothing else."""
        return self.sign(Principal(Scope.SERVICE, f"a {kind}", kind), None)

    def _written(self, body: bytes) -> str:
        mac = hmac.new(self._key, body, hashlib.sha256).digest()
        return f"{PASS_PREFIX}{_encoded(body)}.{_encoded(mac)}"

    def _derive(self, purpose: str) -> bytes:
        return hmac.new(self._secret, f"flotilla {purpose}".encode(), hashlib.sha256).digest()


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
