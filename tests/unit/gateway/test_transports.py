"""Each rollout gets the weights by the fastest way that reaches it."""

from typing import Any

import pytest

from services.gateway.publications.transports import transport_for
from shared.schemas.publication import Transport
from shared.schemas.service import Capabilities
from tests.unit.gateway.builders import a_spec, spec_document

EVERY = ("gloo", "nccl", "pull")
HERE = Capabilities(transports=EVERY, shared_memory="here")
THERE = Capabilities(transports=EVERY, shared_memory="there")
BLIND = Capabilities(transports=EVERY)
PULLING = Capabilities(transports=("pull",))
CUDA = {
    "rollout": spec_document()["rollout"] | {"engine": {"device": "cuda:1"}},
    "parallelism": {"device": "cuda:0"},
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


def test_without_shared_memory_nobody_maps() -> None:
    assert transport_for(a_spec(), BLIND, BLIND) is Transport.GLOO
