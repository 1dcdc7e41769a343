"""Names and paths of other systems in our spelling."""

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit


def experiment_name(value: Any) -> str:
    """Keep what an experiment's name may hold."""
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value if value is not None else "")).strip("-._")
    return kept[:63] or "imported"


def is_private_host(url: str) -> bool:
    """Return whether a URL names a host that only its own network knows."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".lan", ".svc"))
