"""Whole episodes with interpreters in a real sandbox: each keeps its own from call to call, and ends it."""

import json
from collections.abc import Sequence

import httpx
import pytest

from flotilla.services.rollout.engines.base import UNMIXED
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.tools.code_interpreter import CodeInterpreter, Sandboxes
from flotilla.services.rollout.tools.conversation import ToolConversations
from flotilla.services.rollout.tools.opening import ToolBox
from flotilla.shared.config.sections.episodes import CodeInterpreterConfig, ToolEpisodesConfig
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.testing.builders import a_task
from flotilla.shared.testing.characters import END, CharacterTokenizer
from tests.integration.sandbox.running import TOKEN
from tests.integration.sandbox.test_run_code import a_client
from tests.unit.rollout.agents.world import engine_that

pytestmark = pytest.mark.slow

CODE = ("x = 20\nopen('kept', 'w').write('2')", "y = int(open('kept').read())\nx * y + y", "x / 0")
NUM_CELLS = len(CODE)


def writes(prompt: str) -> str:
    """Call the interpreter once per result that is there, then say the second result."""
    results = prompt.split("<tool>")[1:]
    if len(results) < NUM_CELLS:
        call = {"name": "code_interpreter", "arguments": {"code": CODE[len(results)]}}
        return f"<tool_call>{json.dumps(call)}</tool_call>~"
    return f"#### {results[1].partition(chr(END))[0]}~"


async def played(client: httpx.AsyncClient, group_size: int) -> Group:
    async def address() -> str:
        return str(client.base_url)

    config = ToolEpisodesConfig.model_validate({"kind": "tools", "tools": [{"kind": "code_interpreter"}]})
    (tool,) = config.tools
    assert isinstance(tool, CodeInterpreterConfig)
    box = ToolBox([CodeInterpreter(tool, Sandboxes(address, lambda: TOKEN), client)])
    sampling = SamplingConfig(max_new_tokens=200)
    engine = engine_that(writes)
    await engine.start()
    episodes = MultiTurnEpisodes(
        engine,
        ChatRenderer(CharacterTokenizer(), (END,)).with_tools(box.schemas),
        Turns(train=sampling, evaluation=sampling),
        Limits(max_turns=8, max_tokens=4000),
        ToolConversations(box, config),
        UNMIXED,
    )
    try:
        return await episodes.run(a_task(messages=(Message("user", "20 * 2 + 2?"),), group_size=group_size))
    finally:
        await engine.close()


async def test_an_episode_keeps_its_interpreter_and_ends_it() -> None:
    async with a_client(sessions=3, concurrency=1) as client:
        group = await played(client, group_size=3)
        metrics = (await client.get("/metrics")).text

    for trajectory in group.trajectories:
        shown: Sequence[str] = [turn.observation for turn in trajectory.turns[1:]]
        assert [each.strip() for each in shown[:2]] == ["1", "42"]
        assert shown[2].startswith("error: Traceback") and "ZeroDivisionError" in shown[2]
        assert trajectory.turns[-1].text == "#### 42"
        assert trajectory.status is not GradeStatus.ERROR
        assert trajectory.metrics["tools/calls"] == 3.0
        assert trajectory.metrics["tools/failures"] == 1.0
    assert "flotilla_sandbox_sessions 0.0" in metrics
    assert 'flotilla_sandbox_sessions_ended_total{cause="closed"} 3.0' in metrics


async def test_a_sandbox_without_sessions_makes_errors_and_no_rewards() -> None:
    async with a_client(sessions=0, concurrency=1) as client:
        group = await played(client, group_size=2)

    assert [trajectory.status for trajectory in group.trajectories] == [GradeStatus.ERROR] * 2
    assert all(trajectory.reward is None for trajectory in group.trajectories)
    assert "FLOTILLA_SANDBOX_SESSIONS" in str(group.trajectories[0].reason)
