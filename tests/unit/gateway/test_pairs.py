"""Pairs grow with hosts, whatever the services; nobody is left out, and nobody is asked by everybody."""

from collections import Counter

import pytest

from flotilla.services.gateway.checks.pairs import (
    MOST_OF_A_KIND,
    Member,
    choose_pairs,
    representatives,
)
from flotilla.shared.checks.addresses import is_of_each_machine
from flotilla.shared.schemas.service import ServiceKind

ROLLOUT, TRAINER, REWARD, SANDBOX = (
    ServiceKind.ROLLOUT,
    ServiceKind.TRAINER,
    ServiceKind.REWARD,
    ServiceKind.SANDBOX,
)


def members(**hosts: list[ServiceKind]) -> list[Member]:
    return [Member(f"{kind}-{host}-{n}", host, kind) for host, kinds in hosts.items() for n, kind in enumerate(kinds)]


def test_one_service_of_each_kind_stands_for_its_host() -> None:
    found = representatives(members(a=[ROLLOUT, ROLLOUT, REWARD], b=[ROLLOUT]))

    assert {(each.host, each.kind) for each in found} == {("a", ROLLOUT), ("a", REWARD), ("b", ROLLOUT)}
    assert len(found) == 3


def test_nobody_stands_for_another_machine_by_taking_its_address() -> None:
    victim, stranger = Member("r-2", "a", ROLLOUT, "one"), Member("r-1", "a", ROLLOUT, "two")
    trainer = Member("t-1", "b", TRAINER, "three")

    assert representatives([victim, stranger]) == [stranger, victim]
    assert set(choose_pairs([victim, stranger, trainer]).targets["t-1"]) == {"r-1", "r-2"}


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "::1",
        "::ffff:127.0.0.1",
        "169.254.169.254",
        "fe80::1%eth0",
        "0.0.0.0",
    ],
)
def test_an_address_of_each_machine_is_tried_on_its_own_machine_alone(host: str) -> None:
    target = Member("t-1", host, TRAINER, "one")
    near, far = Member("r-1", "a", ROLLOUT, "one"), Member("r-2", "b", ROLLOUT, "two")

    pairs = choose_pairs([target, near, far])

    assert "t-1" in pairs.targets["r-1"] and "t-1" not in pairs.targets["r-2"]


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::1", "localhost.example", "trainer-0.trainers", "a" * 300, ""])
def test_other_addresses_mean_the_same_everywhere(host: str) -> None:
    assert not is_of_each_machine(host)


def test_small_fleets_try_every_way_that_is_needed_and_no_other() -> None:
    pairs = choose_pairs(members(a=[ROLLOUT], b=[TRAINER], c=[REWARD], d=[SANDBOX]))

    tried = {(caller.split("-")[1], target.split("-")[1]) for caller, each in pairs.targets.items() for target in each}
    assert tried == {("a", "b"), ("a", "d"), ("b", "a"), ("c", "d")}
    assert pairs.num_tried == pairs.num_hosts == 4


def test_what_two_services_of_a_host_need_is_tried_once() -> None:
    pairs = choose_pairs(members(a=[ROLLOUT, REWARD], d=[SANDBOX]))

    assert sum(map(len, pairs.targets.values())) == 1


@pytest.mark.parametrize("per_host", [1, 8])
def test_a_thousand_services_try_few_ways_each_and_are_tried_by_few(per_host: int) -> None:
    fleet = members(**{f"h{n}": [ROLLOUT] * per_host for n in range(1000 // per_host)}, t=[TRAINER])
    asked = representatives(fleet)

    pairs = choose_pairs(asked, seed="ab12")

    assert len(asked) == 1000 // per_host + 1
    by = Counter(target for each in pairs.targets.values() for target in each)
    trainer = next(each.id for each in fleet if each.kind is TRAINER)
    assert by.pop(trainer) == 1000 // per_host, "of a kind that few have, everybody needs each"
    assert max(by.values()) <= MOST_OF_A_KIND + 1 and min(by.values()) >= MOST_OF_A_KIND
    assert max(map(len, pairs.targets.values())) <= MOST_OF_A_KIND + 1
    assert all(caller not in targets for caller, targets in pairs.targets.items())
    assert choose_pairs(asked, seed="cd34").targets != pairs.targets
