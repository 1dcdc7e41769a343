"""What a service offers, as rows of a gateway's database have it."""

from flotilla.shared.schemas.engine import EngineOffer
from flotilla.shared.schemas.service import Capabilities


def test_a_row_of_before_there_were_several_engines_is_read() -> None:
    assert Capabilities.model_validate({"engine": "torch", "cores": 3}) == Capabilities(cores=3)
    offered = Capabilities(engines=(EngineOffer(kind="torch"),))
    assert Capabilities.model_validate(offered.model_dump(mode="json")) == offered
    assert Capabilities.model_validate(offered) == offered
