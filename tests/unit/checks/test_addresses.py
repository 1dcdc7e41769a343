"""A name that leads to the machine of whoever tries it is not the name of a service elsewhere."""

import asyncio
from typing import Any

import pytest

from flotilla.shared.checks.addresses import address_elsewhere
from flotilla.shared.checks.attempts import reach_all
from flotilla.shared.schemas.checks import FAILED, REACHED, CheckTarget
from tests.unit.checks.test_attempts import HEALTHY, says


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every name lead to these addresses."""

    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    "addresses",
    [("127.0.0.1",), ("::1",), ("10.0.0.7", "127.0.0.1"), ("169.254.169.254",), ("fe80::1%eth0",), ("0.0.0.0",), ()],
)
async def test_a_name_that_leads_to_this_machine_or_link_is_refused(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    resolving(monkeypatch, *addresses)

    with pytest.raises(OSError, match=r"trainer\.example leads to .*: not tried"):
        await address_elsewhere("trainer.example", 1)


async def test_the_connection_goes_to_the_address_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "10.0.0.7", "10.0.0.8")

    assert await address_elsewhere("trainer.example", 1) == "10.0.0.7"


@pytest.mark.parametrize(("is_elsewhere", "outcome"), [(True, FAILED), (False, REACHED)])
async def test_nothing_is_sent_to_a_port_of_ones_own_machine_for_a_service_elsewhere(
    is_elsewhere: bool, outcome: str
) -> None:
    # Most systems resolve names below localhost without asking anybody; 127.1 is an address in a form of its own.
    async with says(HEALTHY) as port:
        url = f"http://127.1:{port}"
        ports = {"data": port} if is_elsewhere else {}
        target = CheckTarget(service_id="r", url=url, ports=ports, is_elsewhere=is_elsewhere)
        found = await reach_all([target], "ab12")

    assert {each.outcome for each in found} == {outcome}
    assert all(("127.1 leads to 127.0.0.1" in each.detail) == is_elsewhere for each in found)
