"""Web hooks of the gateway: which events are sent to which URL, by the operator's file."""

import base64
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

WEBHOOKS: Final = "FLOTILLA_WEBHOOKS"
MOST: Final = 16
ENCODED: Final = "whsec_"
"""Begins a secret whose rest is the base64 of the key, as libraries for Standard Webhooks read it."""
LEAST_KEY_BYTES: Final = 16


class Webhook(BaseModel):
    """One receiver."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(max_length=2048)
    events: tuple[str, ...] = Field(("*",), min_length=1, max_length=64)
    """Kinds of events, with ``*`` for any letters."""
    secret: SecretStr = Field(min_length=16, max_length=1024)
    """Signs each delivery: what follows ``whsec_`` is the key in base64; another secret's bytes are the key."""

    @field_validator("url")
    @classmethod
    def _is_web(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc or parts.fragment:
            raise ValueError("it must be http(s)://HOST[:PORT]/PATH, without a user and a fragment")
        try:
            if parts.port == 0:
                raise ValueError("no port 0")
            # What the resolver asks of a name, and what the client asks of a URL.
            parts.hostname.encode("idna")
            httpx.URL(url)
        except (ValueError, httpx.InvalidURL):
            raise ValueError("its host is no name or address, or its port is not from 1 to 65535") from None
        return url

    @field_validator("secret")
    @classmethod
    def _is_key(cls, secret: SecretStr) -> SecretStr:
        try:
            is_key = len(key_of(secret.get_secret_value())) >= LEAST_KEY_BYTES
        except ValueError:
            is_key = False
        if not is_key:
            raise ValueError(f"after {ENCODED} it must be the base64 of at least {LEAST_KEY_BYTES} bytes")
        return secret

    @property
    def key(self) -> bytes:
        """What deliveries are signed with."""
        return key_of(self.secret.get_secret_value())

    def wants(self, kind: str) -> bool:
        """Whether events of a kind are sent."""
        return any(fnmatchcase(kind, pattern) for pattern in self.events)

    @property
    def shown(self) -> str:
        """The URL as others may see it: services keep keys in paths and queries."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}/***" if parts.path.strip("/") or parts.query else self.url


def key_of(secret: str) -> bytes:
    """Return the key that a secret stands for.

    Raises:
        ValueError: it begins with ``whsec_``, and the rest is no base64.
    """
    is_encoded = secret.startswith(ENCODED)
    return base64.b64decode(secret.removeprefix(ENCODED), validate=True) if is_encoded else secret.encode()


class WebhookFile(BaseModel):
    """What ``FLOTILLA_WEBHOOKS`` names."""

    model_config = ConfigDict(extra="forbid")

    webhooks: tuple[Webhook, ...] = Field(max_length=MOST)
