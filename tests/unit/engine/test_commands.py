"""What crosses to the engine's process arrives as it was sent."""

import asyncio
import socket
from dataclasses import asdict
from pathlib import Path

import msgpack
import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, EngineLoad
from flotilla.services.rollout.engines.process.commands import (
    Abort,
    Cancel,
    Close,
    Command,
    DiscardWeights,
    Generate,
    TakeLoad,
    UpdateWeights,
    command_from_wire,
    command_to_wire,
    result_from_wire,
    result_to_wire,
)
from flotilla.services.rollout.engines.process.framing import encode, read_message, receive_message
from flotilla.services.rollout.engines.resumption import Prefix, ResumeRule
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.requests import a_request


@pytest.mark.parametrize(
    "command",
    [
        Generate(1, a_request(seeds=(2**63 - 1,), stop=("a", "é"), stop_token_ids=(4,), holds_weights=True)),
        Generate(
            1,
            a_request(
                seeds=(1, 2),
                prefixes=(None, Prefix((4, 5), (-0.5, -1.5), ((0, 1), (1, 2)))),
                resume=ResumeRule(mixes_versions=True, max_lag=2),
            ),
        ),
        UpdateWeights(2, Path("/dev/shm/image"), 7, OnWeightUpdate.INTERRUPT),
        TakeLoad(3),
        DiscardWeights(5),
        Abort("a"),
        Cancel(4),
        Close(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_command_survives_the_wire(command: Command) -> None:
    assert command_from_wire(msgpack.unpackb(msgpack.packb(command_to_wire(command)))) == command


def test_completions_survive_the_wire() -> None:
    sent = Completion(np.array([3, 4], np.int32), np.array([-0.5, -1.25], np.float32), ((0, 1),), FinishReason.STOP, 1)

    [received] = result_from_wire(msgpack.unpackb(msgpack.packb(result_to_wire([sent]))))

    assert received.token_ids.tolist() == [3, 4]
    assert received.log_probs.tolist() == [-0.5, -1.25]
    assert (received.token_ids.dtype, received.log_probs.dtype) == (np.int32, np.float32)
    assert (received.versions, received.finish_reason) == (((0, 1),), FinishReason.STOP)
    assert received.num_resumed == 1


def test_load_and_nothing_survive_the_wire() -> None:
    load = EngineLoad(version=3, running=1, waiting=2, slots=4, generated_tokens=5, prefilled_tokens=6)

    assert result_from_wire(result_to_wire(load)) == load
    assert result_from_wire(result_to_wire(None)) is None


def test_an_error_arrives_as_the_same_class() -> None:
    sent = InvalidRequest("too long", errors=[{"field": "prompt_ids"}], limit=4)

    received = result_from_wire(msgpack.unpackb(msgpack.packb(result_to_wire(sent))))

    assert type(received) is InvalidRequest
    assert (received.detail, received.errors, received.context) == (sent.detail, sent.errors, sent.context)


@pytest.mark.parametrize("wire", [{"do": "dance"}])
def test_an_unknown_command_is_refused(wire: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="dance"):
        command_from_wire(wire)


async def test_messages_are_framed_both_ways() -> None:
    ours, theirs = socket.socketpair()
    messages = [{"a": 1}, {"b": "x" * 5000}]
    for message in messages:
        ours.sendall(encode(message))
        theirs.sendall(encode(message))

    assert [receive_message(theirs) for _ in messages] == messages
    reader, writer = await asyncio.open_connection(sock=ours)
    assert [await read_message(reader) for _ in messages] == messages

    theirs.close()
    with pytest.raises(EOFError):
        await read_message(reader)
    writer.close()
    await writer.wait_closed()


def test_a_closed_socket_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x05\0\0\0ab")
    ours.close()

    with theirs, pytest.raises(EOFError):
        receive_message(theirs)


def test_settings_survive_the_wire() -> None:
    settings = EngineSettings("/models/a", version=2, dtype="bfloat16", slots=3)

    assert EngineSettings(**msgpack.unpackb(msgpack.packb(settings.to_wire()))) == settings
    assert asdict(settings) == settings.to_wire()


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"slots": 0}, {"context_tokens": 0}, {"threads": 0}])
def test_settings_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        EngineSettings("/models/a", **change)  # type: ignore[arg-type]
