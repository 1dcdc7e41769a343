"""Episodes of many turns: each member of a group talks to a conversation of its own until one of the two ends it.

Tokens are only appended: what the template shows otherwise than it was sampled is a sequence behind the others. A group
that was handed over continues: finished members stay, the conversation of each other one is replayed from its beginning
with the recorded answers, and must return what it returned before.

Redundant members are played beside a group that begins. The first that are finished without an error are its members:
one that is neither finished nor needed any more is ended, with its environment.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flotilla.services.rollout.engines.base import Engine, ResumeRule
from flotilla.services.rollout.episodes.conversation import ConversationOpener
from flotilla.services.rollout.episodes.member import Member
from flotilla.services.rollout.episodes.rendering import TurnRenderer, first_prompt
from flotilla.services.rollout.episodes.resumption import rule_of
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.episodes.turns import Requests, Turns, request_name
from flotilla.services.rollout.trajectory_builder import RenderTally
from flotilla.shared.config.sections.episodes import TurnLimits
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.streams.partials import Partials, is_finished


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an episode.

    Attributes:
        max_turns: completions.
        max_tokens: all tokens, sampled or not.
        max_response_tokens: those after the first prompt; None for no bound of their own.
        may_branch: whether a turn that the template shows otherwise than it was sampled begins a new sequence, which
            ``max_tokens`` then bounds.
        max_images: that a turn sees.
    """

    max_turns: int
    max_tokens: int
    max_response_tokens: int | None = None
    may_branch: bool = False
    max_images: int = 0

    @classmethod
    def of(cls, config: TurnLimits, context_tokens: int, images: ImagesConfig | None = None) -> "Limits":
        """Read it from a spec."""
        most = min(config.max_tokens or context_tokens, context_tokens)
        max_images = 0 if images is None else images.max_per_prompt
        return cls(config.max_turns, most, config.max_response_tokens, config.history == "branch", max_images)


class MultiTurnEpisodes:
    """Answers a task with ``group_size`` episodes, and a greedy one where a baseline is wanted.

    Args:
        turns: how each turn is sampled.
        limits: of an episode.
        open_conversation: opens the other side of each.
        resume: which tokens of groups that were handed over may be kept.
        tally: counts special tokens in what is sampled for training.
        redundant: members that are played beside those of a training task's group.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: TurnRenderer,
        turns: Turns,
        limits: Limits,
        open_conversation: ConversationOpener,
        resume: ResumeRule,
        tally: SamplingTally | None = None,
        redundant: int = 0,
    ) -> None:
        self._redundant = redundant
        self._requests = Requests(engine)
        self._renderer = renderer
        self._turns = turns
        self._limits = limits
        self._open = open_conversation
        self._resume = resume
        self._tally = tally or SamplingTally()
        self.renders = RenderTally()
        self._interrupted = asyncio.Event()

    async def run(self, task: Task, partials: Partials = (), serving: int = 0, *, delivery: str = "") -> Group:
        """Sample the task's group; see ``Episodes.run``."""
        interrupted = self._interrupted
        had = [self._usable(task, member, serving) for member in partials]
        had += [None] * (task.group_size + self._turns.has_baseline(task) - len(had))
        unfinished = {index: each for index, each in enumerate(had) if each is None or not is_finished(each)}
        members: dict[int, asyncio.Task[Trajectory]] = {}
        for index, before in {**unfinished, **dict.fromkeys(self._surplus(task, partials))}.items():
            member = self._member(task, index, before, request_name(task, delivery), interrupted)
            members[index] = asyncio.create_task(member.play(), name=f"episode {task.group_id}.{index}")
        try:
            played = assigned(unfinished, await first_finished(members, unfinished, task.group_size), task.group_size)
        finally:
            # One that fails ends the group, and so the others.
            for each in members.values():
                each.cancel()
            await asyncio.gather(*members.values(), return_exceptions=True)
        trajectories = []
        for index, before in enumerate(had):
            made = played.get(index) or before
            assert made is not None
            made = made if index in played else replace(made, resumed_tokens=made.num_sampled)
            trajectories.append(made if index < task.group_size else replace(made, is_baseline=True))
        if task.pinned_version is None:
            self._count(task, trajectories)
        return Group(task, tuple(trajectories), prompt=await asyncio.to_thread(self._prompt, task, trajectories))

    async def interrupt(self) -> None:
        """End what is being sampled or waited for now: each ``run`` returns with what it has."""
        self._interrupted.set()
        self._interrupted = asyncio.Event()
        await self._requests.abort_all()

    def _surplus(self, task: Task, partials: Partials) -> range:
        """Number the redundant members: none of a group that continues, since each has a seed that its number makes."""
        first = task.group_size + 1
        is_wanted = task.pinned_version is None and not any(partials)
        return range(first, first + self._redundant if is_wanted else first)

    def _member(
        self, task: Task, index: int, before: Trajectory | None, request_id: str, interrupted: asyncio.Event
    ) -> Member:
        return Member(
            task=task,
            index=index,
            before=before,
            conversation=self._open(task, index),
            requests=self._requests,
            renderer=self._renderer,
            turns=self._turns,
            max_turns=self._limits.max_turns,
            max_tokens=self._limits.max_tokens,
            max_response_tokens=self._limits.max_response_tokens,
            may_branch=self._limits.may_branch,
            max_images=self._limits.max_images,
            request_id=request_id,
            rule=rule_of(task, self._resume),
            renders=self.renders,
            interrupted=interrupted,
            is_greedy=index == task.group_size,
        )

    def _usable(self, task: Task, member: Trajectory | None, serving: int) -> Trajectory | None:
        """Keep of a handed-over member what may still be trained; None begins it afresh."""
        if member is None or not member.num_sampled:
            return None
        rule, runs = rule_of(task, self._resume), member.versions
        oldest = min(version for _, version in runs)
        if oldest < task.min_version or serving - oldest > rule.max_lag:
            return None
        is_pinned = task.pinned_version is not None
        # Nothing is added to what is finished, so it mixes nothing.
        return member if (is_finished(member) and not is_pinned) or rule.allows(runs, serving) else None

    def _count(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        for number, trajectory in enumerate(trajectories):
            for turn in trajectory.turns:
                if number == 0 and turn.start == 0:
                    self._tally.add_prompt(first_prompt(self._renderer, trajectory, task))
                self._tally.add_completion(trajectory.token_ids[turn.sampled : turn.end])

    def _prompt(self, task: Task, trajectories: Sequence[Trajectory]) -> str:
        """Decode what the first turn began with; members may begin with different words, then the first counts."""
        shown = first_prompt(self._renderer, trajectories[0], task)
        return self._renderer.text(shown, with_special_tokens=True)


async def first_finished(
    members: Mapping[int, asyncio.Task[Trajectory]], needed: Collection[int], group_size: int
) -> dict[int, Trajectory]:
    """Wait until as many members are finished without an error as are needed, or all have ended.

    Args:
        members: tasks that play them, by number; ``group_size`` is that of the baseline, which is always waited for.
        needed: numbers of those that a group is made of.
        group_size: of the task.

    Returns:
        The trajectories of those that have ended, in the order of their ends.

    Raises:
        Exception: what a member's task failed with.
    """
    ended: dict[int, Trajectory] = {}
    count = sum(number != group_size for number in needed)
    waiting = {task: number for number, task in members.items()}
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda each: waiting[each]):
            ended[waiting.pop(task)] = task.result()
        good = sum(number != group_size and _is_good(each) for number, each in ended.items())
        if good >= count and (group_size in ended or group_size not in members):
            break
    return ended


def assigned(numbers: Iterable[int], ended: Mapping[int, Trajectory], group_size: int) -> dict[int, Trajectory]:
    """Choose a trajectory for each member of a group: its own if that is finished, else a redundant one.

    A member whose own has tokens to continue from is replaced by a finished one alone.
    """
    surplus = [each for number, each in ended.items() if number > group_size]
    good = [each for each in surplus if _is_good(each)]
    begun = [each for each in surplus if not is_finished(each) and each.num_sampled]
    chosen = {number: ended[number] for number in numbers if number in ended}
    for number in sorted({*numbers} - {group_size}):
        own = chosen.get(number)
        if own is not None and _is_good(own):
            continue
        if good:
            chosen[number] = good.pop(0)
        elif own is not None and not is_finished(own) and not own.num_sampled and begun:
            chosen[number] = begun.pop(0)
    return chosen


def _is_good(trajectory: Trajectory) -> bool:
    return is_finished(trajectory) and trajectory.status is not GradeStatus.ERROR
