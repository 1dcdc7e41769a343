"""One member of a group: a trajectory that grows, turn by turn, while a conversation answers it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix, ResumeRule
from flotilla.services.rollout.episodes.conversation import Conversation, Reply
from flotilla.services.rollout.episodes.rendering import Illustrated, TurnRenderer, continued, opened, rendered
from flotilla.services.rollout.episodes.turns import GENERATION_SECONDS, Requests, Turns
from flotilla.services.rollout.trajectory_builder import RenderTally, TrajectoryBuilder
from flotilla.shared.errors import (
    CannotBeShown,
    DataError,
    EnvironmentDiverged,
    EpisodeFailed,
    ModelError,
    PromptTooLong,
)
from flotilla.shared.models.prompts import images_of
from flotilla.shared.schemas.prompt_image import PromptImage, within
from flotilla.shared.schemas.task import Message, Task, sample_seed
from flotilla.shared.schemas.trajectory import GradeStatus, Trajectory
from flotilla.shared.schemas.turns import FinishReason, Turn
from flotilla.shared.telemetry.tracing.recording import inner_span

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class _Interrupted(Exception):  # no error: the member continues elsewhere
    """The session was interrupted while the conversation was waited for."""


@dataclass(kw_only=True, eq=False)
class Member:
    """Plays one episode, once.

    Attributes:
        task, index: what is answered, and which member of its group this is.
        before: what there is of it from an earlier rollout.
        conversation: its other side.
        requests: to the engine.
        renderer, turns: how messages become tokens, and how a turn is sampled.
        max_turns, max_tokens, max_response_tokens: bounds of the episode; of tokens, those that one turn sees.
        max_images: that one turn sees.
        may_branch: whether the whole conversation is rendered before each turn, and begins a new sequence where that
            is not what the turn before has seen and sampled.
        request_id: of the group; those of turns begin with it.
        rule: which tokens of an earlier rollout may be kept.
        renders: counts what was shown.
        interrupted: set when the session is interrupted.
        is_greedy: whether it is the baseline that others are compared with.
    """

    task: Task
    index: int
    before: Trajectory | None
    conversation: Conversation
    requests: Requests
    renderer: TurnRenderer
    turns: Turns
    max_turns: int
    max_tokens: int
    max_response_tokens: int | None
    request_id: str
    rule: ResumeRule
    renders: RenderTally
    interrupted: asyncio.Event
    may_branch: bool = False
    max_images: int = 0
    is_greedy: bool = False
    _builder: TrajectoryBuilder = field(init=False)
    _sampling_seconds: float = 0.0
    _resumed: int = 0
    _first_images: tuple[PromptImage, ...] = ()
    _said: tuple[Message, ...] = ()

    async def play(self) -> Trajectory:
        """Play the episode to its end, or to the interruption.

        An error of the conversation is the trajectory's, which then has no reward.

        Raises:
            CannotBeShown: the first prompt cannot be shown to the engine; a later turn's ends the episode.
            EnvironmentDiverged: the conversation does not repeat what it returned before.
            PromptTooLong: the first prompt leaves no room for a completion.
        """
        self._builder = TrajectoryBuilder(self.renders)
        try:
            finish = await self._play()
        except _Interrupted:
            finish = FinishReason.ABORTED
        except EnvironmentDiverged:
            raise
        except EpisodeFailed as error:
            return await self._failed(error)
        finally:
            await self.conversation.close()
        return await asyncio.to_thread(self._built, finish)

    async def _play(self) -> FinishReason:
        opening = await self._wait_for(self.conversation.begin())
        # Long texts take the tokenizer longer than health and leases may wait for the loop.
        prompt, self._first_images = await asyncio.to_thread(self._opened, opening.messages)
        prompt = self.turns.prompt.fit(prompt, has_images=bool(self._first_images))
        if len(prompt) >= self.max_tokens:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens leaves no room in the {self.max_tokens} of an episode"
            )
        if self.max_response_tokens is not None:
            self.max_tokens = min(self.max_tokens, len(prompt) + self.max_response_tokens)
        self._builder.show(prompt, state=opening.state, images=self._first_images)
        self._said = opening.messages
        prefix = None
        if self.before is not None and self._begins_alike(prompt):
            ended, prefix = await self._replay(self.before)
            if ended is not None:
                return ended
        while True:
            try:
                completion = await self._sample(prefix)
            except CannotBeShown as error:
                if not self._builder.turns:
                    raise
                facts = {"group_id": self.task.group_id, "member": self.index, "error": error.detail}
                log.warning("an episode ends before its next turn", extra=facts)
                return FinishReason.TOKENS
            prefix = None
            if completion.finish_reason is FinishReason.ABORTED:
                return FinishReason.ABORTED
            turn = self._builder.turns[-1]
            ended = await self._take(await self._answer(turn), turn)
            if ended is not None:
                return ended

    def _opened(self, messages: tuple[Message, ...]) -> Illustrated:
        """Render the first prompt. Blocks."""
        if images_of(messages) == list(self.task.images):
            return opened(self.renderer, self.task, messages)
        with _shown_by_others():
            found = rendered(self.renderer, messages)
        if len(found[1]) > self.max_images:
            raise EpisodeFailed(
                f"{len(found[1])} images are shown at first: data.images.max_per_prompt is {self.max_images}"
            )
        return found

    async def _answer(self, turn: Turn) -> Reply:
        is_cut = turn.finish_reason is FinishReason.LENGTH
        with inner_span("tool", {"flotilla.member": self.index, "flotilla.turn": len(self._builder.turns) - 1}):
            return await self._wait_for(self.conversation.answer(turn.text, is_cut=is_cut))

    async def _take(self, reply: Reply, turn: Turn) -> FinishReason | None:
        """Record what came of a turn, and show what is next; return why the episode ends, if it does."""
        if reply.reward is not None:
            self._builder.reward(reply.reward)
        if reply.finish is not None:
            return reply.finish
        if len(self._builder.turns) >= self.max_turns:
            return FinishReason.TURNS
        if self.may_branch:
            self._said += (Message("assistant", turn.text), *reply.messages)
        is_illustrated = bool(self._builder.images or images_of(reply.messages))
        with _shown_by_others() if is_illustrated else nullcontext():
            (context, images), is_fresh = await asyncio.to_thread(self._context, reply)
        seen = (0, 0) if is_fresh else (len(self._builder.prompt_ids), len(self._builder.prompt_images))
        # An image that has no room whole is not shown at all.
        if seen[0] + len(context) >= self.max_tokens or seen[1] + len(images) > max(self.max_images, seen[1]):
            return FinishReason.TOKENS
        shown = reply.messages[-1:] if reply.is_fresh else reply.messages
        self._builder.show(context, _text(shown), state=reply.state, is_fresh=is_fresh, images=images)
        return None

    def _context(self, reply: Reply) -> tuple[Illustrated, bool]:
        """Render what is shown next, and return whether it is a whole prompt. Blocks."""
        if reply.is_fresh:
            return rendered(self.renderer, reply.messages), True
        before = self._builder.prompt_ids
        appended = continued(self.renderer, reply.messages, before[-1])
        if not self.may_branch:
            return appended, False
        whole = rendered(self.renderer, self._said)
        # As texts: the tokens that were sampled need not be those that the tokenizer would make of them.
        texts = (self.renderer.text(each, with_special_tokens=True) for each in ((*before, *appended[0]), whole[0]))
        return (appended, False) if len({*texts}) == 1 else (whole, True)

    async def _sample(self, prefix: Prefix | None) -> Completion:
        """Sample a turn and append it."""
        if self.interrupted.is_set():
            raise _Interrupted
        number = len(self._builder.turns)
        seed = sample_seed(self.task.seed, self.index)
        prompt = self._builder.prompt_ids
        room = self.max_tokens - len(prompt)
        request = GenerationRequest(
            request_id=f"{self.request_id}-{self.index}.{number}",
            prompt_ids=prompt,
            # The first turn's is that of a single turn; every later one has its own.
            seeds=(sample_seed(seed, number) if number else seed,),
            sampling=self.turns.parameters(self.task, self.renderer.stop_token_ids, greedy=self.is_greedy, most=room),
            holds_weights=self.task.pinned_version is not None,
            is_turn=number + 1 < self.max_turns,
            prefixes=(prefix,) if prefix is not None else (),
            resume=self.rule,
            images=self._builder.prompt_images,
        )
        started = time.perf_counter()
        with inner_span("turn", {"flotilla.member": self.index, "flotilla.turn": number}) as facts:
            (completion,) = await self.requests.generate(request)
            facts["flotilla.tokens"] = len(completion.token_ids)
        self._sampling_seconds += time.perf_counter() - started
        # Both may take longer than health and leases may wait for the loop.
        await asyncio.to_thread(self._append, completion)
        if len(self._builder.turns) > number:
            self._resumed += completion.num_resumed
        return completion

    def _append(self, completion: Completion) -> None:
        text = self.renderer.text(completion.token_ids.tolist())
        self._builder.sample(
            completion.token_ids,
            completion.log_probs,
            completion.versions,
            completion.finish_reason,
            text,
            completion.experts,
        )

    def _begins_alike(self, prompt: tuple[int, ...]) -> bool:
        """Whether what there is of the episode began with this prompt; tokens behind another are of no use."""
        assert self.before is not None
        first = self.before.turns[:1]
        if not first or tuple(self.before.token_ids[: first[0].sampled].tolist()) != prompt:
            return False
        return self._listed(self.before, first[0].sampled) == self._first_images

    def _listed(self, before: Trajectory, end: int) -> tuple[PromptImage, ...]:
        """List the images among the first tokens of what there is of the episode."""
        is_known = [each.data for each in self._first_images] == list(self.task.images)
        return within(before.images or (self._first_images if is_known else ()), 0, end)

    async def _replay(self, before: Trajectory) -> tuple[FinishReason | None, Prefix | None]:
        """Give the conversation the recorded answers again, and keep their tokens.

        Returns:
            Why the episode ends with them, if it does, and the tokens of the turn that was interrupted.
        """
        if not self.conversation.is_replayable:
            return None, None
        whole = [turn for turn in before.turns if turn.finish_reason is not FinishReason.ABORTED]
        ended: FinishReason | None = None
        for number, turn in enumerate(whole, start=1):
            self._builder = self._at(before, number)
            self._resumed = before.loss_mask[: turn.end].sum()
            reply = await self._answer(turn)
            # What was interrupted before its answer came has no reward yet.
            is_known = turn.reward is not None
            ended = await self._take(replace(reply, reward=None) if is_known else reply, turn)
            following = before.turns[number] if number < len(before.turns) else None
            is_other = following is not None and (ended is not None or not self._shows(before, following))
            if is_other or (is_known and reply.reward != turn.reward):
                raise EnvironmentDiverged(
                    f"turn {number + 1} of group {self.task.group_id} shows something else when it is replayed"
                )
        interrupted = before.turns[len(whole) :]
        return ended, await asyncio.to_thread(_prefix, before, interrupted[0]) if interrupted else None

    def _at(self, before: Trajectory, num_turns: int) -> TrajectoryBuilder:
        return TrajectoryBuilder.continuing(before, num_turns, self.renders, self._first_images)

    def _shows(self, before: Trajectory, turn: Turn) -> bool:
        recorded = before.token_ids[: turn.sampled].tolist()
        return self._builder.token_ids == tuple(recorded) and self._builder.images == self._listed(before, turn.sampled)

    async def _wait_for(self, work: Awaitable[Value]) -> Value:
        """Wait for the conversation, unless the session is interrupted first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.interrupted.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _Interrupted
            return await working
        finally:
            for each in (working, stopping):
                each.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    def _built(self, finish: FinishReason, **fields: object) -> Trajectory:
        earlier = self.before.timings.get(GENERATION_SECONDS, 0.0) if self.before is not None and self._resumed else 0.0
        return self._builder.build(
            finish,
            self.task.images,
            timings={GENERATION_SECONDS: earlier + self._sampling_seconds},
            metrics=self._metrics() if finish is not FinishReason.ABORTED else {},
            resumed_tokens=int(self._resumed),
            **fields,
        )

    def _metrics(self) -> dict[str, float]:
        turns = len(self._builder.turns)
        found = {**self.conversation.metrics, "episode/turns": float(turns)}
        if self.may_branch:
            found["episode/sequences"] = 1.0 + sum(turn.is_fresh for turn in self._builder.turns)
        return found

    async def _failed(self, error: EpisodeFailed) -> Trajectory:
        if not self._builder.num_tokens:
            messages = self.task.shown_messages or (Message("user", ""),)
            prompt, images = await asyncio.to_thread(rendered, self.renderer, messages)
            self._builder.show(prompt, images=images)
        return await asyncio.to_thread(self._built, FinishReason.STOP, status=GradeStatus.ERROR, reason=error.detail)


@contextmanager
def _shown_by_others() -> Iterator[None]:
    """Make an error of the episode of images that an environment, or a tool, showed and that cannot be."""
    try:
        yield
    except (DataError, ModelError) as error:
        raise EpisodeFailed(error.detail) from error


def _text(messages: tuple[Message, ...]) -> str:
    return "\n".join(message.content for message in messages)


def _prefix(before: Trajectory, turn: Turn) -> Prefix:
    """Cut the tokens of an interrupted turn out, with versions that count from its first one."""
    span = slice(turn.sampled, turn.end)
    versions = before.token_versions()[span].tolist()
    runs = tuple(
        (place, version) for place, version in enumerate(versions) if not place or versions[place - 1] != version
    )
    # As the versions, of the prompt that the turn's completion saw alone.
    prompt = max((each.start for each in before.turns if each.is_fresh and each.start <= turn.start), default=0)
    experts = None if before.experts is None else before.experts.part(prompt, turn.end - 1)
    return Prefix(tuple(before.token_ids[span].tolist()), tuple(before.log_probs[span].tolist()), runs, experts)
