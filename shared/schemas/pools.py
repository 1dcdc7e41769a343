"""The pool of machines that a service runs in, and who is asked whether its machine will be taken away."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from flotilla.shared.errors import InvalidRequest

POOL = "FLOTILLA_POOL"
NOTICES = "FLOTILLA_NOTICES"
METADATA = "FLOTILLA_METADATA_URL"
LINK_LOCAL = "http://169.254.169.254"
"""Where AWS, GCP and Azure have their metadata; only the machine itself reaches it."""
POOL_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
ON_DEMAND = "on-demand"
"""Of services that name no pool."""


def is_spot(pool: str | None) -> bool:
    """Whether the machines of a pool may be taken away: ``spot``, or a name that begins with ``spot-``."""
    return pool == "spot" or (pool or "").startswith("spot-")


def pool_from(values: Mapping[str, str]) -> str | None:
    """Read ``FLOTILLA_POOL``; None where it is not set.

    Raises:
        InvalidRequest: it is no name.
    """
    text = values.get(POOL, "").strip()
    if text and not re.fullmatch(POOL_PATTERN, text):
        raise InvalidRequest(
            f"{POOL} must be a name of up to 64 small letters, digits, dots, dashes and underscores, such as spot, "
            f"spot-a100 or on-demand, got {text!r}"
        )
    return text or None


class Cloud(StrEnum):
    """Whose metadata say that a machine will be taken away."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Who is asked for notices, and where."""

    cloud: Cloud
    url: str = LINK_LOCAL


def notices_from(values: Mapping[str, str]) -> NoticeSource | None:
    """Read ``FLOTILLA_NOTICES`` and ``FLOTILLA_METADATA_URL``; None where nobody is asked.

    Raises:
        InvalidRequest: the one names no cloud, or the other is no address.
    """
    text, url = values.get(NOTICES, "").strip().lower(), values.get(METADATA, "").strip() or LINK_LOCAL
    if text in {"", "none"}:
        return None
    if text not in set(Cloud):
        raise InvalidRequest(f"{NOTICES} must be {', '.join(Cloud)} or none, got {text!r}")
    try:
        parts = urlsplit(url)
        is_right = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and parts.path in {"", "/"}
    except ValueError:
        is_right = False
    if not is_right or parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidRequest(f"{METADATA} must be an address such as {LINK_LOCAL}, got {url!r}")
    return NoticeSource(Cloud(text), url.rstrip("/"))
