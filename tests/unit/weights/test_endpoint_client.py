"""What the client of the weight endpoint refuses before any process is started."""

import pytest

from flotilla.shared.errors import DeadlineExceeded
from flotilla.shared.weights.group import endpoint_client
from flotilla.shared.weights.group.endpoint_client import EndpointClient


def test_a_wildcard_needs_an_address_that_receivers_can_reach() -> None:
    with pytest.raises(ValueError, match="advertise_host"):
        EndpointClient(bind_host="0.0.0.0")
    EndpointClient(bind_host="0.0.0.0", advertise_host="127.0.0.1")


async def test_a_start_that_was_given_up_for_its_time_has_more_of_it_the_next_time() -> None:
    client, allowed = EndpointClient(), list[float]()

    async def start() -> None:
        allowed.append(client._calls.start_seconds)
        if len(allowed) < 4:
            raise DeadlineExceeded("it was not loaded")

    client._calls.start = start  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            await client.start()
    await client.start()
    await client.start()

    assert allowed == [endpoint_client.START_SECONDS * times for times in (1, 2, 4, 8, 1)]
