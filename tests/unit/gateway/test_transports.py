"""Each rollout gets the weights by the fastest way that reaches it."""

from collections import Counter
from typing import Any, NoReturn

import pytest

from flotilla.services.gateway.publications.transports import MAX_PEERS, lacks_version, peers_of, transport_for
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.store.records import ServiceRecord
from flotilla.shared.schemas.publication import Transport
from flotilla.shared.schemas.service import Capabilities, ObservedState
from tests.unit.gateway.builders import a_registration, a_spec, spec_document

CHECKSUM = "0" * 16
EVERY = ("gloo", "nccl", "pull")
HERE = Capabilities(transports=EVERY, shared_memory="here")
THERE = Capabilities(transports=EVERY, shared_memory="there")
BLIND = Capabilities(transports=EVERY)
PULLING = Capabilities(transports=("pull",))
CUDA = {
    "rollout": spec_document()["rollout"] | {"engine": {"device": "cuda:1"}},
    "parallelism": {"device": "cuda:0"},
}
ON_ONE_DEVICE = {
    "rollout": spec_document()["rollout"] | {"engine": {"device": "cuda:0"}},
    "parallelism": {"device": "cuda:0"},
    "resources": {"sharing": "time"},
}


@pytest.mark.parametrize(
    ("choice", "rollout", "sections", "expected"),
    [
        ("auto", HERE, {}, Transport.SHARED_MEMORY),
        ("auto", THERE, {}, Transport.GLOO),
        ("auto", BLIND, {}, Transport.GLOO),
        ("auto", THERE, CUDA, Transport.NCCL),
        ("auto", HERE, CUDA, Transport.SHARED_MEMORY),
        ("auto", PULLING, {}, None),
        ("auto", HERE, ON_ONE_DEVICE, Transport.SHARED_MEMORY),
        ("group", HERE, {}, Transport.GLOO),
        ("group", THERE, {}, Transport.GLOO),
        ("group", BLIND, {}, Transport.GLOO),
        ("group", HERE, CUDA, Transport.NCCL),
        ("group", THERE, CUDA, Transport.NCCL),
        ("group", HERE, ON_ONE_DEVICE, Transport.GLOO),
        ("group", PULLING, {}, None),
        ("gloo", HERE, {}, Transport.GLOO),
        ("gloo", PULLING, {}, None),
        ("nccl", HERE, CUDA, Transport.NCCL),
        ("shared_memory", HERE, {}, Transport.SHARED_MEMORY),
        ("shared_memory", THERE, {}, None),
        ("pull", HERE, {}, None),
    ],
)
def test_the_transport_of_a_rollout(
    choice: str, rollout: Capabilities, sections: dict[str, Any], expected: Transport | None
) -> None:
    spec = a_spec(asynchrony={"publication": {"transport": choice}}, **sections)

    assert transport_for(spec, HERE, rollout) is expected


@pytest.mark.parametrize(("trainer", "expected"), [(HERE, Transport.ENGINE), (PULLING, None)])
def test_engines_that_are_members_themselves_are_sent_to_wherever_they_are(
    trainer: Capabilities, expected: Transport | None
) -> None:
    engine = {"kind": "sglang", "update_weights_from": "distributed", "options": {"tp_size": 2}}
    spec = a_spec(rollout=spec_document()["rollout"] | {"engine": engine})

    assert transport_for(spec, trainer, HERE) is transport_for(spec, trainer, PULLING) is expected
    assert spec.engine_ranks == 2


def test_without_shared_memory_nobody_maps() -> None:
    assert transport_for(a_spec(), BLIND, BLIND) is Transport.GLOO


def a_rollout(name: str, held_image: str | None = None, *, is_draining: bool = False) -> LiveService:
    registration = a_registration(incarnation=name).model_dump(mode="json")
    record = ServiceRecord(id=name, registered_at=0.0, number=1, is_draining=is_draining, **registration)
    service = LiveService(record, lease_ends=1.0, heard_at=0.0)
    service.observed = ObservedState(policy_version=2, held_image=held_image)
    return service


def unasked() -> NoReturn:
    raise AssertionError("who needs no peers asks for none")


def test_a_rollout_is_sent_to_those_that_keep_the_committed_image() -> None:
    lacking = a_rollout("new")
    having = a_rollout("has it", CHECKSUM)
    others = [a_rollout("old", "1" * 16), a_rollout("leaves", CHECKSUM, is_draining=True), a_rollout("none")]

    assert peers_of(lacking, lambda: [lacking, having, *others], CHECKSUM) == [having]
    assert peers_of(having, unasked, CHECKSUM) == []
    assert peers_of(lacking, unasked, None) == []


def test_each_rollout_is_sent_to_a_few_others_and_always_to_the_same() -> None:
    having = [a_rollout(f"r{number}", CHECKSUM) for number in range(20)]
    chosen = [peers_of(a_rollout(f"new{number}"), lambda: having, CHECKSUM) for number in range(20)]

    assert {len(peers) for peers in chosen} == {MAX_PEERS}
    assert chosen[0] == peers_of(a_rollout("new0"), lambda: having[::-1], CHECKSUM)
    assert len({peer.id for peers in chosen for peer in peers}) > 2 * MAX_PEERS


def test_only_a_rollout_that_serves_another_version_lacks_it() -> None:
    rollout = a_rollout("r")

    assert (lacks_version(rollout, 3), lacks_version(rollout, 2), lacks_version(rollout, 0)) == (True, False, False)


def test_no_rollout_is_asked_by_many_more_than_others() -> None:
    having = [a_rollout(f"r{number}", CHECKSUM) for number in range(50)]
    asked = Counter(
        peer.id for number in range(500) for peer in peers_of(a_rollout(f"new{number}"), lambda: having, CHECKSUM)
    )

    assert len(asked) == len(having)
    assert max(asked.values()) < 2 * 500 * MAX_PEERS / len(having)
