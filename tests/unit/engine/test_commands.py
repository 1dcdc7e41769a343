"""What crosses to the engine's process arrives as it was sent."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, EngineLoad, Prefix, ResumeRule
from flotilla.services.rollout.engines.process.commands import (
    Abort,
    AbortTransfer,
    AdvanceTransfer,
    BeginTransfer,
    Cancel,
    Close,
    Command,
    CompleteTransfer,
    DiscardWeights,
    DropAdapter,
    Generate,
    LoadAdapter,
    Sleep,
    TakeLoad,
    UpdateWeights,
    Wake,
    answer_from_wire,
    answer_to_wire,
    command_from_wire,
    command_to_wire,
)
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
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
        Generate(1, a_request(adapter="a")),
        LoadAdapter(2, "a", Path("/data/adapter_model.safetensors"), 2.0, 7, OnWeightUpdate.INTERRUPT),
        LoadAdapter(2, "a", None, 1.0, 0, OnWeightUpdate.CONTINUE),
        TakeLoad(4, "a"),
        DropAdapter(2, "a"),
        TakeLoad(3),
        DiscardWeights(5),
        Abort("a"),
        Cancel(4),
        Close(),
        BeginTransfer(6, Path("/dev/shm/image"), 8),
        AdvanceTransfer(6, 1 << 40),
        CompleteTransfer(6),
        AbortTransfer(6, "torn"),
        Sleep(7),
        Wake(8),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_command_survives_the_wire(command: Command) -> None:
    assert command_from_wire(json.loads(json.dumps(command_to_wire(command)))) == command


def test_completions_survive_the_wire() -> None:
    sent = Completion(np.array([3, 4], np.int32), np.array([-0.5, -1.25], np.float32), ((0, 1),), FinishReason.STOP, 1)

    [received] = answer_from_wire(json.loads(json.dumps(answer_to_wire([sent]))))

    assert received.token_ids.tolist() == [3, 4]
    assert received.log_probs.tolist() == [-0.5, -1.25]
    assert (received.token_ids.dtype, received.log_probs.dtype) == (np.int32, np.float32)
    assert (received.versions, received.finish_reason) == (((0, 1),), FinishReason.STOP)
    assert received.num_resumed == 1


def test_load_and_nothing_survive_the_wire() -> None:
    load = EngineLoad(version=3, running=1, waiting=2, slots=4, generated_tokens=5, prefilled_tokens=6)

    assert answer_from_wire(answer_to_wire(load)) == load
    assert answer_from_wire(answer_to_wire(None)) is None


@pytest.mark.parametrize("wire", [["Dance", {}]])
def test_an_unknown_command_is_refused(wire: list[object]) -> None:
    with pytest.raises(ValueError, match="Dance"):
        command_from_wire(wire)


def test_settings_survive_the_wire() -> None:
    settings = EngineSettings("/models/a", version=2, dtype="bfloat16", slots=3)

    assert EngineSettings(**json.loads(json.dumps(settings.to_wire()))) == settings
    assert asdict(settings) == settings.to_wire()


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"slots": 0}, {"context_tokens": 0}, {"threads": 0}])
def test_settings_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        EngineSettings("/models/a", **change)  # type: ignore[arg-type]
