"""What one token may not do with another's models, at the gateway's side of the Tinker API."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flotilla.services.gateway.tinker.bodies import (
    AskSample,
    CreateModel,
    CreateSampler,
    CreateSession,
    OptimStep,
    SaveForSampler,
    SaveWeights,
    Ttl,
)
from flotilla.services.gateway.tinker.tinker import Tinker
from flotilla.shared.clock import ManualClock
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.tinker.records import Chunk, Prompt, Sample, Sampler, Session

ME = Principal(Scope.TINKER, "me")


class MemoryQueue:
    """As much of the queue as samples need, in memory."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.samplers: dict[str, Sampler] = {}
        self.asked: list[bytes] = []

    async def put_session(self, session_id: str, session: Session, owner: str) -> None:
        """Keep a session."""
        self.sessions[session_id] = session

    async def session(self, session_id: str) -> Session | None:
        """Find a session."""
        return self.sessions.get(session_id)

    async def put_sampler(self, sampler_id: str, sampler: Sampler) -> None:
        """Keep a sampling session."""
        self.samplers[sampler_id] = sampler

    async def sampler(self, sampler_id: str) -> Sampler | None:
        """Find a sampling session."""
        return self.samplers.get(sampler_id)

    async def ask(self, request_id: str, body: bytes, digest: str, owner: str, *, is_scored: bool) -> None:
        """Take a request to sample."""
        self.asked.append(body)


def test_a_path_beside_a_sampling_session_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    queue: Any = MemoryQueue()
    tinker = Tinker(tmp_path, tmp_path, queue, queue, ManualClock())

    async def ask() -> None:
        session = await tinker.create_session(ME, [], "")
        opening = CreateSampler(session_id=session, sampling_session_seq_id=0, base_model=tmp_path.name)
        asked = AskSample(
            prompt=Prompt(chunks=[Chunk(tokens=[1, 2, 3])]),
            sampling_session_id=await tinker.create_sampler(ME, opening),
            seq_id=1,
            model_path="tinker://somebody:train:0/sampler_weights/private",
            prompt_logprobs=True,
        )
        await tinker.sample(ME, asked)

    asyncio.run(ask())

    assert [Sample.model_validate_json(body).path for body in queue.asked] == [None]


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (SaveWeights, {"model_id": "m", "ttl_seconds": 0}),
        (SaveWeights, {"model_id": "m", "ttl_seconds": 10**15}),
        (SaveForSampler, {"model_id": "m", "ttl_seconds": -1}),
        (Ttl, {"ttl_seconds": 10**15}),
        (CreateModel, {"session_id": "s", "base_model": "m", "model_seq_id": 10**300}),
        (OptimStep, {"model_id": "m", "optim_params": {}, "seq_id": 10**300}),
        (SaveWeights, {"model_id": "m", "user_metadata": {str(number): "x" for number in range(65)}}),
        (SaveWeights, {"model_id": "m", "user_metadata": {"x": "x" * 4097}}),
        (CreateSession, {"tags": ["x" * 257]}),
    ],
)
def test_numbers_and_texts_beyond_what_can_be_kept_are_refused(body: type[BaseModel], content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        body.model_validate(content)
