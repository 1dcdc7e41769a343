"""An engine whose routers choose otherwise than the trainer's: replayed, its log-probabilities are the trainer's."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from flotilla.services.rollout.engines.base import ResumeRule
from flotilla.services.rollout.engines.process.in_process import InProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.single_turn import SingleTurnEpisodes
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.streams.codec import decode_group, decode_partials, encode_body, encode_grades, encode_task
from flotilla.shared.testing.builders import a_task
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.rollout.test_multi_turn import a_conversation
from tests.unit.trainer.builders import a_spec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

PROMPT = (5, 9, 2, 11, 7, 3)


class Letters:
    """Renders every prompt as the same tokens."""

    stop_token_ids: tuple[int, ...] = ()

    def prompt_ids(self, messages: Any) -> tuple[int, ...]:
        return PROMPT

    def continuation_ids(self, messages: Any, last: int) -> tuple[int, ...]:
        return PROMPT[:2]

    def check_continuation(self, message: Any = None) -> None: ...

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


@asynccontextmanager
async def ties_that_flip(monkeypatch: pytest.MonkeyPatch, noise: float = 0.3) -> AsyncIterator[None]:
    """Let routers choose by scores with some noise, and give the weights of their own: as other kernels would."""
    generator = torch.Generator().manual_seed(7)

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        chosen = (logits + noise * torch.randn(logits.shape, generator=generator)).topk(self.top_k, dim=-1).indices
        weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    with monkeypatch.context() as patched:
        patched.setattr(Qwen3MoeTopKRouter, "forward", forward)
        yield


def trained(groups: Sequence[Group], mode: str | None) -> dict[str, float]:
    """Train a step on groups that crossed a stream; return what it measured."""
    graded = [
        Group(
            group.task,
            tuple(each.graded(GradeStatus.SCORED, float(at % 2)) for at, each in enumerate(group.trajectories)),
        )
        for group in groups
    ]
    received = [decode_group(encode_body(each), encode_grades(each)) for each in graded]
    spec = a_spec(
        algorithm={"router_replay": mode, "old_log_probs": "recompute"},
        optimisation={"groups_per_mini_batch": len(groups)},
    )
    learner = Learner(spec, LoadedModel(ARCHITECTURES["Qwen3-MoE"](), Path("/nowhere")))
    return dict(learner.train(received, 1).metrics)


@asynccontextmanager
async def an_engine(directory: Path) -> AsyncIterator[InProcessEngine]:
    engine = InProcessEngine(EngineSettings(str(directory), slots=8, context_tokens=96, records_experts=True))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ARCHITECTURES["Qwen3-MoE"]().save_pretrained(tmp_path)
    return tmp_path


def single(engine: InProcessEngine) -> SingleTurnEpisodes:
    sampling = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    return SingleTurnEpisodes(engine, Letters(), Turns(sampling, sampling), ResumeRule(mixes_versions=True, max_lag=2))


async def interrupted(episodes: Any, run: Callable[..., Any], tokens: int, engine: InProcessEngine) -> Group:
    """Begin a group, and interrupt it once the engine has sampled some tokens."""
    before = (await engine.load()).generated_tokens
    playing = asyncio.create_task(run())
    while (await engine.load()).generated_tokens < before + tokens:
        await asyncio.sleep(0)
    await episodes.interrupt()
    group: Group = await playing
    return group


async def test_replayed_log_probs_are_the_engines_and_its_own_choice_gives_others(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with an_engine(saved) as engine, ties_that_flip(monkeypatch):
        episodes = single(engine)
        groups = [await episodes.run(a_task(number, group_size=4)) for number in range(2)]

    replayed, own = trained(groups, "R3"), trained(groups, None)

    assert replayed["correction/probability_difference"] < 1e-5
    assert abs(replayed["correction/kl"]) < 1e-5
    assert own["correction/probability_difference"] > 1e-3
    assert 0.01 < replayed["router/disagreement"] < 0.5


async def test_answers_that_were_interrupted_and_gone_on_with_are_replayed_token_for_token(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(0, group_size=4)
    async with an_engine(saved) as engine, ties_that_flip(monkeypatch):
        episodes = single(engine)
        part = await interrupted(episodes, lambda: episodes.run(task), 60, engine)
        partials = decode_partials(encode_task(task, part.trajectories))
        again = await interrupted(episodes, lambda: episodes.run(task, partials), 20, engine)
        group = await episodes.run(task, decode_partials(encode_task(task, again.trajectories)))

    assert {each.finish_reason for each in part.trajectories} == {FinishReason.ABORTED}
    for first, second, whole in zip(part.trajectories, again.trajectories, group.trajectories, strict=True):
        assert len(first.token_ids) < len(whole.token_ids) == len(PROMPT) + 40
        for each in (first, second, whole):
            assert each.experts is not None
            assert each.experts.num_tokens == len(each.token_ids) - 1
        assert first.experts is not None
        assert whole.experts is not None
        known = first.experts.num_tokens
        # The engine read them again, and its routers, which are noisy, chose others.
        assert whole.experts.ids()[:known].tolist() == first.experts.ids().tolist()
    assert any(each.resumed_tokens for each in group.trajectories)
    found = trained([group], "R3")
    # Tokens behind a place where the answer was read again were sampled with another record of what is before it.
    assert found["router/disagreement"] > 0.01


async def test_episodes_of_several_turns_are_replayed(saved: Path) -> None:
    async with an_engine(saved) as engine:
        sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True)
        turns = Turns(sampling, sampling)
        episodes = MultiTurnEpisodes(engine, Letters(), turns, Limits(3, 90), a_conversation(), ResumeRule())
        group = await episodes.run(a_task(0, group_size=4))

    assert all(len(each.turns) == 3 for each in group.trajectories)
    for each in group.trajectories:
        assert each.experts is not None
        assert each.experts.num_tokens == len(each.token_ids) - 1
    replayed = trained([group], "R3")
    assert replayed["router/disagreement"] == 0
    assert replayed["correction/probability_difference"] < 1e-5
