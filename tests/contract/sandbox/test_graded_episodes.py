"""An agent works in a sandbox of its task's image, and what it leaves is graded there: the same at every provider."""

import json
from pathlib import Path

import httpx
import pytest

from flotilla.services.reward.grading import grades_of
from flotilla.services.reward.verifiers.given import EnvironmentVerifier
from flotilla.services.rollout.engines.base import UNMIXED
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.tools.code_interpreter import CodeInterpreter, Sandboxes
from flotilla.services.rollout.tools.conversation import ToolConversations
from flotilla.services.rollout.tools.opening import ToolBox
from flotilla.shared.config.sections.episodes import CodeInterpreterConfig, ToolEpisodesConfig
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.schemas.grade_status import GradeStatus
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.testing.builders import a_task
from flotilla.shared.testing.characters import END, CharacterTokenizer
from tests.contract.sandbox.fakes.opened import FAKES, TOKEN, a_service
from tests.unit.rollout.agents.world import engine_that

IMAGE = "swebench/task-1:v2"
TOOL = {"kind": "code_interpreter", "language": "shell", "check_column": "tests"}


async def graded(
    client: httpx.AsyncClient, command: str, *, image: bool
) -> tuple[Group, list[GradeStatus], list[float | None]]:
    """Play two episodes that run a command and end, and grade them."""

    async def address() -> str:
        return str(client.base_url)

    def writes(prompt: str) -> str:
        call = {"name": "code_interpreter", "arguments": {"code": command}}
        return "done~" if "<tool>" in prompt else f"<tool_call>{json.dumps(call)}</tool_call>~"

    tools = [TOOL | ({"image_column": "image"} if image else {})]
    config = ToolEpisodesConfig.model_validate({"kind": "tools", "tools": tools})
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
    row = {"image": IMAGE, "tests": "grep -q right answer"}
    try:
        group = await episodes.run(a_task(messages=(Message("user", "write"),), group_size=2, metadata=row))
    finally:
        await engine.close()
    grades = await grades_of(EnvironmentVerifier(), group)
    return group, [grade.status for grade in grades], [grade.reward for grade in grades]


@pytest.mark.parametrize("provider", ["local", *FAKES])
async def test_what_an_agent_leaves_is_graded_and_a_lost_sandbox_is_no_grade(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_elsewhere = provider != "local"
    async with a_service(provider, tmp_path, monkeypatch, images=["swebench/*"]) as (client, _, fake):
        _, _, right = await graded(client, "echo right > answer", image=is_elsewhere)
        images = [IMAGE in str(box.wanted) for box in fake.boxes.values()]
        _, _, wrong = await graded(client, "echo wrong > answer", image=is_elsewhere)
        if is_elsewhere:
            number = 0

            def lose(box: object) -> None:
                nonlocal number
                number += 1
                if number > 4:  # both have begun and worked
                    for box_id in list(fake.boxes):
                        fake.destroy(box_id)

            fake.before_execute = lose
            group, statuses, lost = await graded(client, "echo right > answer", image=True)

    assert (right, wrong) == ([1.0, 1.0], [0.0, 0.0])
    if is_elsewhere:
        assert all(images)
        assert (statuses, lost) == ([GradeStatus.ERROR] * 2, [None, None])
        assert "sandbox" in str(group.trajectories[0].reason)
