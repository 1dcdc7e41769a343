"""Bytes in fields of what is written as JSON."""

import base64
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer


def _decoded(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


EncodedBytes = Annotated[bytes, BeforeValidator(_decoded), PlainSerializer(_encoded, return_type=str, when_used="json")]
"""Bytes that are base64 where they are written as JSON."""
