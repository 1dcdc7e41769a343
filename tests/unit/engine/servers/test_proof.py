"""What a server loads is proved off the event loop, and one slow answer decides nothing."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from flotilla.services.rollout.engines.servers import proof as module
from flotilla.services.rollout.engines.servers.dialect import Caller
from flotilla.services.rollout.engines.servers.proof import MAX_UNANSWERED, ServerProof, hashes_of
from flotilla.shared.errors import DeadlineExceeded, WorkerDied
from tests.contract.engine.models import save_model

CALLER = cast(Caller, None)


class Held:
    """A server that answers, once whatever it was to raise is raised."""

    signs_zeros = asks_others = True

    def __init__(self, model: Path, *errors: Exception) -> None:
        file = model / "model.safetensors"
        self._held = hashes_of([file], ["model.norm.weight"], "float32")
        self._errors = list(errors)
        assert self._held

    async def hashes(self, caller: Caller, *, seconds: float) -> Mapping[str, str]:
        if self._errors:
            raise self._errors.pop(0)
        return self._held


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


async def test_files_are_hashed_while_the_event_loop_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, goes_on = ServerProof(Held(model), "float32", 1.0), threading.Event()

    def slow(*given: Any, **options: Any) -> dict[str, str]:
        assert goes_on.wait(10), "the event loop is held"
        return hashes_of(*given, **options)

    monkeypatch.setattr(module, "hashes_of", slow)
    for work in (proof.learn(CALLER, model), proof.check(CALLER, model, 1)):
        goes_on.clear()
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        await work
    assert proof.can_tell


async def test_a_server_that_answers_late_is_asked_again_and_proved(model: Path) -> None:
    proof = ServerProof(Held(model, DeadlineExceeded("late")), "float32", 1.0)

    with pytest.raises(DeadlineExceeded):
        await proof.learn(CALLER, model)
    await proof.learn(CALLER, model)

    assert proof.can_tell


async def test_a_server_that_never_answers_serves_unproved_in_the_end(model: Path) -> None:
    proof = ServerProof(Held(model, *[DeadlineExceeded("late")] * MAX_UNANSWERED), "float32", 1.0)

    for _ in range(MAX_UNANSWERED - 1):
        with pytest.raises(DeadlineExceeded):
            await proof.learn(CALLER, model)
    await proof.learn(CALLER, model)

    assert not proof.can_tell


async def test_a_directory_without_weights_is_served_unproved_and_a_death_is_told(model: Path, tmp_path: Path) -> None:
    proof = ServerProof(Held(model, WorkerDied("gone")), "float32", 1.0)

    with pytest.raises(WorkerDied):
        await proof.learn(CALLER, tmp_path)
    await proof.learn(CALLER, tmp_path)

    assert not proof.can_tell
