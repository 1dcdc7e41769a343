"""What is shown of earlier turns where the template rewrites them, against a naive reading of Qwen3's template."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, ResumeRule
from flotilla.services.rollout.episodes.conversation import Reply
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.trainer.algorithms.advantages import compute_advantages
from flotilla.services.trainer.data.batch import make_batch, pieces
from flotilla.services.trainer.learning.advantages import advantage_inputs
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task
from tests.unit.rollout.chat_templates import FAMILIES, tokenizer_of
from tests.unit.rollout.test_rendering import renderer_of
from tests.unit.trainer.builders import a_spec

QWEN = "qwen 3"
EPISODES: tuple[tuple[tuple[str, str], ...], ...] = (
    # What follows an answer, and the answer: with thoughts, which the template drops once the user has said more.
    (
        ("user", "<think>\nthe goal\n</think>\n\nUp"),
        ("user", "Down"),
        ("user", "left"),
        ("user", "<think>\nit\n</think>\n\nUp"),
    ),
    # Behind results of tools thoughts stay, as long as the user says nothing.
    (("user", "<think>\nabout it\n</think>\n\nadd"), ("tool", "<think>\nagain\n</think>\n\nadd"), ("user", "Down")),
    (("user", "Up"), ("user", "Down"), ("user", "Up")),
)
REWARDS = (1.0, 0.0, 0.5)
NOTHING: dict[str, Any] = dict.fromkeys(("values", "old_log_probs", "ref_log_probs", "sum_pi_squared"))


class Sampler:
    """Samples what it was told; of every second answer in tokens that no tokenizer would make of the text."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.prompts: list[tuple[int, list[int]]] = []

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample one turn."""
        member, number = map(int, request.request_id.rpartition("-")[2].split("."))
        self.prompts.append((member, list(request.prompt_ids)))
        ids = tokens_of(EPISODES[member][number][1], in_pieces=number % 2 == 1, family=self.family)
        log_probs = np.full(len(ids), -1.0 - member, np.float32)
        return (Completion(np.array(ids, np.int32), log_probs, ((0, 3),), FinishReason.STOP),)

    async def abort(self, request_id: str) -> None:
        """End nothing."""


def tokens_of(text: str, *, in_pieces: bool, family: str = QWEN) -> list[int]:
    tokenizer = tokenizer_of(family)
    texts = list(text) if in_pieces and "<" not in text else [text]
    ids = [token for each in texts for token in tokenizer(each, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.convert_tokens_to_ids(FAMILIES[family].end)]


@dataclass
class Script:
    """The other side of one member's episode."""

    member: int
    is_replayable: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    said: int = 0

    async def begin(self) -> Reply:
        """Begin."""
        return Reply((Message("user", "You are on a frozen lake."),))

    async def answer(self, text: str, *, is_cut: bool) -> Reply:
        """Say what comes next, or end."""
        assert text == EPISODES[self.member][self.said][1]
        self.said += 1
        if self.said == len(EPISODES[self.member]):
            return Reply(finish=FinishReason.STOP)
        return Reply((Message(EPISODES[self.member][self.said][0], f"seen {self.said}"),))

    async def close(self) -> None:
        """Close."""


async def played(*, may_branch: bool, before: Sequence[Trajectory] = (), family: str = QWEN) -> tuple[Group, Sampler]:
    sampler: Any = Sampler(family)
    sampling = SamplingConfig(max_new_tokens=64)
    limits = Limits(max_turns=10, max_tokens=400, may_branch=may_branch)

    def opened(task: Task, member: int) -> Script:
        return Script(member)

    resume = ResumeRule(mixes_versions=True, max_lag=3)
    turns = Turns(sampling, sampling)
    episodes = MultiTurnEpisodes(sampler, renderer_of(family), turns, limits, opened, resume)
    group = await episodes.run(a_task(0, group_size=len(EPISODES)), before, 3)
    return group, sampler


def naive_rows(member: int) -> list[tuple[str, int]]:
    """Render each prompt whole; a row is what later prompts go on from. Returns texts, and tokens sampled in each."""
    tokenizer, rows = tokenizer_of(QWEN), list[tuple[str, int]]()
    chat = [{"role": "user", "content": "You are on a frozen lake."}]
    for number, (_, answer) in enumerate(EPISODES[member]):
        prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        count = len(tokens_of(answer, in_pieces=number % 2 == 1))
        behind = f"{prompt}{answer}<|im_end|>"
        if rows and prompt.startswith(rows[-1][0]):
            rows[-1] = (behind, rows[-1][1] + count)
        else:
            rows.append((behind, count))
        chat.append({"role": "assistant", "content": answer})
        if number + 1 < len(EPISODES[member]):
            chat.append({"role": EPISODES[member][number + 1][0], "content": f"seen {number + 1}"})
    return rows


def graded(group: Group) -> Group:
    members = (
        each.graded(GradeStatus.SCORED, reward) for each, reward in zip(group.trajectories, REWARDS, strict=True)
    )
    return Group(group.task, tuple(members))


def test_rows_and_trained_tokens_are_those_of_a_naive_reading() -> None:
    group, sampler = asyncio.run(played(may_branch=True))

    tokenizer = tokenizer_of(QWEN)
    expected = [naive_rows(member) for member in range(len(EPISODES))]
    rows = [pieces(each) for each in group.trajectories]
    found = [[(tokenizer.decode(row.token_ids), int(row.loss_mask.sum())) for row in each] for each in rows]
    assert found == expected
    assert [len(each) for each in found] == [2, 2, 1]
    # Each sampled token is trained once, as it was sampled, with its own log-probability.
    for member, trajectory in enumerate(group.trajectories):
        sampled = [tokens_of(answer, in_pieces=at % 2 == 1) for at, (_, answer) in enumerate(EPISODES[member])]
        assert trajectory.token_ids[trajectory.loss_mask == 1].tolist() == [token for each in sampled for token in each]
        assert set(trajectory.log_probs[trajectory.loss_mask == 1].tolist()) == {-1.0 - member}
        assert trajectory.metrics["episode/sequences"] == len(expected[member])
        # What the engine was shown is what the row has before the answer.
        prompts = [prompt for number, prompt in sampler.prompts if number == member]
        shown = [row.token_ids[: turn.sampled].tolist() for row in rows[member] for turn in row.turns]
        assert prompts == shown


def test_every_token_has_the_advantage_of_its_trajectory() -> None:
    group = graded(asyncio.run(played(may_branch=True))[0])
    spec = a_spec(
        algorithm={"advantage": {"kind": "grpo", "normalise_by_std": False}},
        reward={"components": [{"kind": "environment"}]},
        rollout={
            "group_size": 3,
            "episodes": {
                "kind": "environment",
                "environments": [{"environment": "frozen_lake"}],
                "history": "branch",
            },
        },
    )

    batch = make_batch([group])
    found = compute_advantages(spec.algorithm.advantage, advantage_inputs(spec, batch, **NOTHING)).advantages

    mean = sum(REWARDS) / len(REWARDS)
    expected = [
        reward - mean for member, reward in enumerate(REWARDS) for _, count in naive_rows(member) for _ in range(count)
    ]
    trained = (
        found[batch.sequences.response_mask.bool()] if found.shape == batch.sequences.response_mask.shape else found
    )
    assert trained.tolist() == pytest.approx(expected)


def test_appended_history_shows_what_was_sampled_as_it_was() -> None:
    group, _ = asyncio.run(played(may_branch=False))

    for trajectory in group.trajectories:
        assert len(pieces(trajectory)) == 1
        assert "episode/sequences" not in trajectory.metrics
    assert tokenizer_of(QWEN).decode(group.trajectories[0].token_ids).count("<think>") == 2


@pytest.mark.parametrize("family", ["chatml", "llama 3"])
def test_a_template_that_shows_answers_as_they_were_makes_no_difference(family: str) -> None:
    whole, branched = (asyncio.run(played(may_branch=each, family=family)) for each in (False, True))

    assert sorted(branched[1].prompts) == sorted(whole[1].prompts)
    for one, other in zip(whole[0].trajectories, branched[0].trajectories, strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert other.turns == one.turns
        assert other.metrics == {**one.metrics, "episode/sequences": 1.0}


def test_an_episode_that_was_handed_over_branches_where_it_did() -> None:
    whole, _ = asyncio.run(played(may_branch=True))
    first = whole.trajectories[0]
    half = Trajectory(
        token_ids=first.token_ids[: first.turns[1].end],
        loss_mask=first.loss_mask[: first.turns[1].end],
        log_probs=first.log_probs[: first.turns[1].end],
        versions=first.versions,
        finish_reason=FinishReason.ABORTED,
        turns=first.turns[:2],
    )

    again, sampler = asyncio.run(played(may_branch=True, before=[half, *whole.trajectories[1:]]))

    assert [number for number, _ in sampler.prompts] == [0, 0]
    assert again.trajectories[0].token_ids.tolist() == first.token_ids.tolist()
    assert again.trajectories[0].turns == first.turns
