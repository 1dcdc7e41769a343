"""A short name for a JSON document, made of its content: equal documents have equal digests in every process."""

import hashlib
import json
from typing import Any


def digest(document: Any) -> str:
    """Hash a JSON document by content."""
    encoded = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str).encode()
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
