"""Agents in memory: a scripted engine that writes what a function says, and a clock that is moved."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from flotilla.services.rollout.agents.episode import Asked, Endpoint, Episode
from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.task import Task
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_task
from flotilla.shared.testing.characters import END, CharacterTokenizer

Writes = Callable[[str], str]
"""What the policy writes behind a prompt; ``~`` stands for the end of a turn."""


def a_spec(
    *,
    group_size: int = 2,
    window_seconds: float = 0.0,
    max_new_tokens: int = 256,
    evaluation: dict[str, Any] | None = None,
    **agents: Any,
) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "agents",
            "model": {"path": "/nowhere/model"},
            "data": {"path": "/nowhere/train.jsonl"},
            "rollout": {
                "group_size": group_size,
                "sampling": {"max_new_tokens": max_new_tokens, "temperature": 0.9},
                "engine": {"context_tokens": 4000},
                "agents": agents,
            },
            "algorithm": {"advantage": {"kind": "reinforce_plus_plus"}},
            "reward": {"components": [{"kind": "agent", "window_seconds": window_seconds}]},
            "optimisation": {"steps": 2, "groups_per_mini_batch": 2},
            "evaluation": evaluation,
        }
    )


def engine_that(writes: Writes, **settings: Any) -> ScriptedEngine:
    def next_token(prompt_ids: Sequence[int], _seed: int, position: int, _version: int) -> int:
        text = writes("".join(map(chr, prompt_ids)))
        return ord(text[position]) if position < len(text) and text[position] != "~" else END

    return ScriptedEngine(next_token, eos_token_id=END, vocab_size=0x110000, context_tokens=4000, **settings)


class World:
    """One rollout whose tasks agents answer."""

    def __init__(
        self,
        spec: ExperimentSpec | None = None,
        writes: Writes = lambda _prompt: "yes~",
        tokenizer: CharacterTokenizer | None = None,
        **engine: Any,
    ) -> None:
        self.spec = spec or a_spec()
        self.seconds = 1000.0
        self.tokenizer = tokenizer or CharacterTokenizer()
        self.template = ChatTemplate(ChatRenderer(self.tokenizer, (END,)))
        self.engine = engine_that(writes, **engine)
        self.plane = MemoryDataPlane(clock=lambda: self.seconds)
        self.episodes = AgentEpisodes(
            self.engine,
            self.template,
            self.spec,
            self.plane.mailbox,
            lambda: "e-1.rollout-1",
            clock=lambda: self.seconds,
        )
        gate = VersionGate()
        self.gate = gate
        hop = self.plane.hop(HopName.TASKS, "rollout")
        lanes = [(LaneConfig("train", max_groups=8, task_seconds=None), hop)]
        self.consumer = RolloutConsumer(lanes, self.episodes, gate, lambda _: None)

    async def issue(self, count: int = 1, first: int = 0) -> None:
        size = self.spec.rollout.group_size
        tasks = [a_task(number, group_size=size) for number in range(first, first + count)]
        await self.plane.admission.issue_many(tasks, limit=10_000)

    async def begin(self, wait_seconds: float = 2.0) -> Episode:
        return self.episodes.find((await self.episodes.open(wait_seconds)).episode_id)

    async def until(self, condition: Callable[[Ledger], bool]) -> Ledger:
        async with asyncio.timeout(5):
            while True:
                ledger = await self.plane.ledger()
                assert ledger.balanced
                if condition(ledger):
                    return ledger
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        await self.engine.start()
        await self.gate.set(0)
        self.consumer.resume()
        task = asyncio.create_task(self.consumer.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.engine.close()


def a_lone_episode(world: World, task: Task | None = None) -> Episode:
    """Make an episode that nobody hands out."""
    return Episode(
        "e-1.rollout-1",
        task or a_task(0),
        0,
        world.spec,
        world.engine,
        world.template,
        lambda: world.seconds,
        on_death=lambda _: None,
        threads=world.episodes.threads,
    )


async def stays() -> bool:
    """A client that does not hang up."""
    return False


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask(episode: Episode, *messages: Mapping[str, Any], repeated: bool = False, **fields: Any) -> dict[str, Any]:
    """Ask for a reply; return the message."""
    body = json.dumps({"messages": list(messages), **fields}).encode()
    reply = await episode.answer(Asked(Endpoint.CHAT, body, repeated), stays)
    assert reply is not None
    return dict(reply.body["choices"][0]["message"])
