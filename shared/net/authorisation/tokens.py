"""Tokens and signatures: made from the operating system's randomness, compared in constant time."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path


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

    The signing key is derived from the secret that is shared with the grader, so that who checks signatures needs no
    more than the key of this one request; without a secret it is empty, and callbacks are not signed.
    """
    return f"{secrets.token_hex(16)}:{'' if secret is None else callback_key(secret, name)}"


def callback_key(secret: str, name: str) -> str:
    """Derive the key that signs the callback of the request ``name``: HMAC-SHA-256 over its id, hexadecimal."""
    return hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()
