"""What agents from outside ask of the gateway: an episode, its end, a reward that comes later.

The gateway holds nothing of an episode: its id names its experiment and the rollout that holds it, its key is a pass
that the gateway signs. So it keeps no table of them, and a gateway that restarts continues where the one before was.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from flotilla.services.gateway.access.quotas import check_episodes
from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.episodes.rollouts import CALL_SECONDS, BrokenOff, EpisodeGone, Rollouts
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository, PerExperiment
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.signals import wait_for_any
from flotilla.shared.clock import Clock
from flotilla.shared.config.sections.reward import AgentRewardConfig
from flotilla.shared.errors import (
    ActionNotAllowed,
    Conflict,
    DeadlineExceeded,
    FlotillaError,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.episode import (
    LONGEST_WAIT_SECONDS,
    BeginEpisode,
    CompleteEpisode,
    EndedEpisode,
    EpisodeReward,
    EpisodesGivenBack,
    HandedOutEpisode,
    OpenedEpisode,
    OpenEpisode,
)
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.streams.mailbox import Delivery


@dataclass(frozen=True, slots=True)
class EpisodeName:
    """An id, ``EXPERIMENT.SERVICE.REST``, taken apart; the experiment's may have full stops."""

    text: str
    experiment_id: str
    service_id: str

    @classmethod
    def parse(cls, text: str) -> "EpisodeName":
        """Read an id.

        Raises:
            NotFound: it is not one.
        """
        parts = text.rsplit(".", 2)
        if len(parts) != 3 or not all(parts):
            raise NotFound(f"there is no episode {text[:100]!r}")
        return cls(text, parts[0], parts[1])


SLICE_SECONDS: Final = 2.0
"""How long one rollout is waited for before the next is asked."""
KNOWN_SECONDS: Final = 1.0, 2.0
"""The least and the most time for a rollout to report what it has begun by a key."""
PAUSE_SECONDS: Final = 0.2
"""Between two rounds, where no rollout is at work that would wait."""
RECALL_SECONDS: Final = 600.0
"""How long after this gateway began a call may be one that an earlier gateway was told."""
MOST_CALLS: Final = 16384
"""Calls with a key that are remembered."""
KEY_SECONDS: Final = 60.0
"""How much longer than its episode a key lives, for rewards and repeated calls."""
LATEST_STATES: Final = frozenset(
    {ExperimentState.STOPPING, ExperimentState.STOPPED, ExperimentState.COMPLETED, ExperimentState.FAILED}
)


class HandedOutEpisodes:
    """Counts open episodes by whose they are; one that is never completed is forgotten with its deadline."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = defaultdict(dict)
        self._beginning: dict[str, int] = defaultdict(int)

    def count(self, whose: str, now: float) -> int:
        """Count those of a token, and those that it is about to get; ``now`` in seconds since the epoch."""
        opened = self._until[whose]
        for episode_id in [each for each, until in opened.items() if until <= now]:
            del opened[episode_id]
        return len(opened) + self._beginning[whose]

    @contextmanager
    def beginning(self, whose: str) -> Iterator[None]:
        """Count a waiting call."""
        self._beginning[whose] += 1
        try:
            yield
        finally:
            self._beginning[whose] -= 1

    def add(self, whose: str, episode_id: str, until: float) -> None:
        """Note one that was handed out."""
        self._until[whose][episode_id] = until

    def end(self, episode_id: str) -> None:
        """Forget one that has ended."""
        for opened in self._until.values():
            opened.pop(episode_id, None)


class NoTask(Unavailable):
    """There is no task to hand out now."""

    code, title = "no_task", "There is no task now"


@dataclass(frozen=True, slots=True)
class _Call:
    """An agent's call for an episode.

    Attributes:
        end: of its wait, by the monotonic clock.
        name: made of its key of idempotency; None without one.
        may_be_repeated: whether a call of this name may have begun an episode before.
        silent: rollouts that did not answer it in time, by id: it does not wait for them again.
        holder: the player of what it begins.
    """

    whose: str
    end: float
    name: str | None = None
    may_be_repeated: bool = False
    silent: set[str] = field(default_factory=set)
    holder: str | None = None


@dataclass(slots=True)
class _Turn:
    """Held by the one call of its key that is under way."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_calls: int = 0


class Episodes:
    """The gateway's side of agents from outside.

    Args:
        tokens: signs the keys.
        measurements: notified when an agent asks.
    """

    def __init__(
        self,
        repository: ExperimentRepository,
        registry: Registry,
        tokens: Tokens,
        clock: Clock,
        measurements: PerExperiment[Measurements],
    ) -> None:
        self._repository = repository
        self._measurements = measurements
        self._tokens = tokens
        self._clock = clock
        self._turn = 0
        self._calls: OrderedDict[str, tuple[str, float] | None] = OrderedDict()
        """By name: the rollout that began an episode by it, or may have, and until when that is open unused."""
        self._turns: dict[str, _Turn] = defaultdict(_Turn)
        self._recalls_until = clock.monotonic() + RECALL_SECONDS
        self.rollouts = Rollouts(registry, tokens.peer_of)
        self._handed = HandedOutEpisodes()

    async def open(
        self, experiment_id: str, wanted: OpenEpisode, who: Principal, base_url: str, key: str | None = None
    ) -> HandedOutEpisode:
        """Hand out a task and the key to an episode.

        Args:
            key: of idempotency: a call that is repeated gets the episode that it has begun, while that is open.

        Raises:
            NotFound: there is no such experiment.
            Forbidden: the caller has the key of one episode.
            InvalidRequest: its episodes are not driven by agents.
            ActionNotAllowed: it has ended; agents need not ask again.
            NoTask: there is none now.
            QuotaExceeded: the token has as many open as it may.
        """
        if who.subject is not None:
            raise Forbidden("this is the key of one episode: begin another one with the token that began this one")
        experiment = self._repository.get(experiment_id)
        if experiment.spec.rollout.agents is None:
            raise InvalidRequest(f"experiment {experiment_id} is not for agents: its spec has no rollout.agents")
        end = self._clock.monotonic() + min(wanted.wait_seconds, LONGEST_WAIT_SECONDS)
        call = replace(self._call_of(experiment_id, who, key, end), holder=wanted.holder)
        async with self._turn_of(call):
            opened = await self._opened(experiment, call)
        self._handed.add(who.actor, opened.episode_id, self._clock.now() + opened.seconds)
        return self._handed_out(experiment, opened, base_url)

    @asynccontextmanager
    async def _turn_of(self, call: "_Call") -> AsyncIterator[None]:
        """Let one call of a key be under way: one that is repeated while the first waits finds what that began."""
        if call.name is None:
            yield
            return
        turn = self._turns[call.name]
        turn.num_calls += 1
        try:
            try:
                async with asyncio.timeout(max(0.0, call.end - self._clock.monotonic())):
                    await turn.lock.acquire()
            except TimeoutError:
                raise NoTask("the call that was made with this key before still waits for a task: ask again") from None
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            turn.num_calls -= 1
            if not turn.num_calls:
                del self._turns[call.name]

    async def _opened(self, experiment: Experiment, call: "_Call") -> OpenedEpisode:
        """Wait for a task that a rollout hands out; what the call has begun before is no new one for the quota."""
        with ExitStack() as counted:
            is_counted = False
            while True:
                self._check_state(experiment)
                self._measurements.of(experiment).asked.at = self._clock.now()
                is_early = call.may_be_repeated and self.rollouts.has_unheard(experiment.id)
                if not is_early:
                    opened = await self._known(experiment, call)
                    may_begin = opened is None and self._holder(experiment, call) is None
                    if may_begin and not is_counted:
                        num_open = self._handed.count(call.whose, self._clock.now())
                        check_episodes(num_open, self._tokens.quota_of(call.whose), call.whose)
                        counted.enter_context(self._handed.beginning(call.whose))
                        is_counted = True
                    opened = await self._from_some_rollout(experiment, call) if may_begin else opened
                    if opened is not None:
                        return opened
                left = call.end - self._clock.monotonic()
                if left <= 0.0 and (holder := self._holder(experiment, call)) is not None:
                    raise NoTask(f"{holder} has the episode of this call, and does not answer: ask again with its key")
                if left <= 0.0:
                    raise NoTask("no task is free now: ask again", experiment_id=experiment.id)
                await wait_for_any(min(PAUSE_SECONDS, left), experiment.changed.next)

    def _call_of(self, experiment_id: str, who: Principal, key: str | None, end: float) -> "_Call":
        """Name a call by its key, and say whether it may be one that was made before.

        Nothing that is kept answers it, since the answer holds a token. Soon after this gateway began any call may have
        been made of an earlier one, which ended before it could answer.
        """
        if not key:
            return _Call(who.actor, end)
        name = hashlib.sha256(f"{who.actor} {experiment_id} {key}".encode()).hexdigest()
        call = _Call(who.actor, end, name, self._is_early() or name in self._calls)
        self._calls.setdefault(name, None)
        self._calls.move_to_end(name)
        if len(self._calls) > MOST_CALLS:
            self._calls.popitem(last=False)
        return call

    def _is_early(self) -> bool:
        return self._clock.monotonic() < self._recalls_until

    def _check_state(self, experiment: Experiment) -> None:
        if experiment.state in LATEST_STATES or experiment.state is ExperimentState.DRAFT:
            raise ActionNotAllowed(f"experiment {experiment.id} is {experiment.state.value}: it has no episodes")

    async def _known(self, experiment: Experiment, call: "_Call") -> OpenedEpisode | None:
        """Ask all rollouts at once what they have begun by a call that may have been made before."""
        holder = self._holder(experiment, call)
        if not call.may_be_repeated and holder is None:
            return None
        least, most = KNOWN_SECONDS
        seconds = max(least, min(most, call.end - self._clock.monotonic()))
        wanted = BeginEpisode(key=call.name, only_known=True, holder=call.holder)
        services = [each for each in self.rollouts.at_work(experiment.id) if each.id == holder]
        if not services or self._is_early():
            # An earlier gateway's answer may be known to a rollout other than the last one asked.
            services += [each for each in self._heard(experiment, call) if each.id != holder]
        asking = [asyncio.ensure_future(self._asked(each, experiment, wanted, call, seconds)) for each in services]
        try:
            for answer in asyncio.as_completed(asking):
                if (opened := await answer) is not None:
                    return opened
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return None

    async def _from_some_rollout(self, experiment: Experiment, call: "_Call") -> OpenedEpisode | None:
        """Ask one rollout after another, each from the beginning of another one; only the last may wait."""
        services = self._heard(experiment, call)
        self._turn += 1
        for number in range(len(services)):
            service = services[(self._turn + number) % len(services)]
            left = max(0.0, min(SLICE_SECONDS, call.end - self._clock.monotonic()))
            wait = left if number == len(services) - 1 else 0.0
            wanted = BeginEpisode(wait_seconds=wait, key=call.name, holder=call.holder)
            opened = await self._asked(service, experiment, wanted, call, CALL_SECONDS)
            # One that fell silent may have begun one: no other does.
            if opened is not None or self._holder(experiment, call) is not None:
                return opened
        return None

    def _heard(self, experiment: Experiment, call: "_Call") -> list[LiveService]:
        return [each for each in self.rollouts.at_work(experiment.id) if each.id not in call.silent]

    async def _asked(
        self, service: LiveService, experiment: Experiment, wanted: BeginEpisode, call: "_Call", seconds: float
    ) -> OpenedEpisode | None:
        """Ask a rollout; None where it has none, or does not answer within so many seconds beside its wait."""
        path = f"/v1/experiments/{experiment.id}/episodes"
        try:
            opened = await self.rollouts.call(service, path, wanted.model_dump(), wanted.wait_seconds, seconds)
        except asyncio.CancelledError:
            # A client that hangs up may repeat the call, and the rollout may not have noticed it.
            if not wanted.only_known:
                self._note_holder(experiment, call, service)
            raise
        except FlotillaError as error:
            if isinstance(error, DeadlineExceeded):
                call.silent.add(service.id)
            if isinstance(error, DeadlineExceeded | BrokenOff) and not wanted.only_known:
                self._note_holder(experiment, call, service)
            elif error.code in {NoTask.code, NotFound.code} and self._holder(experiment, call) == service.id:
                self._calls[str(call.name)] = None
            if not error.retryable and error.status not in {404, 503}:
                raise
            return None
        self._note_holder(experiment, call, service)
        return OpenedEpisode.model_validate(opened)

    def _note_holder(self, experiment: Experiment, call: "_Call", service: LiveService) -> None:
        """Note that a rollout began an episode by a call, or may have: what no agent uses is its for no longer."""
        if call.name is not None and experiment.spec.rollout.agents is not None:
            self._calls[call.name] = service.id, self._clock.monotonic() + experiment.spec.rollout.agents.lease_seconds

    def _holder(self, experiment: Experiment, call: "_Call") -> str | None:
        """Name the rollout that may have an episode of this call open: no other begins one meanwhile."""
        known = None if call.name is None else self._calls.get(call.name)
        if known is None or self._clock.monotonic() >= known[1]:
            return None
        return known[0] if any(each.id == known[0] for each in self.rollouts.at_work(experiment.id)) else None

    def _handed_out(self, experiment: Experiment, opened: OpenedEpisode, base_url: str) -> HandedOutEpisode:
        window = max(
            (each.window_seconds for each in experiment.spec.reward.components if isinstance(each, AgentRewardConfig)),
            default=0.0,
        )
        agent = Principal(Scope.AGENT, "an agent", experiment_id=experiment.id, subject=opened.episode_id)
        key = self._tokens.issue(agent, opened.seconds + window + KEY_SECONDS)
        return HandedOutEpisode(**dict(opened), key=key, base_url=f"{base_url}/v1", model=experiment.record.name)

    def allowed(self, episode_id: str, who: Principal) -> EpisodeName:
        """Parse an episode's id for a caller.

        Raises:
            NotFound: it is none.
            Forbidden: it is another's.
        """
        name = EpisodeName.parse(episode_id)
        if who.experiment_id not in (None, name.experiment_id) or who.subject not in (None, name.text):
            raise Forbidden(f"this token is not for episode {episode_id}")
        self._repository.get(name.experiment_id)
        return name

    async def complete(self, name: EpisodeName, ending: CompleteEpisode) -> EndedEpisode:
        """End an episode.

        Raises:
            EpisodeGone: it ended otherwise.
            InvalidRequest: nothing was sampled in it, or its reward would have no effect.
        """
        service = self.rollouts.find(name.service_id, name.text)
        path = f"/v1/experiments/{name.experiment_id}/episodes/{name.text}/complete"
        try:
            ended = EndedEpisode.model_validate(await self.rollouts.call(service, path, ending.model_dump(mode="json")))
        except FlotillaError as error:
            if error.status == 404:
                raise EpisodeGone(f"episode {name.text} is gone: its rollout works for others now") from error
            raise
        self._handed.end(name.text)
        return ended

    async def give_back(self, experiment_id: str, holder: str, who: Principal) -> EpisodesGivenBack:
        """Have handed out again at once what somebody holds who has ended, by whichever rollout.

        Raises:
            NotFound: there is no such experiment.
            Forbidden: the caller has the key of one episode.
            FlotillaError: a rollout does not answer; the others were informed.
        """
        if who.subject is not None:
            raise Forbidden("this is the key of one episode: who gives back has the token that began it")
        self._repository.get(experiment_id)
        path, body = f"/v1/experiments/{experiment_id}/episodes/give-back", {"holder": holder}
        asking = [self.rollouts.call(each, path, body) for each in self.rollouts.at_work(experiment_id)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        given: list[str] = []
        for answer in answers:
            if not isinstance(answer, BaseException):
                given += EpisodesGivenBack.model_validate(answer).episode_ids
        for episode_id in given:
            self._handed.end(episode_id)
        for answer in answers:
            # One that works for others now, or is too old to know holders, has nothing of this one.
            if isinstance(answer, BaseException) and not (isinstance(answer, FlotillaError) and answer.status == 404):
                raise answer
        return EpisodesGivenBack(episode_ids=tuple(given))

    async def reward(self, name: EpisodeName, given: EpisodeReward) -> None:
        """Take a reward that comes after the end of its episode; the same one again changes nothing.

        Raises:
            EpisodeGone: it is unknown, or no longer waited for.
            Conflict: it had another one.
        """
        mailbox = self._repository.get(name.experiment_id).train.mailbox
        match await mailbox.deliver(name.text, given.model_dump_json().encode()):
            case Delivery.TAKEN | Delivery.AGAIN:
                return
            case Delivery.OTHER:
                raise Conflict(f"episode {name.text} has another reward already")
            case Delivery.LATE:
                raise EpisodeGone(f"episode {name.text} ended too long ago: its window for rewards is over")
            case Delivery.UNKNOWN:
                raise EpisodeGone(
                    f"episode {name.text} is not complete, or ended otherwise: there is nothing to reward"
                )

    def counts(self, experiment_id: str) -> dict[str, int]:
        """Sum the rollouts' counts of an experiment's episodes, each since its own start.

        Raises:
            NotFound: there is no such experiment.
        """
        self._repository.get(experiment_id)
        totals: dict[str, int] = {}
        for service in self.rollouts.at_work(experiment_id):
            for name, value in service.observed.load.items():
                if name.startswith("episodes_"):
                    totals[name] = totals.get(name, 0) + int(value)
        return totals


def models_of(models: Sequence[tuple[str, float]]) -> bytes:
    """Make the answer to ``GET /v1/models`` of names and the times at which they were made."""
    found = [{"id": name, "object": "model", "created": int(at), "owned_by": "flotilla"} for name, at in models]
    return json.dumps({"object": "list", "data": found}).encode()
