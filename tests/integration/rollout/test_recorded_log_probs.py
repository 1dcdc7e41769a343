"""What the engine records over several turns is what the trainer computes, under the version that sampled each token.

Turns are observations of an environment or results of tools, weights change in the middle of a turn, and episodes are
interrupted and go on under other weights.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla.services.rollout.engines.base import Engine, ResumeRule
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.environments.conversation import EnvironmentConversation
from flotilla.services.rollout.episodes.conversation import Conversation, Reply
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.tools.base import Tool
from flotilla.services.rollout.tools.conversation import ToolConversations
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.episodes import ToolEpisodesConfig
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.testing.builders import a_task
from tests.contract.engine.models import save_image
from tests.unit.rollout.chat_templates import tokenizer_of
from tests.unit.rollout.test_rendering import renderer_of

pytestmark = pytest.mark.slow

CONTEXT, MEMBERS, TURNS, NEW_TOKENS = 1024, 4, 4, 48
TEMPERATURE = 0.8
SAMPLING = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
"""Each turn is as long as may be: what is to come in its middle does."""
PENALTIES = {"min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.3}
PENALISED = SAMPLING.model_copy(update=PENALTIES)
TOLERANCE = 1e-5
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
TOOLS = ToolEpisodesConfig.model_validate({"kind": "tools", "tools": [{"kind": "python", "path": "add.py:add"}]})


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer_of("qwen 3")),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


@dataclass(frozen=True)
class Weights:
    """Models by version, and the images of those that are loaded later."""

    models: tuple[nn.Module, ...]
    images: tuple[Path, ...]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("weights")
    models = tuple(make_model(seed) for seed in range(3))
    models[0].save_pretrained(folder / "model")
    images = tuple(save_image(model, folder / f"{number}.safetensors") for number, model in enumerate(models))
    return Weights(models, images)


@pytest.fixture
async def engine(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    # A turn outlasts the message that changes the weights under it, however late this process is to send it.
    monkeypatch.setenv("FLOTILLA_FAULTS", "engine.step slow in=engine seconds=0.004")
    path = weights.images[0].parent / "model"
    made = ProcessEngine(EngineSettings(str(path), slots=8, context_tokens=CONTEXT))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


class Adder:
    """A tool, and the source of itself."""

    schema: Mapping[str, Any] = {"type": "function", "function": {"name": "add"}}

    def for_episode(self, task: Task) -> "Adder":
        return self

    async def open(self) -> Mapping[str, Tool]:
        return {"add": self}

    async def close(self) -> None: ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return f"The sum is {arguments['a'] + arguments['b']}."


class Calling:
    """Reads a call in whatever a random policy says."""

    def __init__(self, inner: Conversation) -> None:
        self._inner = inner
        self.is_replayable = inner.is_replayable

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._inner.metrics

    async def begin(self) -> Reply:
        return await self._inner.begin()

    async def answer(self, text: str, *, is_cut: bool) -> Reply:
        return await self._inner.answer(CALL, is_cut=is_cut)

    async def close(self) -> None:
        await self._inner.close()


class Counting:
    """An environment without an end."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"seed {seed}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"you said {len(text)} letters in turn {self.turn}", 1.0, False, False, {}


def with_tools(task: Task, member: int) -> Conversation:
    return Calling(ToolConversations(Adder(), TOOLS)(task, member))


def with_an_environment(task: Task, member: int) -> Conversation:
    return EnvironmentConversation(Counting, task, 5.0, is_quick=True)


def forgetful() -> ChatRenderer:
    """Make a renderer whose template shows but the beginning of every second answer."""
    found = renderer_of("qwen 3")
    tokenizer = copy.deepcopy(tokenizer_of("qwen 3"))
    tokenizer.chat_template = (
        "{% for each in messages %}{{ '<|im_start|>' + each['role'] + '\n' }}"
        "{{ each['content'][:12] if loop.index0 % 4 == 1 else each['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return ChatRenderer(tokenizer, found.stop_token_ids)


def episodes(
    engine: Engine,
    converse: Callable[[Task, int], Conversation],
    sampling: SamplingConfig,
    *,
    branches: bool = False,
) -> MultiTurnEpisodes:
    return MultiTurnEpisodes(
        engine,
        forgetful() if branches else renderer_of("qwen 3"),
        Turns(sampling, sampling),
        Limits(TURNS, CONTEXT, may_branch=branches),
        converse,
        ResumeRule(mixes_versions=True, max_lag=3),
    )


def of_the_trainer(model: nn.Module, group: Group, *, packing: str, shares_prompts: bool) -> np.ndarray:
    """Compute the log-probabilities of all sampled tokens as a step of training does."""
    scored = [replace(each, status=GradeStatus.SCORED, reward=1.0) for each in group.trajectories]
    batch = make_batch([replace(group, trajectories=tuple(scored))])
    policy = Policy(model, temperature=TEMPERATURE)
    found = torch.zeros(len(batch.positions))
    with torch.no_grad():
        for micro in make_micro_batches(
            batch,
            range(batch.num_sequences),
            RowRules(packing, shares_prompts=shares_prompts),  # type: ignore[arg-type]
            max_tokens=2 * CONTEXT,
            device=torch.device("cpu"),
        ):
            found[micro.tokens] = micro.spread(policy.statistics(micro.inputs, with_entropy=False).log_probs)
    return found[batch.sequences.response_mask].numpy()


def check(group: Group, weights: Weights, versions: Sequence[int]) -> None:
    """Compare what was recorded with the trainer, token by token, in each of its layouts."""
    masks = [trajectory.loss_mask.astype(bool) for trajectory in group.trajectories]
    pairs = list(zip(group.trajectories, masks, strict=True))
    recorded = np.concatenate([trajectory.log_probs[mask] for trajectory, mask in pairs])
    sampled_by = np.concatenate([trajectory.token_versions()[mask] for trajectory, mask in pairs])
    assert sorted(set(sampled_by.tolist())) == list(versions)
    for packing, shares in (("padded", False), ("packed", False), ("packed", True)):
        by_version = np.stack(
            [of_the_trainer(model, group, packing=packing, shares_prompts=shares) for model in weights.models]
        )
        expected = by_version[sampled_by, np.arange(len(recorded))]
        np.testing.assert_allclose(recorded, expected, atol=TOLERANCE, rtol=0, err_msg=packing)
    others = by_version[(sampled_by + 1) % len(weights.models), np.arange(len(recorded))]
    assert np.median(np.abs(others - recorded)) > 0.01, "another version's would be found out"


def mixes_within_a_turn(group: Group) -> bool:
    return any(
        len(set(each.token_versions()[turn.sampled : turn.end].tolist())) > 1
        for each in group.trajectories
        for turn in each.turns
    )


async def until_turn(engine: Engine, turns: float) -> None:
    """Wait until so many turns of each member are sampled, one of them in part."""
    before = (await engine.load()).generated_tokens
    async with asyncio.timeout(60):
        while (await engine.load()).generated_tokens - before < turns * NEW_TOKENS * MEMBERS:
            await asyncio.sleep(0)


def the_task() -> Task:
    return a_task(0, group_size=MEMBERS, messages=(Message("user", "What is the sum of all?"),), metadata={"seed": 5})


@pytest.mark.parametrize(
    ("converse", "sampling", "branches"),
    [
        (with_tools, SAMPLING, False),
        (with_an_environment, SAMPLING, False),
        (with_an_environment, PENALISED, False),
        (with_an_environment, PENALISED, True),
    ],
)
async def test_turns_agree_with_the_trainer_while_weights_change_under_them(
    weights: Weights,
    engine: Engine,
    converse: Callable[[Task, int], Conversation],
    sampling: SamplingConfig,
    branches: bool,
) -> None:
    running = asyncio.create_task(episodes(engine, converse, sampling, branches=branches).run(the_task()))
    for version, turns in ((1, 1.4), (2, 0.8)):
        await until_turn(engine, turns)
        await engine.load_weights(weights.images[version], version, OnWeightUpdate.INTERRUPT)
    group = await running

    for trajectory in group.trajectories:
        assert [len(turn.text) > 0 for turn in trajectory.turns] == [True] * TURNS
        assert trajectory.num_sampled == TURNS * NEW_TOKENS
        assert trajectory.finish_reason is FinishReason.TURNS
        # The first answer and the third are shown otherwise than they were sampled.
        assert [turn.is_fresh for turn in trajectory.turns[1::2]] == [branches, branches]
        shown = renderer_of("qwen 3").text(
            trajectory.token_ids[trajectory.turns[1].start : trajectory.turns[1].sampled]
        )
        assert ("The sum is 5." if converse is with_tools else "in turn 1") in shown
    assert mixes_within_a_turn(group)
    check(group, weights, [0, 1, 2])


@pytest.mark.parametrize("sampling", [SAMPLING, PENALISED])
async def test_episodes_that_were_interrupted_in_a_turn_agree_when_they_end_under_other_weights(
    weights: Weights, engine: Engine, sampling: SamplingConfig
) -> None:
    task = the_task()
    first = episodes(engine, with_an_environment, sampling)
    running = asyncio.create_task(first.run(task))
    await until_turn(engine, 1.4)
    await first.interrupt()
    had = (await running).trajectories
    assert all(each.finish_reason is FinishReason.ABORTED for each in had)

    await engine.load_weights(weights.images[1], 1, OnWeightUpdate.INTERRUPT)
    group = await episodes(engine, with_an_environment, sampling).run(task, had, 1)

    assert all(each.finish_reason is FinishReason.TURNS for each in group.trajectories)
    kept = [each.resumed_tokens for each in group.trajectories]
    assert sum(kept) == sum(each.num_sampled for each in had) > MEMBERS * NEW_TOKENS
    assert mixes_within_a_turn(group)
    check(group, weights, [0, 1])
