"""Holds claimed tasks open for agents from outside: each episode of a group is handed out until one is finished.

``run`` owns a group from its claim to its end, and every wait in it: an episode whose agent is silent or too slow is
abandoned there and handed out again, a group that takes too long continues with what it has. A group is never begun by
anybody but its claim's holder, so the ledger knows nothing of episodes: when this process dies the task is claimed by
another, and its agents learn that their episodes have ended.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from flotilla.services.rollout.agents.environment import EnvironmentAgent
from flotilla.services.rollout.agents.episode import Ended, Episode, EpisodeGone, Threads
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.engines.base import Engine
from flotilla.services.rollout.episodes.observations import content_of
from flotilla.services.rollout.episodes.resumption import resume_rule, rule_of
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.shared.config.sections.data import PLACE
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, InvalidRequest, Unavailable, WorkerDied
from flotilla.shared.schemas.episode import (
    LONGEST_WAIT_SECONDS,
    EndedEpisode,
    EpisodeMessage,
    EpisodeReward,
    EpisodeTask,
    OpenedEpisode,
)
from flotilla.shared.schemas.task import Lane, Task
from flotilla.shared.schemas.trajectory import FinishReason, Group, Trajectory
from flotilla.shared.streams.mailbox import Mailbox
from flotilla.shared.streams.partials import Partials, is_finished

MAX_ENDED: Final = 4096
"""Ended episodes that are remembered, so that ending one again is answered as the first time."""
Clock = Callable[[], float]


@dataclass
class EpisodeCounts:
    """Counts since the session began.

    Attributes:
        opened: handed out.
        by_end: ended, by how.
    """

    opened: int = 0
    by_end: dict[Ended, int] = field(default_factory=lambda: dict.fromkeys(Ended, 0))

    def ended(self, how: Ended) -> None:
        """Count an end."""
        self.by_end[how] += 1

    @property
    def num_open(self) -> int:
        """Episodes that are with an agent."""
        return self.opened - sum(self.by_end.values())

    def to_load(self) -> dict[str, float]:
        """Make gauges of it."""
        ends = {f"episodes_{how.value}": float(count) for how, count in self.by_end.items()}
        return {"episodes_opened": float(self.opened), "episodes_open": float(self.num_open), **ends}


class EpisodesAbandoned(InvalidRequest):
    """No agent finished an episode of the task."""

    code, title = "episodes_abandoned", "No agent finished an episode of the task"


class NoTask(Unavailable):
    """There is no task to hand out now."""

    code, title = "no_task", "There is no task now"


@dataclass(eq=False)
class _Member:
    """One episode of a group, however often it is begun."""

    attempts: int = 0
    num_given_back: int = 0
    episode: Episode | None = None
    trajectories: tuple[Trajectory, ...] = ()
    is_over: bool = False

    @property
    def is_offered(self) -> bool:
        return not self.is_over and self.episode is None

    def is_spent(self, max_attempts: int) -> bool:
        """Tell whether it is handed out no more; what died with its agent counts only once it is as many again."""
        return self.attempts - min(self.num_given_back, max_attempts) >= max_attempts


@dataclass(eq=False)
class _Offer:
    """A group whose episodes are handed out."""

    task: Task
    members: list[_Member]
    began: float | None = None
    failure: FlotillaError | None = None
    is_interrupted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AgentEpisodes:
    """Answers tasks by what agents make of them.

    Args:
        engine: samples.
        template: of the model.
        spec: of the experiment.
        mailbox: where rewards are left that come with an episode's end or later.
        prefix: what the ids of episodes begin with: ``EXPERIMENT.SERVICE``, so that the gateway finds them.
        tally: counts special tokens in what is sampled.
        clock: in seconds, never goes back.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        spec: ExperimentSpec,
        mailbox: Mailbox,
        prefix: Callable[[], str],
        tally: SamplingTally | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        assert spec.rollout.agents is not None
        self.spec = spec
        self.counts = EpisodeCounts()
        self.threads = Threads()
        self.environment: EnvironmentAgent | None = None
        """The agent that is started here; None where they come from outside."""
        self._config = spec.rollout.agents
        self._resume = resume_rule(spec.asynchrony)
        self._engine = engine
        self._template = template
        self._mailbox = mailbox
        self._prefix = prefix
        self._tally = tally
        self._clock = clock
        self._offers: deque[_Offer] = deque()
        self._offered = asyncio.Condition()
        self._open: dict[str, tuple[Episode, _Offer, _Member]] = {}
        self._ended: OrderedDict[str, EndedEpisode] = OrderedDict()
        self._by_key: OrderedDict[str, tuple[Task, OpenedEpisode]] = OrderedDict()
        self._given_back: OrderedDict[str, None] = OrderedDict()
        """Episodes and holders."""

    def to_load(self) -> dict[str, float]:
        """Make gauges of where the episodes are, with those that wait for an agent."""
        waiting = sum(member.is_offered for offer in self._offers for member in offer.members)
        return {**self.counts.to_load(), "episodes_waiting": float(waiting)}

    async def run(self, task: Task, partials: Partials = (), serving: int = 0, *, delivery: str = "") -> Group:
        """Hold a task open until its group is finished, or has taken too long.

        Raises:
            EpisodesAbandoned: there is no finished episode, and none is handed out any more.
            WorkerDied: the engine's process ended.
        """
        offer = _Offer(task, [self._member(task, each, serving) for each in partials or (None,) * task.group_size])
        self._offers.append(offer)
        await self._announce()
        try:
            while not all(member.is_over for member in offer.members):
                if offer.failure is not None:
                    raise offer.failure
                offer.changed.clear()
                self._expire(offer)
                await self._wait(offer)
        finally:
            self._offers.remove(offer)
            for member in offer.members:
                if member.episode is not None:
                    self._close(member, Ended.LOST)
        return await self.threads.run(lambda: self._group(offer))

    async def interrupt(self) -> None:
        """Close every open episode; each ``run`` returns at once with the episodes that are finished."""
        for offer in self._offers:
            offer.is_interrupted = True
            for member in offer.members:
                member.is_over = True
            offer.changed.set()

    def _member(self, task: Task, earlier: Trajectory | None, serving: int) -> _Member:
        """Keep an episode that was finished elsewhere, if its tokens are not too old."""
        if earlier is None or not is_finished(earlier):
            return _Member()
        oldest = min(version for _, version in earlier.versions)
        if oldest < task.min_version or serving - oldest > rule_of(task, self._resume).max_lag:
            return _Member()
        return _Member(trajectories=(replace(earlier, resumed_tokens=earlier.num_sampled),), is_over=True)

    def _expire(self, offer: _Offer) -> None:
        now, config = self._clock(), self._config
        if offer.began is not None and now >= offer.began + config.group_seconds:
            for member in offer.members:
                if member.episode is not None:
                    self._close(member, Ended.ABANDONED)
                member.is_over = True
        for member in offer.members:
            episode = member.episode
            if episode is None or now < episode.ends_at:
                continue
            self._close(member, Ended.ABANDONED)
            member.is_over = member.is_spent(config.max_attempts)
            offer.changed.set()

    async def _wait(self, offer: _Offer) -> None:
        if offer.changed.is_set():
            await self._announce()
            return
        ends = [member.episode.ends_at for member in offer.members if member.episode is not None]
        if offer.began is not None:
            ends.append(offer.began + self._config.group_seconds)
        # Without a deadline before the first episode: agents may come at any time; the experiment's end ends the wait.
        # With one it is examined now and then, since a reply that arrives makes its agent's lease begin.
        left = min(max(0.0, min(ends) - self._clock()), self._config.lease_seconds / 4) if ends else None
        try:
            async with asyncio.timeout(left):
                await offer.changed.wait()
        except TimeoutError:
            return

    async def _announce(self) -> None:
        async with self._offered:
            self._offered.notify_all()

    def _close(self, member: _Member, how: Ended) -> None:
        episode, member.episode = member.episode, None
        if episode is None:
            return
        self._open.pop(episode.id, None)
        self.counts.ended(how)
        episode.close(how)

    def _group(self, offer: _Offer) -> Group:
        task = offer.task
        prompt = self._template.prompt([{"role": m.role, "content": m.content} for m in task.messages], ())
        if offer.is_interrupted and any(not member.trajectories for member in offer.members):
            # Handed over: one trajectory for each member. What made several is done again.
            kept = [member.trajectories[0] if len(member.trajectories) == 1 else _NOTHING for member in offer.members]
            return Group(task, tuple(kept), prompt)
        trajectories = tuple(each for member in offer.members for each in member.trajectories)
        if not trajectories:
            raise EpisodesAbandoned(f"none of the {task.group_size} episodes of task {task.group_id} was finished")
        return Group(task, trajectories, prompt)

    async def open(
        self, wait_seconds: float, key: str | None = None, *, only_known: bool = False, holder: str | None = None
    ) -> OpenedEpisode:
        """Begin an episode of the group that was begun first and has one to hand out.

        Args:
            key: of the call; what was begun by it and is open is handed out again.
            only_known: begin none.
            holder: who plays it.

        Raises:
            NoTask: there was none within the time.
            EpisodeGone: the holder has ended.
        """
        try:
            async with asyncio.timeout(min(wait_seconds, LONGEST_WAIT_SECONDS)), self._offered:
                await self._offered.wait_for(lambda: only_known or self._known(key) or self._next() is not None)
                if holder is not None and holder in self._given_back:
                    raise EpisodeGone("what this holder had was given back, since it had ended: it gets no other one")
                known = self._known(key)
                if known is None and only_known:
                    raise NoTask("no episode that is open was begun by this key")
                task, opened = known or self._begin(holder)
                if key is not None:
                    if task.images:
                        # Those of episodes that have ended are of no use, and hold their images.
                        self._by_key = OrderedDict(each for each in self._by_key.items() if self._known(each[0]))
                    self._by_key[key] = task, opened
                    if len(self._by_key) > MAX_ENDED:
                        self._by_key.popitem(last=False)
        except TimeoutError:
            raise NoTask("every episode of the tasks here is with an agent: ask again") from None
        whole = await self.threads.run(lambda: self._whole(task))
        return opened.model_copy(update={"task": opened.task.model_copy(update=whole)})

    def _whole(self, task: Task) -> dict[str, Any]:
        """Make what of a task is large, and not kept with its episode: prompt, and messages with images. Blocks."""
        if not task.images:
            return {"prompt": self._prompt(task)}
        shown = (EpisodeMessage(role=each.role, content=content_of(each)) for each in task.shown_messages)
        return {"prompt": self._prompt(task), "messages": tuple(shown)}

    def _known(self, key: str | None) -> tuple[Task, OpenedEpisode] | None:
        """Find what was begun by a key and is open."""
        known = None if key is None else self._by_key.get(key)
        return known if known is not None and known[1].episode_id in self._open else None

    def _next(self) -> tuple[_Offer, int] | None:
        # Held-out tasks first: their version is held for them.
        for offer in sorted(self._offers, key=lambda each: each.task.lane is Lane.TRAIN):
            for index, member in enumerate(offer.members):
                if member.is_offered:
                    return offer, index
        return None

    def _begin(self, holder: str | None) -> tuple[Task, OpenedEpisode]:
        found = self._next()
        assert found is not None
        offer, index = found
        member, now, config = offer.members[index], self._clock(), self._config
        offer.began = now if offer.began is None else offer.began
        member.attempts += 1
        episode = Episode(
            self._prefix(),
            offer.task,
            index,
            self.spec,
            self._engine,
            self._template,
            self._clock,
            on_death=lambda error: self._on_death(offer, error),
            threads=self.threads,
            tally=self._tally if offer.task.lane is Lane.TRAIN else None,
            attempt=member.attempts,
        )
        member.episode = episode
        episode.holder = holder
        self._open[episode.id] = (episode, offer, member)
        self.counts.opened += 1
        offer.changed.set()
        task = offer.task
        return task, OpenedEpisode(
            episode_id=episode.id,
            task=EpisodeTask(
                group_id=task.group_id,
                split=task.lane,
                index=index,
                row=task.row,
                messages=tuple(EpisodeMessage(role=each.role, content=each.content) for each in task.messages),
                prompt="",
                label=task.label,
                data_source=task.data_source,
                metadata=dict(task.metadata),
            ),
            lease_seconds=config.lease_seconds,
            seconds=config.episode_seconds,
        )

    def _prompt(self, task: Task) -> str:
        template = self.spec.data.input_template
        if template is not None:
            return template.replace(PLACE, task.messages[-1].content)
        try:
            return self._template.prompt([{"role": each.role, "content": each.content} for each in task.messages], ())
        except InvalidRequest:
            return ""  # an agent may ask something else

    def _on_death(self, offer: _Offer, error: WorkerDied) -> None:
        offer.failure = error
        offer.changed.set()

    async def give_back(self, holder: str) -> list[str]:
        """Abandon what is with an agent that has ended, so that it is handed out at once; what is being ended is ended.

        What the agent had started may still ask: it is refused, and so is a call for an episode that comes late.
        """
        given = [each for each in self._open.values() if each[0].holder == holder and not each[0].is_ending]
        for episode, offer, member in given:
            member.num_given_back += 1
            self._close(member, Ended.ABANDONED)
            member.is_over = member.is_spent(self._config.max_attempts)
            self._note_given_back(episode.id)
            offer.changed.set()
        self._note_given_back(holder)
        await self._announce()
        return [episode.id for episode, _, _ in given]

    def _note_given_back(self, name: str) -> None:
        self._given_back[name] = None
        if len(self._given_back) > MAX_ENDED:
            self._given_back.popitem(last=False)

    def find(self, episode_id: str) -> Episode:
        """Find an open episode.

        Raises:
            EpisodeGone: it has ended, or was begun by another process.
        """
        found = self._open.get(episode_id)
        if found is None:
            how = "is complete" if episode_id in self._ended else "is not open here (any more): begin another one"
            if episode_id in self._given_back:
                how = "was given back, since who had begun it has ended: another agent plays it"
            raise EpisodeGone(f"episode {episode_id} {how}")
        return found[0]

    async def complete(self, episode_id: str, reward: EpisodeReward | None) -> EndedEpisode:
        """End an episode; ending it again is answered as the first time.

        Raises:
            EpisodeGone: it ended otherwise.
            InvalidRequest: nothing was sampled in it, or a reward is given that the spec does not use.
        """
        if episode_id in self._ended:
            return self._ended[episode_id]
        episode = self.find(episode_id)
        _, offer, member = self._open[episode_id]
        window = self._reward_window()
        if reward is not None and window is None:
            raise InvalidRequest(
                "reward.components has none of kind agent, so this reward would have no effect: add it, or leave the "
                "reward out"
            )
        if not episode.num_trajectories:
            raise InvalidRequest(
                "nothing was sampled in this episode, so there is nothing to train: ask the model first"
            )
        async with episode.ending():
            trajectories = await episode.trajectories()
            if window is not None:
                # The wait ends with the window; an available reward is not waited for.
                await self._mailbox.expect(episode_id, seconds=max(window, KEPT_REWARD_SECONDS if reward else 0.0))
                if reward is not None:
                    await self._mailbox.deliver(episode_id, reward.model_dump_json().encode())
            if episode_id in self._ended:
                return self._ended[episode_id]
            if member.episode is not episode:
                raise EpisodeGone(f"episode {episode_id} was abandoned meanwhile")
        ended = EndedEpisode(
            episode_id=episode_id,
            num_turns=episode.num_turns,
            num_trajectories=len(trajectories),
            has_reward=reward is not None,
            reward_until_seconds=0.0 if reward is not None else window or 0.0,
        )
        self._ended[episode_id] = ended
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        member.trajectories, member.is_over = tuple(trajectories), True
        self._close(member, Ended.COMPLETED)
        offer.changed.set()
        return ended

    def _reward_window(self) -> float | None:
        windows = [each.window_seconds for each in self.spec.reward.components if each.kind == "agent"]
        return max(windows) if windows else None


KEPT_REWARD_SECONDS: Final = 86_400.0
"""How long a reward that came with the end of an episode is kept for the reward service."""

_NOTHING: Final = Trajectory(
    token_ids=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.uint8),
    log_probs=np.zeros(1, np.float32),
    versions=((0, 0),),
    finish_reason=FinishReason.ABORTED,
)
"""Of an episode that is begun again elsewhere; it is never forwarded."""
