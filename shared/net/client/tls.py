"""The context in which every client of ours checks certificates."""

import ssl
from functools import cache

import httpx


@cache
def tls_context() -> ssl.SSLContext:
    """Read the certificate authorities once in a process: it takes as long as forty requests."""
    return httpx.create_ssl_context(trust_env=False)
