"""Web hooks of the gateway: which events are told to which URL, as the operator's file says."""

from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

WEBHOOKS: Final = "FLOTILLA_WEBHOOKS"
MOST: Final = 16


class Webhook(BaseModel):
    """One receiver."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(max_length=2048)
    events: tuple[str, ...] = Field(("*",), min_length=1, max_length=64)
    """Kinds of events, with ``*`` for any letters."""
    secret: SecretStr = Field(min_length=16, max_length=1024)
    """Signs each delivery."""

    @field_validator("url")
    @classmethod
    def _is_web(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc or parts.fragment:
            raise ValueError("it must be http(s)://HOST[:PORT]/PATH, without a user and a fragment")
        return url

    def wants(self, kind: str) -> bool:
        """Whether events of a kind are told."""
        return any(fnmatchcase(kind, pattern) for pattern in self.events)

    @property
    def shown(self) -> str:
        """The URL as others may see it: services keep keys in paths and queries."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}/***" if parts.path.strip("/") or parts.query else self.url


class WebhookFile(BaseModel):
    """What ``FLOTILLA_WEBHOOKS`` names."""

    model_config = ConfigDict(extra="forbid")

    webhooks: tuple[Webhook, ...] = Field(max_length=MOST)
