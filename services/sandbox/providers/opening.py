"""From what a service is told to its provider."""

import httpx

from flotilla.services.sandbox.providers import daytona, docker, e2b, kubernetes
from flotilla.services.sandbox.providers.base import Provider
from flotilla.services.sandbox.providers.daytona import Daytona
from flotilla.services.sandbox.providers.docker import Docker
from flotilla.services.sandbox.providers.e2b import E2B
from flotilla.services.sandbox.providers.kubernetes import Kubernetes
from flotilla.services.sandbox.settings import KEY, SandboxSettings
from flotilla.shared.errors import InvalidRequest


def open_provider(
    settings: SandboxSettings, owner: str, *, transport: httpx.AsyncBaseTransport | None = None
) -> Provider:
    """Make a provider; nothing is asked of it yet.

    Args:
        settings: of the service.
        owner: the label of what it makes.
        transport: another one than sockets.

    Raises:
        InvalidRequest: it needs a key, and there is none.
    """
    kind, url = settings.provider, settings.url
    key = settings.key.get_secret_value() if settings.key is not None else ""
    if kind == "docker":
        return Docker(url or docker.URL, owner, runtime=settings.runtime, transport=transport)
    if kind == "kubernetes":
        return Kubernetes(
            url or kubernetes.URL,
            key or None,
            owner,
            namespace=settings.namespace,
            runtime=settings.runtime,
            transport=transport,
        )
    if not key:
        raise InvalidRequest(f"the provider {kind} needs the key of an account: {KEY}, or a file that {KEY}_FILE names")
    if kind == "e2b":
        return E2B(url or e2b.URL, key, owner, transport=transport)
    return Daytona(url or daytona.URL, key, owner, transport=transport)
