"""Tools as the other side of an episode: calls are answered by results, and an answer without a call ends it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.services.rollout.episodes.conversation import Conversation, Reply
from flotilla.services.rollout.episodes.observations import message_of, shown
from flotilla.services.rollout.tools.base import Checked, Result, Tool, ToolFailed, Tools, ToolSource
from flotilla.services.rollout.tools.formats import ToolCall, read_calls, role_of_results
from flotilla.shared.concurrency.cancelling import all_of
from flotilla.shared.config.sections.episodes import ToolEpisodesConfig
from flotilla.shared.errors import EpisodeFailed
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.turns import FinishReason


class ToolConversation:
    """One episode with tools.

    Args:
        tools: of the episode; opened when it begins.
        task: its messages are the first prompt.
        config: format and limits.
    """

    # A tool may have changed something outside, so that calling it again is another thing.
    is_replayable = False

    def __init__(self, tools: Tools, task: Task, config: ToolEpisodesConfig) -> None:
        self._source = tools
        self._task = task
        self._config = config
        self._tools: Mapping[str, Tool] = {}
        self._answers = self._calls = self._failures = 0
        self._seconds = 0.0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Calls, those that failed or could not be read, and the time that they took."""
        return {
            "tools/calls": float(self._calls),
            "tools/failures": float(self._failures),
            "tools/seconds": self._seconds,
        }

    async def begin(self) -> Reply:
        """Open the tools; the prompt is the task's."""
        try:
            async with asyncio.timeout(self._config.step_seconds):
                self._tools = await self._source.open()
        except TimeoutError as error:
            raise EpisodeFailed(f"the tools could not be opened within {self._config.step_seconds:g} s") from error
        return Reply(self._task.shown_messages)

    async def answer(self, text: str, *, is_cut: bool) -> Reply:
        """Make the calls of an answer, all at once; one without a call ends the episode."""
        self._answers += 1
        calls = read_calls(text, self._config.format)
        if not calls:
            return Reply(finish=FinishReason.LENGTH if is_cut else FinishReason.STOP, reward=await self._check())
        self._calls += len(calls)
        started = time.perf_counter()
        results = await self._results(calls)
        self._seconds += time.perf_counter() - started
        reward = await self._check() if self._answers >= self._config.max_turns else None
        return Reply(tuple(results), reward=reward)

    async def _check(self) -> float | None:
        """Grade what the episode leaves in its tools."""
        grades = [await tool.check() for tool in self._tools.values() if isinstance(tool, Checked)]
        given = [grade for grade in grades if grade is not None]
        return sum(given) if given else None

    async def close(self) -> None:
        """Release the tools."""
        await self._source.close()

    async def _results(self, calls: Sequence[ToolCall]) -> list[Message]:
        most, role = self._config.max_parallel_calls, role_of_results(self._config.format)
        found = await all_of(self._result(call, role) for call in calls[:most])
        return [*found, *(Message(role, f"error: only {most} calls at a time are made") for _ in calls[most:])]

    async def _result(self, call: ToolCall, role: str) -> Message:
        result: Result
        try:
            if call.problem is not None:
                raise ToolFailed(call.problem)
            if call.name not in self._tools:
                raise ToolFailed(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
            async with asyncio.timeout(self._config.step_seconds):
                result = await self._tools[call.name].call(call.arguments)
        except ToolFailed as error:
            self._failures += 1
            result = f"error: {error}"
        except TimeoutError as error:
            raise EpisodeFailed(f"tool {call.name} took longer than {self._config.step_seconds:g} s") from error
        most = self._config.max_result_characters
        if isinstance(result, str):
            return Message(role, _shortened(shown(result), most))
        # Images take longer to be read than health and leases may wait for the loop.
        return await asyncio.to_thread(message_of, role, [_shortened_part(each, most) for each in result])


class ToolConversations:
    """Opens the tools for each episode.

    Args:
        tools: that each episode is given, some of them its own.
        config: format and limits.
    """

    def __init__(self, tools: ToolSource, config: ToolEpisodesConfig) -> None:
        self._tools = tools
        self._config = config

    def __call__(self, task: Task, member: int) -> Conversation:
        """Open one."""
        del member
        return ToolConversation(self._tools.for_episode(task), task, self._config)


def _shortened_part(part: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    text = part.get("text")
    return {**part, "text": _shortened(text, most)} if isinstance(text, str) else part


def _shortened(text: str, most: int) -> str:
    """Leave out the middle of a long result."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
