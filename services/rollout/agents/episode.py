"""One episode with one agent: what it asks is sampled and recorded, within its limits of time and count.

What takes the processor for long runs on threads beside the event loop, which has health, leases and streams to serve.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from flotilla.services.rollout.agents.conversation import Conversations, Draft, Prompt, TooManyBranches
from flotilla.services.rollout.agents.messages import MessagesChat, messages_reply, read_messages
from flotilla.services.rollout.agents.replies import Reply, chat_reply, text_reply
from flotilla.services.rollout.agents.requests import (
    AnyRequest,
    ChatRequest,
    read_chat,
    read_text,
    stops_of,
    wanted_tokens,
)
from flotilla.services.rollout.agents.responses import ResponsesChat, ResponsesReply, read_responses, responses_reply
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.engines.base import (
    Completion,
    Engine,
    GenerationRequest,
    OnEngineDeath,
    SamplingParameters,
)
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, InvalidRequest, Unavailable, WorkerDied
from flotilla.shared.schemas.routing import RoutedSpan
from flotilla.shared.schemas.task import Task, sample_seed
from flotilla.shared.schemas.trajectory import FinishReason, Trajectory

MAX_REPLAYED: Final = 8
"""Last answers that are kept for clients that repeat a request whose answer was lost."""
TURN_STRIDE: Final = 1 << 20
"""Of the numbers that seeds are made of: more than an episode has turns."""


class Ended(StrEnum):
    """How an episode that was handed out ended."""

    COMPLETED = "completed"
    ABANDONED = "abandoned"
    """Its agent was silent, or too slow; it is handed out again."""
    LOST = "lost"
    """Its group went elsewhere, or ended."""


class Endpoint(StrEnum):
    """What an agent may ask: of OpenAI's and of Anthropic's."""

    CHAT = "chat"
    TEXT = "text"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    """How many a message's prompt has: nothing is sampled or recorded."""

    @property
    def is_anthropic(self) -> bool:
        """Whether Anthropic's clients ask it."""
        return self in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)


class EpisodeGone(FlotillaError):
    """The episode is not open (any more)."""

    code, title, status = "episode_gone", "The episode has ended", 410


class LimitReached(InvalidRequest):
    """The episode may not ask for more."""

    code, title, status = "limit_reached", "A limit of the episode is reached", 400


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came.

    Attributes:
        endpoint: what it was sent to.
        body: JSON.
        is_repeated: the client marks it as a retry of a request without an answer.
    """

    endpoint: "Endpoint"
    body: bytes
    is_repeated: bool = False

    @property
    def name(self) -> str:
        """The same for the same request."""
        return hashlib.sha256(self.body + self.endpoint.encode()).hexdigest()


HasHungUp = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What came of a request; ``experts`` are of its new tokens."""

    completion: Completion
    reply: Reply
    experts: RoutedSpan | None


@dataclass(eq=False)
class _Turn:
    """A request that is being answered, or was; recorded once it has a reply."""

    name: str
    request: AnyRequest
    draft: Draft
    sampling: "asyncio.Task[_Sampled]"
    reply: Reply | None = None
    waiting: list[HasHungUp] = field(default_factory=list)


MOST_AT_A_TIME: Final = 2
"""Of the threads that the process has for such work: weights are checked and staged on them, too."""

Result = TypeVar("Result")


class Threads:
    """Runs work on threads, so much at a time; what is more waits, in order."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_AT_A_TIME)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work that reads what the loop may append to meanwhile, and changes nothing.

        Cancelling leaves it running, in its place, until it ends.
        """
        await self._places.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        working.add_done_callback(self._ended)
        return await asyncio.shield(working)

    def _ended(self, working: "asyncio.Future[Result]") -> None:
        self._places.release()
        if not working.cancelled():
            working.exception()  # the caller may be gone


class Episode:
    """One episode.

    Args:
        prefix: what the episode's id begins with.
        task: that it answers.
        index: which of the task's group it is.
        spec: of the experiment.
        attempt: how often this episode was begun, this time included.
        on_death: called when the engine's process ended under a request.
        threads: where requests are read, rendered and tokenised, and replies made.
    """

    def __init__(
        self,
        prefix: str,
        task: Task,
        index: int,
        spec: ExperimentSpec,
        engine: Engine,
        template: ChatTemplate,
        clock: Callable[[], float],
        *,
        on_death: OnEngineDeath,
        threads: Threads,
        tally: SamplingTally | None = None,
        attempt: int = 1,
    ) -> None:
        assert spec.rollout.agents is not None
        self.id = f"{prefix}.{task.group_id}-{index}-{secrets.token_hex(8)}"
        self._config = spec.rollout.agents
        self._sampling = spec.rollout.sampling
        self._is_held_out = task.pinned_version is not None
        self._is_greedy = task.greedy
        if self._is_held_out and spec.evaluation is not None:
            self._sampling = spec.evaluation.sampling(self._sampling)
        self._allowed = tuple(dict.fromkeys((self._sampling, spec.rollout.sampling)))
        self._seed = sample_seed(task.seed, index * TURN_STRIDE + attempt)
        self._engine = engine
        self._template = template
        self._clock = clock
        self._on_death = on_death
        self._tally = tally
        self._threads = threads
        context_tokens = spec.rollout.engine.context_tokens
        images = spec.data.images
        self._conversations = Conversations(
            template,
            context_tokens,
            self._config.max_branches,
            max_images=0 if images is None else images.max_per_prompt,
        )
        self._began = self._heard = clock()
        # Requests are prepared one after another: so they are numbered, and find each other's replies, in their order.
        self._preparing = asyncio.Lock()
        self._num_under_way = 0
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        # Also those whose place in ``_turns`` the same request took, sent again as another one.
        self._unrecorded: set[_Turn] = set()
        self._responses: dict[str, tuple[Mapping[str, Any], ...]] = {}
        self.is_ending = False
        """Whether it is being completed."""
        self.holder: str | None = None
        """Who plays it, by a name that it has given itself."""
        self._end: Ended | None = None
        self.num_turns = 0

    @property
    def ends_at(self) -> float:
        """When it is abandoned unless something is heard of its agent; an agent that waits for us is not silent."""
        latest = self._began + self._config.episode_seconds
        if self.is_ending:
            return float("inf")
        return latest if self._num_under_way else min(latest, self._heard + self._config.lease_seconds)

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Keep it open while it is ended."""
        self.is_ending = True
        try:
            yield
        finally:
            self.is_ending = False
            self._heard = self._clock()

    def close(self, how: Ended) -> None:
        """End it: requests being sampled are aborted with an error."""
        self._end = how
        for turn in self._unrecorded:
            turn.sampling.cancel()

    @property
    def num_trajectories(self) -> int:
        """Trajectories so far."""
        return self._conversations.num_branches

    async def trajectories(self) -> list[Trajectory]:
        """Make the trajectories as of now; on a thread, since records of experts take long to be laid out."""
        return await self._threads.run(self._conversations.building(episode=self.id))

    async def answer(self, asked: Asked, has_hung_up: HasHungUp) -> Reply | None:
        """Sample what is asked for, record it, and make the answer; a repeated request gets the answer that was lost.

        Args:
            has_hung_up: asked before anything is recorded: what no agent sees is no turn of its conversation.

        Returns:
            None if the client has disconnected.

        Raises:
            EpisodeGone: the episode ended, perhaps meanwhile.
            InvalidRequest: what is asked for cannot be had.
            Unavailable: the engine is absent now.
        """
        self._check_open()
        with self._working():
            async with self._preparing:
                if asked.endpoint is Endpoint.COUNT_TOKENS:
                    return await self._counted(asked)
                turn = self._known(asked) or await self._new(asked)
                turn.waiting.append(has_hung_up)
            try:
                return await self._answered(turn, has_hung_up)
            finally:
                turn.waiting.remove(has_hung_up)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count as at work: an agent that waits is not silent."""
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._heard = self._clock()

    async def _answered(self, turn: "_Turn", has_hung_up: HasHungUp) -> Reply | None:
        try:
            # A client may hang up and ask again: the finished sample is then there.
            sampled = await asyncio.shield(turn.sampling)
        except asyncio.CancelledError:
            self._check_open()
            if turn.sampling.cancelled():
                return None  # aborted, since its client had hung up
            raise
        except FlotillaError:
            self._forget(turn)
            raise
        if turn.reply is None and await has_hung_up():
            return None
        # A retry may have had it recorded while this checked the connection.
        if turn.reply is None:
            self._keep(turn, sampled)
        return turn.reply

    async def _counted(self, asked: Asked) -> Reply:
        _, prompt = await self._threads.run(lambda: self._prompt(asked))
        self._check_open()
        return Reply({"input_tokens": prompt.num_tokens}, "")

    def _known(self, asked: Asked) -> "_Turn | None":
        return self._turns.get(asked.name) if asked.is_repeated else None

    async def _new(self, asked: Asked) -> "_Turn":
        if self.num_turns >= self._config.max_turns:
            raise LimitReached(f"the episode had its {self._config.max_turns} turns (rollout.agents.max_turns)")
        request, prompt = await self._threads.run(lambda: self._prompt(asked))
        self._check_open()
        for former in [each for each in self._unrecorded if not each.waiting]:
            # Its client went away and did not come back for it.
            if former.sampling.done():
                self._forget(former)
        draft = await self._begin(prompt)
        try:
            parameters = self._parameters(len(draft.prompt_ids), request)
        except InvalidRequest:
            self._conversations.drop(draft)
            raise
        self.num_turns += 1
        name = f"{self.id}-{self.num_turns}"
        # By its own number, however many others begin before it is sampled: answers of one seed are equal.
        seed = sample_seed(self._seed, self.num_turns)
        sampling = asyncio.create_task(self._sample(name, request, draft, parameters, seed), name=f"turn {name}")
        turn = self._turns[asked.name] = _Turn(asked.name, request, draft, sampling)
        self._turns.move_to_end(asked.name)
        self._unrecorded.add(turn)
        if len(self._turns) > MAX_REPLAYED and (oldest := next(iter(self._turns.values()))).reply is not None:
            del self._turns[oldest.name]
        return turn

    async def _begin(self, prompt: Prompt) -> Draft:
        try:
            return self._conversations.begin(prompt)
        except TooManyBranches:
            # Those count, too, that are sampled for clients who have hung up and may come back: now they may not.
            for turn in list(self._unrecorded):
                if turn.draft.is_new and all([await has_hung_up() for has_hung_up in turn.waiting]):
                    turn.sampling.cancel()
                    self._forget(turn)
            self._check_open()
            return self._conversations.begin(prompt)

    def _prompt(self, asked: Asked) -> tuple[AnyRequest, Prompt]:
        """Read a request and make its prompt, on a thread."""
        request = self._read(asked)
        if isinstance(request, ChatRequest):
            tools = request.tools if request.tool_choice != "none" else ()
            return request, self._conversations.chat_prompt(request.messages, tools)
        prompt = request.prompt
        text = prompt if isinstance(prompt, str) else prompt[0] if isinstance(prompt[0], str) else None
        return request, self._conversations.text_prompt(text if text is not None else tuple(map(int, prompt)))

    def _read(self, asked: Asked) -> AnyRequest:
        match asked.endpoint:
            case Endpoint.CHAT:
                return read_chat(asked.body, *self._allowed)
            case Endpoint.TEXT:
                return read_text(asked.body, *self._allowed)
            case Endpoint.RESPONSES:
                return read_responses(asked.body, self._responses, *self._allowed)
            case Endpoint.MESSAGES | Endpoint.COUNT_TOKENS:
                return read_messages(asked.body, *self._allowed)

    def _forget(self, turn: "_Turn") -> None:
        if turn not in self._unrecorded:
            return  # another waiter did so, and its branch may be busy again
        self._unrecorded.discard(turn)
        self._conversations.drop(turn.draft)
        if self._turns.get(turn.name) is turn:
            del self._turns[turn.name]

    def _check_open(self) -> None:
        if self._end is not None:
            raise EpisodeGone(f"episode {self.id} was {self._end.value}: begin another one")

    async def _sample(
        self, turn: str, request: AnyRequest, draft: Draft, parameters: SamplingParameters, seed: int
    ) -> _Sampled:
        with self._working():
            completion = await self._generate(turn, draft, parameters, seed)
            return await self._threads.run(lambda: self._sampled(request, draft, completion))

    def _sampled(self, request: AnyRequest, draft: Draft, completion: Completion) -> _Sampled:
        """Make the reply and cut the record of experts, on a thread; the branch is busy and does not change."""
        reply, experts = self._reply(request, draft, completion), completion.experts
        return _Sampled(completion, reply, None if experts is None else draft.branch.builder.cut(experts))

    async def _generate(self, turn: str, draft: Draft, parameters: SamplingParameters, seed: int) -> Completion:
        generation = GenerationRequest(
            request_id=turn,
            prompt_ids=draft.prompt_ids,
            seeds=(seed,),
            sampling=parameters,
            holds_weights=self._is_held_out,
            is_turn=True,
            images=draft.images,
        )
        try:
            (completion,) = await self._engine.generate(generation)
        except WorkerDied as error:
            self._on_death(error)
            raise Unavailable("the engine's process ended: this episode is lost, begin another one") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(turn))
            raise
        if completion.finish_reason is FinishReason.ABORTED or not len(completion.token_ids):
            raise Unavailable("the engine gave this reply up: ask again")
        return completion

    async def _abort(self, turn: str) -> None:
        try:
            await self._engine.abort(turn)
        except FlotillaError:
            return

    def _parameters(self, num_prompt: int, request: AnyRequest) -> SamplingParameters:
        sampling = self._sampling
        room = self._conversations.room_behind(num_prompt)
        return SamplingParameters(
            max_new_tokens=min(wanted_tokens(request) or sampling.max_new_tokens, sampling.max_new_tokens, room),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            **sampling.rarer,
            greedy=self._is_greedy,
            stop_token_ids=() if sampling.ignore_eos else self._template.stop_token_ids,
            stop=sampling.stop + stops_of(request),
            ignore_eos=sampling.ignore_eos,
        )

    def _reply(self, request: AnyRequest, draft: Draft, completion: Completion) -> Reply:
        """Make the reply to a request, on a thread."""
        stops = self._sampling.stop + stops_of(request)
        facts: dict[str, Any] = {"episode_id": self.id, "num_prompt": len(draft.prompt_ids), "stops": stops}
        if not isinstance(request, ChatRequest):
            return text_reply(request, completion, self._template, **facts)
        reply = chat_reply(request, completion, self._template, **facts)
        if isinstance(request, MessagesChat):
            return messages_reply(request, reply, self._sampling)
        return responses_reply(request, reply, self._sampling) if isinstance(request, ResponsesChat) else reply

    def _keep(self, turn: "_Turn", sampled: _Sampled) -> None:
        self._check_open()
        draft, request, completion, reply = turn.draft, turn.request, sampled.completion, sampled.reply
        self._conversations.keep(draft, completion, reply.text, reply.message, reply.endings, sampled.experts)
        if self._tally is not None:
            if draft.is_new:
                self._tally.add_prompt(draft.read_ids)
            self._tally.add_completion(completion.token_ids)
        if isinstance(request, ResponsesChat) and request.asked.store is not False:
            assert isinstance(reply, ResponsesReply) and reply.message is not None
            self._responses[reply.name] = (*request.said, reply.message)
        turn.reply = reply
        self._unrecorded.discard(turn)
