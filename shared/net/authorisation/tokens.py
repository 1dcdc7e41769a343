"""Tokens and signatures: made from the operating system's randomness, compared in constant time."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from flotilla.shared.schemas.service import Registered, ServiceKind

TINKER_PREFIX = "tml-"
"""Before a token where the client of the Tinker API shows it: it takes no others."""


def new_token() -> str:
    """Make a bearer token of 256 random bits."""
    return secrets.token_urlsafe(32)


def write_secret(path: Path, secret: str) -> None:
    """Write a secret atomically, readable by this user alone (mode 0600 from the start)."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(secret + "\n")
    unfinished.replace(path)


def is_same_secret(given: str | None, expected: str) -> bool:
    """Compare in time that does not depend on where they differ; a missing one is never the same."""
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())


def digest_of(token: str) -> str:
    """Return what is stored of a token: its SHA-256, hexadecimal. Tokens are random, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_of(header: str | None) -> str | None:
    """Take the token out of an ``Authorization`` header; None if there is none."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Sign a body for a receiver that shares ``secret``: HMAC-SHA-256 over ``timestamp + "." + body``, hexadecimal."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def new_callback_key(secret: str | None, name: str) -> str:
    """Make what a mailbox keeps of an expected callback: the token of its address, a colon, and its signing key.

    The signing key is derived from the secret that is shared with the grader, so that a checker of signatures needs no
    more than the key of this one request; without a secret it is empty, and callbacks are not signed.
    """
    return f"{secrets.token_hex(16)}:{'' if secret is None else callback_key(secret, name)}"


def callback_key(secret: str, name: str) -> str:
    """Derive the key that signs the callback of the request ``name``: HMAC-SHA-256 over its id, hexadecimal."""
    return hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()


Accepts = Callable[[str | None], bool]
"""Reports whether an ``Authorization`` header is let in."""


class Credentials:
    """The tokens of one service process.

    Args:
        token: given at its start: it registers with it, and accepts it from callers.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._peers: dict[ServiceKind, str] = {}
        self._accepted = frozenset({digest_of(token)})
        self._accepted_for_weights: frozenset[str] = frozenset()
        self._accepted_for_logs: frozenset[str] = frozenset()

    def take(self, registered: Registered) -> None:
        """Remember what the gateway says."""
        self._peers = dict(registered.peers)
        self._accepted = frozenset({digest_of(self._token), *registered.accepts})
        self._accepted_for_weights = frozenset(registered.accepts_for_weights)
        self._accepted_for_logs = frozenset(registered.accepts_for_logs)

    def for_peer(self, kind: ServiceKind) -> str:
        """Return the token to show to services of a kind; its own where the gateway named none."""
        return self._peers.get(kind, self._token)

    def accepts(self, authorization: str | None) -> bool:
        """Return whether an ``Authorization`` header is accepted."""
        return _is_in(self._accepted, authorization)

    def accepts_for_weights(self, authorization: str | None) -> bool:
        """Return whether an ``Authorization`` header allows to read weights."""
        return _is_in(self._accepted | self._accepted_for_weights, authorization)

    def accepts_for_logs(self, authorization: str | None) -> bool:
        """Return whether an ``Authorization`` header allows to read what was logged: a peer's does not."""
        return _is_in(self._accepted_for_logs, authorization)


def _is_in(digests: frozenset[str], authorization: str | None) -> bool:
    token = bearer_of(authorization)
    # A set of digests: the time of the lookup reveals nothing about a token that hashes to one of them.
    return token is not None and digest_of(token) in digests
