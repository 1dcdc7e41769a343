"""Certificate authorities are read once in a process, however many clients it makes."""

import ssl
from typing import NoReturn

import pytest

from flotilla.services.reward.verifiers.registry import new_client
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.checked_transport import CheckedAddresses
from flotilla.shared.net.client.client import GatewayClient


async def test_clients_share_what_was_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object, **__: object) -> NoReturn:
        pytest.fail("the authorities are read again")

    assert tls_context().verify_mode is ssl.CERT_REQUIRED
    assert tls_context().cert_store_stats()["x509_ca"] > 50
    monkeypatch.setattr(ssl, "create_default_context", again)

    async with GatewayClient("https://gateway.example", "token"), new_client():
        await CheckedAddresses(()).aclose()
