"""An environment as the other side of an episode: actions are the policy's texts, observations the user's messages."""

import asyncio
import hashlib
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.environments.base import Environment, Info, Observation, Step, reset, row_of
from flotilla.services.rollout.environments.loading import load_environment, needs_no_thread
from flotilla.services.rollout.environments.memory import INSTRUCTION, TurnMemory, filled
from flotilla.services.rollout.episodes.conversation import Conversation, Reply
from flotilla.services.rollout.episodes.observations import message_of, shown, text_of, with_observation
from flotilla.shared.children.custom_code import describe
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig, MemoryConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import EpisodeFailed, InvalidRequest
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.turns import FinishReason

NAME = "environment"
SECONDS = "seconds"


class ProcessEnvironment:
    """An environment of one episode, in that process.

    Attributes:
        name: of its class.
    """

    def __init__(self, process: CustomProcess, number: int, name: str) -> None:
        self._process, self._number = process, number
        self.name = name

    async def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Info]:
        """See ``Environment.reset``."""
        observation, info = await self._process.ask("reset", self._number, (seed, row))
        return observation, info

    async def step(self, text: str) -> Step:
        """See ``Environment.step``."""
        observation, reward, is_terminated, is_truncated, info = await self._process.ask("step", self._number, text)
        return observation, reward, is_terminated, is_truncated, info

    async def close(self) -> None:
        """Close it, if it can be closed, and forget it."""
        await self._process.ask("close", self._number, None)


def maker_of(process: CustomProcess, config: EnvironmentConfig) -> Callable[[], Awaitable[ProcessEnvironment]]:
    """Return what makes an environment there, for one episode."""

    async def make() -> ProcessEnvironment:
        return ProcessEnvironment(process, await process.make(config), config.environment.rpartition(":")[2])

    return make


class EnvironmentConversation:
    """One episode in an environment.

    Args:
        make: makes the environment; may be a coroutine function, as the environment's methods may.
        task: its messages come before the first observation.
        step_seconds: time for one call.
        is_quick: whether calls take microseconds, and so need no thread.
        is_replayable: whether the same seed and texts give the same episode.
        template: of each observation, see ``turn_template`` of the spec.
        memory: what turns with prompts of their own remember; None where each is shown the whole conversation.
        max_turns: of the episode.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        task: Task,
        step_seconds: float,
        *,
        is_quick: bool,
        is_replayable: bool = True,
        template: str | None = None,
        memory: MemoryConfig | None = None,
        max_turns: int = 0,
    ) -> None:
        self.is_replayable = is_replayable
        self._memory = None if memory is None else TurnMemory(memory)
        self._opening: tuple[Message, ...] = ()
        self._instruction = ""
        self._make = make
        self._task = task
        self._step_seconds = step_seconds
        self._is_quick = is_quick
        self._template, self._max_turns = template, max_turns
        self._turn = 1
        self._environment: Environment | None = None
        self._metrics: dict[str, float] = {}
        self._seconds = 0.0

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the environment measured, and the time that it took."""
        return {f"{NAME}/{name}": value for name, value in self._metrics.items()} | {f"{NAME}/{SECONDS}": self._seconds}

    async def begin(self) -> Reply:
        """Reset the environment with the row's seed, or the task's."""
        self._environment = await self._call(self._make)
        given = self._task.metadata.get("seed")
        seed = given if isinstance(given, int) and not isinstance(given, bool) else self._task.seed
        found = await self._call(lambda: reset(self._made, seed, row_of(self._task)))
        observation, info = found if isinstance(found, tuple) else (found, {})
        self._measure(info)
        messages = self._task.shown_messages
        self._instruction = shown(info.get("instruction") or "")
        if self._instruction and not any(each.content for each in messages if each.role == "user"):
            messages = tuple(each for each in messages if each.role == "system" and each.content)
            if self._memory is None or self._template is None:
                messages = (*messages, Message("user", self._instruction))
        self._opening = messages
        state = _number(info, observation)
        return Reply(with_observation(messages, await self._told(observation, info)), state=state)

    async def answer(self, text: str, *, is_cut: bool) -> Reply:
        """Step."""
        del is_cut  # a text that was cut is an action like others, valid or not
        result = await self._call(lambda: self._made.step(text))
        try:
            observation, reward, is_terminated, is_truncated, info = result
            value = float(reward)
        except (TypeError, ValueError) as error:
            raise EpisodeFailed(
                f"{self._what}.step must return observation, reward, terminated, truncated, info: {error}"
            ) from error
        if not math.isfinite(value):
            raise EpisodeFailed(f"{self._what}.step returned the reward {value}")
        self._measure(info)
        finish = FinishReason.TURNS if is_truncated else FinishReason.STOP if is_terminated else None
        self._turn += 1
        state = _number(info, observation)
        if self._memory is None:
            return Reply((await self._told(observation, info),), value, finish, state)
        self._memory.answered(text, value, info)
        messages = with_observation(self._opening, await self._told(observation, info))
        return Reply(messages, value, finish, state, is_fresh=True)

    async def close(self) -> None:
        """Close the environment, if it can be closed; errors of that are ignored."""
        close = getattr(self._environment, "close", None)
        if callable(close):
            try:
                await self._call(close)
            except EpisodeFailed:
                return

    async def _told(self, observation: Observation, info: Info) -> Message:
        """Write an observation as the user's message."""
        if isinstance(observation, str):
            (text,) = self._written([shown(observation)], shown(observation), info)
            return Message("user", text)
        # Images take longer to be read than health and leases may wait for the loop.
        seen = await asyncio.to_thread(message_of, "user", observation)
        return Message.of_texts("user", self._written(seen.texts, text_of(observation), info), seen.images)

    def _written(self, seen: Sequence[str], text: str, info: Info) -> Sequence[str]:
        """Write what is between the images of an observation into the template, which its first place is for.

        Args:
            seen: between the images.
            text: all of it.
            info: of the environment.
        """
        places = {"{turn}": str(self._turn), "{turns_left}": str(self._max_turns - self._turn + 1)}
        if self._memory is not None:
            places |= self._memory.places() | {INSTRUCTION: self._instruction}
            # What is remembered is text: later turns see an image of an earlier one no more.
            self._memory.seen(shown(info.get("remembered", text)))
        if self._template is None:
            return seen
        before, observation, behind = self._template.partition("{observation}")
        head, tail = (filled(each, places | {observation: text}) for each in (before, behind))
        *others, last = [f"{head}{seen[0]}", *seen[1:]]
        return [*others, f"{last}{tail}"]

    @property
    def _made(self) -> Environment:
        assert self._environment is not None, "begin comes first"
        return self._environment

    @property
    def _what(self) -> str:
        return str(getattr(self._environment, "name", type(self._environment).__name__))

    async def _call(self, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._step_seconds):
                found = work() if self._is_quick else await on_daemon_thread(work, NAME)
                return await found if inspect.isawaitable(found) else found
        except TimeoutError as error:
            raise EpisodeFailed(f"{self._what} took longer than {self._step_seconds:g} s") from error
        except EpisodeFailed as error:
            raise EpisodeFailed(f"{self._what}: {error.detail}") from error
        except Exception as error:  # whatever an environment raises is this episode's error
            raise EpisodeFailed(f"{self._what}: {describe(error, None)}") from error
        finally:
            self._seconds += time.perf_counter() - started

    def _measure(self, info: Mapping[str, Any]) -> None:
        for name, value in dict(info.get("metrics") or {}).items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._metrics[str(name)] = float(value)


class EnvironmentConversations:
    """Opens the environment that a task is for.

    Args:
        config: of the episodes.
        process: runs those that are in files of the user's.
        networks: that are not public, and that servers of environments may be in.

    Raises:
        InvalidSpec: an environment cannot be loaded or made.
    """

    def __init__(
        self,
        config: EnvironmentEpisodesConfig,
        process: CustomProcess | None = None,
        networks: Sequence[IPNetwork] = LOOPBACK,
    ) -> None:
        def maker(each: EnvironmentConfig) -> Callable[[], Any]:
            if not each.is_code:
                return load_environment(each, networks)
            assert process is not None, "code of the user's runs in a process of its own"
            return maker_of(process, each)

        self._step_seconds, self._max_turns = config.step_seconds, config.max_turns
        self._makers = [(each, maker(each)) for each in config.environments]

    def __call__(self, task: Task, member: int) -> Conversation:
        """Open one.

        Raises:
            InvalidRequest: none is for the task's data source.
        """
        del member  # all members of a group begin alike
        for config, make in self._makers:
            if _is_for(config, task):
                return EnvironmentConversation(
                    make,
                    task,
                    self._step_seconds,
                    is_quick=needs_no_thread(config),
                    is_replayable=not config.is_user,
                    template=config.turn_template,
                    memory=config.memory,
                    max_turns=self._max_turns,
                )
        raise InvalidRequest(f"no environment is for the data source {task.data_source!r}")


def _is_for(config: EnvironmentConfig, task: Task) -> bool:
    return config.data_sources is None or task.data_source in config.data_sources


def _number(info: Mapping[str, Any], observation: object) -> int:
    """Number a state: equal ones alike, on every machine."""
    text = repr(info.get("state", observation))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1
