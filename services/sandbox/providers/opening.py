"""From a service's settings to its provider."""

import importlib.util
from urllib.parse import urlsplit

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
        InvalidRequest: it needs a key or a package, and there is none.
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
    if kind == "modal":
        return _open_modal(url, key, owner)
    if kind == "e2b":
        return E2B(url or e2b.URL, key, owner, transport=transport)
    return Daytona(url or daytona.URL, key, owner, transport=transport)


def has_modal() -> bool:
    """Return whether the package is installed; nothing is imported."""
    return importlib.util.find_spec("modal") is not None


def _open_modal(url: str | None, key: str, owner: str) -> Provider:
    """Make the provider that is asked by a package of its own.

    Raises:
        InvalidRequest: the package is missing, or an option is unknown to it.
    """
    if not has_modal():
        raise InvalidRequest(
            "the provider modal needs its package where the sandbox service runs: pip install 'flotilla[modal]' "
            "(in a checkout: pip install '.[modal]')"
        )
    token_id, _, secret = key.partition(":")
    if not token_id or not secret:
        raise InvalidRequest(f"{KEY} of the provider modal is the id and the secret of a token, ID:SECRET")
    if url is not None and urlsplit(url).scheme not in {"http", "https"}:
        raise InvalidRequest(f"FLOTILLA_SANDBOX_URL of the provider modal begins with http:// or https://, not {url!r}")
    from flotilla.services.sandbox.providers.modal import Modal  # only where it is named

    return Modal(url, (token_id, secret), owner)
