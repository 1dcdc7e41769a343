"""Registrations that wait for their turn are stored together, and each is as it would be alone."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.gateway.membership.joining import MOST_TOGETHER
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PutRecord, Write
from flotilla.shared.errors import Conflict, Unavailable
from flotilla.shared.schemas.experiment import Event
from flotilla.shared.schemas.service import Registered, Registration, ServiceKind
from tests.unit.gateway.builders import a_gateway, a_registration


class CountingStore(MemoryStore):
    """Counts transactions, and refuses as many as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes: list[int] = []
        self.refuse = 0

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        if self.refuse:
            self.refuse -= 1
            raise Unavailable("the database does not answer")
        self.num_writes.append(len(writes))
        await asyncio.sleep(0)
        return await super().apply(writes)


class PickyStore(MemoryStore):
    """Takes no transaction in which a certain process is."""

    refused = 0

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        await asyncio.sleep(0)
        if any(isinstance(each, PutRecord) and getattr(each.record, "incarnation", "") == "bad" for each in writes):
            self.refused += 1
            raise ValueError("a value that no column takes")
        return await super().apply(writes)


async def all_of(gateway: GatewayState, registrations: Sequence[Registration]) -> list[Registered | BaseException]:
    """Register at once."""
    return await asyncio.gather(*map(gateway.fleet.register, registrations), return_exceptions=True)


def ids_of(answers: Sequence[Registered | BaseException]) -> list[str]:
    """List the ids that were given, in order."""
    return [each.service_id for each in answers if isinstance(each, Registered)]


async def test_many_that_register_at_once_are_stored_in_few_transactions() -> None:
    store = CountingStore()
    gateway = a_gateway(store)
    num = 3 * MOST_TOGETHER

    answers = await all_of(gateway, [a_registration(incarnation=f"i{number}") for number in range(num)])

    assert len(set(ids_of(answers))) == num
    assert len(store.num_writes) <= 4
    assert max(store.num_writes) == MOST_TOGETHER
    assert [each.id for each in gateway.registry] == ids_of(answers)
    assert [each.record.number for each in gateway.registry] == list(range(1, num + 1))
    assert [each.id for each in await store.services()] == ids_of(answers)


async def test_the_same_process_that_asks_twice_at_once_gets_one_id() -> None:
    gateway = a_gateway(CountingStore())
    twice = [a_registration(incarnation="i1", address=f"http://h:{port}") for port in (1, 2)]

    answers = await all_of(gateway, [a_registration(incarnation="i0"), *twice])

    first, *others = ids_of(answers)
    assert others[0] == others[1] != first
    assert len(gateway.registry) == 2


async def test_one_that_is_refused_keeps_none_of_the_others_out() -> None:
    gateway = a_gateway(CountingStore())
    await gateway.fleet.register(a_registration(incarnation="known"))
    wrong = a_registration(ServiceKind.REWARD, "known")

    answers = await all_of(gateway, [a_registration(incarnation="a"), wrong, a_registration(incarnation="b")])

    assert [type(each) for each in answers] == [Registered, Conflict, Registered]
    assert len(gateway.registry) == 3


async def test_who_was_staged_with_one_that_was_not_stored_is_staged_again() -> None:
    store = CountingStore()
    gateway = a_gateway(store)
    store.refuse = 1

    answers = await all_of(gateway, [a_registration(incarnation=f"i{number}") for number in range(5)])

    assert [type(each) for each in answers] == [Unavailable] + [Registered] * 4
    assert [each.id for each in gateway.registry] == ids_of(answers)


async def test_one_at_the_address_of_another_of_the_same_moment_waits_for_its_turn() -> None:
    gateway = a_gateway(CountingStore())
    same = [a_registration(incarnation=f"i{number}", address="http://10.0.0.1:1") for number in range(2)]

    answers = await all_of(gateway, [a_registration(incarnation="other"), *same])

    # Both said at the same time that they live: neither was silent, so neither takes the other's place.
    assert len(set(ids_of(answers))) == 3
    assert gateway.registry.superseded_by(gateway.registry.get(ids_of(answers)[1]).record) == []


async def test_one_that_the_database_does_not_take_keeps_none_of_the_others_out() -> None:
    store = PickyStore()
    gateway = a_gateway(store)
    names = ["i0", "i1", "bad", *(f"i{number}" for number in range(2, 9))]

    answers = await all_of(gateway, [a_registration(incarnation=name) for name in names])

    assert [type(each) for each in answers] == [ValueError if name == "bad" else Registered for name in names]
    assert store.refused == 2, "once together, once alone"
    assert {each.id for each in await store.services()} == set(ids_of(answers))


@pytest.mark.parametrize("wrong", [{"pid": 2**31}, {"host": "a\0b"}, {"host": "a\nb"}, {"incarnation": "a\0b"}])
def test_what_no_database_takes_is_no_registration(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Registration.model_validate(a_registration().model_dump() | wrong)


@pytest.mark.parametrize("num", [1, 2])
async def test_numbers_go_on_after_those_who_left(num: int) -> None:
    gateway = a_gateway()
    for number in range(num):
        service = await gateway.fleet.register(a_registration(incarnation=f"i{number}"))
    await gateway.fleet.leave(service.service_id, reason="it left")

    later = await gateway.fleet.register(a_registration(incarnation="later"))

    assert gateway.registry.get(later.service_id).record.number == num + 1
