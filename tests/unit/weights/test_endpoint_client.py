"""What the client of the weight endpoint refuses before any process is started."""

import pytest

from flotilla.shared.weights.group.endpoint_client import EndpointClient


def test_a_wildcard_needs_an_address_that_receivers_can_reach() -> None:
    with pytest.raises(ValueError, match="advertise_host"):
        EndpointClient(bind_host="0.0.0.0")
    EndpointClient(bind_host="0.0.0.0", advertise_host="127.0.0.1")
