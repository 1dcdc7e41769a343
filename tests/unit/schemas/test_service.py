"""What a service offers, as rows of a gateway's database have it."""

import pytest
from pydantic import ValidationError

from flotilla.shared.schemas.checks import HostFacts
from flotilla.shared.schemas.engine import EngineOffer
from flotilla.shared.schemas.service import Capabilities, Registration


def test_a_row_of_before_there_were_several_engines_is_read() -> None:
    assert Capabilities.model_validate({"engine": "torch", "cores": 3}) == Capabilities(cores=3)
    offered = Capabilities(engines=(EngineOffer(kind="torch"),))
    assert Capabilities.model_validate(offered.model_dump(mode="json")) == offered
    assert Capabilities.model_validate(offered) == offered


def registered_as(address: str) -> Registration:
    return Registration.model_validate(
        {"kind": "reward", "address": address, "host": "h", "pid": 1, "incarnation": "i"}
    )


@pytest.mark.parametrize("address", ["http://xn--a:1", "http://a\u2024.b..c:1", "http://999.1.1.1:2", "http://a..b:1"])
def test_an_address_that_its_callers_could_not_look_up_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="must be a URL"):
        registered_as(address)


@pytest.mark.parametrize(
    "address", ["http://10.0.0.7:9002", "https://[fd00::1]:9", "http://m\u00fcller.de", "http://a_b:1"]
)
def test_an_address_that_can_be_looked_up_is_taken_as_it_is(address: str) -> None:
    assert registered_as(address).address == address


def test_facts_have_ports_that_there_can_be_and_uses_that_are_known() -> None:
    facts = {"release": "1", "spec_revision": 1, "code": "a", "schemas": "b"}
    for port in (0, -1, 65_536):
        with pytest.raises(ValidationError):
            HostFacts.model_validate(facts | {"ports": {"data": port}})
    assert HostFacts.model_validate(facts | {"ports": {"data": 65_535, "u" * 40: 1}}).ports == {"data": 65_535}
