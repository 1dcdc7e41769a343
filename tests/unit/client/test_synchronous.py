"""Both clients offer the same: a call that one of them lacks would be missed by half of the users."""

import inspect

from flotilla.client import AsyncClient, Client


def offered(client: type) -> dict[str, list[tuple[str, object]]]:
    """List the parameters and their defaults of each public method."""
    found = {}
    for name, method in inspect.getmembers(client, inspect.isfunction):
        if not name.startswith("_"):
            parameters = list(inspect.signature(method).parameters.values())
            found[name] = [(each.name, each.kind, each.default) for each in parameters]
    return found


def test_both_clients_have_the_same_calls_with_the_same_parameters() -> None:
    assert offered(AsyncClient) == offered(Client)
    assert len(offered(Client)) > 30
