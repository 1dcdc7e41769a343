"""The trained samples of some groups, as tensors: tokens laid end to end, nothing padded.

A sequence is one scored trajectory, or a part of one whose turns have prompts of their own. Its *span* are the
positions from its first sampled token to its end: all that a loss can use. [T] tensors hold the spans of all
sequences one after another, [S] tensors one value per sequence.

A sequence without turns is one turn. Tokens that the policy was shown belong to the turn that follows them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages.agentic import EnvironmentSteps
from flotilla.services.trainer.algorithms.advantages.returns import rewards_at_last_token
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.data.illustrations import Illustration, illustration_of, with_images
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.prompt_image import within
from flotilla.shared.schemas.routing import Ids, RoutedExperts, RoutingSizes
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.schemas.turns import Turn
from flotilla.shared.vision.processor import ImageProcessor

TEMPERATURE = "rollout.sampling.temperature"


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Scored trajectories of whole groups, ready for advantages and losses.

    Attributes:
        token_ids: per sequence [L] int64, prompt included: what the model reads.
        span_starts: per sequence, the position of its first sampled token; L where none was sampled.
        group_ids: [S] int64, the task's id.
        group_index: [S] int64, number of the sequence's group in this batch, from 0.
        rewards: [S] float32.
        components: per sequence, what the reward was made of.
        sequences: which token of the spans belongs to which sequence, and which were sampled.
        positions: [T] int64, position of each token of the spans within its sequence.
        rollout_log_probs: [T] float32 nats, under the version that sampled the token; 0 where not sampled.
        versions: [T] int64, that version.
        turns: per sequence, its turns; empty for one prompt and one completion.
        baselines: [S] float32, reward of the group's greedy answer; None where no group has one.
        episode_index: [S] int64, number of the episode that a sequence is a branch or a part of, from 0; None where
            each is an episode of its own.
        teacher_log_probs: [T] float32 nats of teachers behind URLs, 0 where not sampled; None unless all samples have
            them.
        difficulty: [S] float32, of the tasks, from 0 to 1; None unless it weighs losses.
        illustrations: per sequence, its images, or None; None where no sequence has any.
        temperatures: per sequence, that it was sampled at where this is not the spec's, else None; None where none is.
        experts: per sequence, those of its first tokens [N, layers, top_k] that routers replay; None where
            they choose for themselves.
        data_sources: per sequence, that of its task.
    """

    token_ids: tuple[npt.NDArray[np.int64], ...]
    span_starts: tuple[int, ...]
    group_ids: Tensor
    group_index: Tensor
    rewards: Tensor
    components: tuple[Mapping[str, float], ...]
    sequences: PackedSequences
    positions: Tensor
    rollout_log_probs: Tensor
    versions: Tensor
    turns: tuple[tuple[Turn, ...], ...]
    baselines: Tensor | None = None
    episode_index: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    difficulty: Tensor | None = None
    illustrations: tuple[Illustration | None, ...] | None = None
    temperatures: tuple[float | None, ...] | None = None
    experts: tuple[Ids, ...] | None = None
    data_sources: tuple[str | None, ...] = ()

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.token_ids)

    @property
    def num_groups(self) -> int:
        """Groups that have a scored trajectory."""
        return int(self.group_index[-1]) + 1

    @property
    def span_lengths(self) -> list[int]:
        """Tokens in the span of each sequence."""
        return [len(ids) - start for ids, start in zip(self.token_ids, self.span_starts, strict=True)]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.sequences.response_mask.sum())

    def take(self, members: Tensor) -> tuple["TrainingBatch", Tensor]:
        """Make a batch of some sequences, in this order and as often as they are named.

        Args:
            members: [S'] int64, numbers of sequences of this batch.

        Returns:
            The batch, and for each of its span tokens [T'] int64 the token of this batch that it is.
        """
        spans = torch.tensor(self.span_lengths, device=members.device)
        taken, starts = spans[members], (spans.cumsum(0) - spans)[members]
        index = torch.arange(len(members), device=members.device).repeat_interleave(taken)
        within = torch.arange(len(index), device=members.device) - (taken.cumsum(0) - taken)[index]
        tokens = starts[index] + within
        numbers = members.tolist()
        shares = _taken(self.sequences.shares, members)
        made = TrainingBatch(
            token_ids=tuple(self.token_ids[number] for number in numbers),
            span_starts=tuple(self.span_starts[number] for number in numbers),
            group_ids=self.group_ids[members],
            group_index=self.group_index[members],
            rewards=self.rewards[members],
            components=tuple(self.components[number] for number in numbers),
            sequences=PackedSequences(index, self.sequences.response_mask[tokens], len(numbers), shares),
            positions=self.positions[tokens],
            rollout_log_probs=self.rollout_log_probs[tokens],
            versions=self.versions[tokens],
            turns=tuple(self.turns[number] for number in numbers),
            baselines=_taken(self.baselines, members),
            episode_index=_taken(self.episode_index, members),
            teacher_log_probs=_taken(self.teacher_log_probs, tokens),
            difficulty=_taken(self.difficulty, members),
            illustrations=None if (shown := self.illustrations) is None else tuple(shown[number] for number in numbers),
            temperatures=None if (known := self.temperatures) is None else tuple(known[number] for number in numbers),
            experts=None if (told := self.experts) is None else tuple(told[number] for number in numbers),
            data_sources=tuple(self.data_sources[number] for number in numbers),
        )
        return made, tokens

    def to(self, device: torch.device) -> "TrainingBatch":
        """Move the tensors."""
        if device.type == "cpu":
            return self
        laid = self.sequences
        shares = None if laid.shares is None else laid.shares.to(device)
        moved = PackedSequences(laid.index.to(device), laid.response_mask.to(device), laid.count, shares)
        return TrainingBatch(
            self.token_ids,
            self.span_starts,
            self.group_ids.to(device),
            self.group_index.to(device),
            self.rewards.to(device),
            self.components,
            moved,
            self.positions.to(device),
            self.rollout_log_probs.to(device),
            self.versions.to(device),
            self.turns,
            None if self.baselines is None else self.baselines.to(device),
            None if self.episode_index is None else self.episode_index.to(device),
            None if self.teacher_log_probs is None else self.teacher_log_probs.to(device),
            None if self.difficulty is None else self.difficulty.to(device),
            self.illustrations,
            self.temperatures,
            self.experts,
            self.data_sources,
        )


def scored_trajectories(group: Group) -> tuple[Trajectory, ...]:
    """List the members to train: an abstention or a failed grade is not a sample of reward 0, a baseline is none."""
    return tuple(
        t for t in group.trajectories if t.status is GradeStatus.SCORED and t.reward is not None and not t.is_baseline
    )


def episodes_of(trajectories: Sequence[Trajectory]) -> list[int]:
    """Number the episodes of a group's trajectories, from 0; one that names none is an episode of its own."""
    numbers: dict[object, int] = {}
    named = [at if each.episode is None else each.episode for at, each in enumerate(trajectories)]
    return [numbers.setdefault(name, len(numbers)) for name in named]


def baseline_of(group: Group) -> float | None:
    """Return the reward of the group's greedy answer; None without one that has a reward."""
    return next((t.reward for t in group.trajectories if t.is_baseline), None)


def check_group(group: Group, vocabulary: int) -> None:
    """Hold a group against what the model can read.

    Raises:
        DataError: a token id outside the vocabulary, or a sampled token without anything before it.
    """
    for trajectory in scored_trajectories(group):
        ids = trajectory.token_ids
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise DataError(f"group {group.task.group_id} has a token id outside the model's {vocabulary} tokens")
        if trajectory.loss_mask[0]:
            raise DataError(f"group {group.task.group_id} has a trajectory without a prompt")


def make_batch(
    groups: Sequence[Group],
    *,
    joins_branches: bool = False,
    difficulty: str | None = None,
    processor: ImageProcessor | None = None,
    replays_engine: bool = False,
) -> TrainingBatch:
    """Lay the scored trajectories of groups end to end, in order.

    Args:
        groups: whole ones.
        joins_branches: whether the trajectories of one episode count as one.
        difficulty: column of the dataset with each task's difficulty, if losses are weighed by it.
        processor: of images; None where prompts have none.
        replays_engine: whether routers replay the experts that the engine chose; no other record is read.

    Raises:
        ValueError: no group has a scored trajectory.
        DataError: a task's column is no number, its images have other tokens, or its experts cannot be used.
    """
    members = [
        (number, group, piece)
        for number, group in enumerate(groups)
        for trajectory in scored_trajectories(group)
        for piece in _sequences(group, trajectory if replays_engine else replace(trajectory, experts=None), processor)
    ]
    if not members:
        raise ValueError("a batch needs at least one scored trajectory")
    trajectories = [trajectory for _, _, trajectory in members]
    baselines = [baseline_of(group) for _, group, _ in members]
    episodes, shares = _episodes(groups) if joins_branches else (_wholes(groups), None)
    starts = tuple(_span_start(trajectory) for trajectory in trajectories)
    cuts = list(zip(trajectories, starts, strict=True))
    shown = tuple(illustration_of(t, processor) for t in trajectories)
    temperatures = tuple(group.task.settings.get(TEMPERATURE) for _, group, _ in members)
    mask = torch.from_numpy(np.concatenate([t.loss_mask[start:].astype(bool) for t, start in cuts]))
    index = torch.from_numpy(np.repeat(np.arange(len(members)), [t.token_ids.shape[0] - n for t, n in cuts]))
    log_probs = torch.from_numpy(np.concatenate([t.log_probs[start:].astype(np.float32) for t, start in cuts]))
    return TrainingBatch(
        token_ids=tuple(t.token_ids.astype(np.int64) for t in trajectories),
        span_starts=starts,
        group_ids=torch.tensor([group.task.group_id for _, group, _ in members]),
        group_index=torch.tensor([number for number, _, _ in members]),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        components=tuple(dict(t.components) for t in trajectories),
        sequences=PackedSequences(index, mask, len(members), shares),
        positions=torch.from_numpy(np.concatenate([np.arange(start, t.token_ids.shape[0]) for t, start in cuts])),
        rollout_log_probs=torch.where(mask, log_probs, 0.0),
        versions=torch.from_numpy(np.concatenate([t.token_versions()[start:] for t, start in cuts])),
        turns=tuple(t.turns for t in trajectories),
        baselines=None if None in baselines else torch.tensor(baselines, dtype=torch.float32),
        episode_index=episodes,
        teacher_log_probs=_teacher_log_probs(cuts, mask),
        difficulty=_difficulties([group for _, group, _ in members], difficulty),
        illustrations=shown if any(shown) else None,
        temperatures=None if all(each is None for each in temperatures) else temperatures,
        experts=tuple(experts_of(each) for each in trajectories) if replays_engine else None,
        data_sources=tuple(group.task.data_source for _, group, _ in members),
    )


def _sequences(group: Group, trajectory: Trajectory, processor: ImageProcessor | None) -> list[Trajectory]:
    """Cut a trajectory into what is trained as a sequence each, with its images."""
    return pieces(with_images(group, trajectory, processor))


def experts_of(trajectory: Trajectory, sizes: RoutingSizes | None = None) -> Ids:
    """Read the experts that the engine chose for a trajectory's tokens: [T - 1, layers, top_k].

    Args:
        sizes: that they must have; None: any.

    Raises:
        DataError: there are none, they are a model's of other sizes, or they are not what they say.
    """
    found = trajectory.experts
    if found is None:
        raise DataError("a trajectory came without the experts that algorithm.router_replay R3 replays")
    if sizes is not None and found.sizes != sizes:
        raise DataError(f"a trajectory's experts are {found.sizes}, and the model has {sizes}")
    try:
        return found.ids()
    except ValueError as error:
        raise DataError(f"a trajectory's {error}") from error


def _difficulties(groups: Sequence[Group], column: str | None) -> Tensor | None:
    """Read the difficulty of each sequence's task; None if it is not used."""
    return None if column is None else torch.tensor([_difficulty(each, column) for each in groups])


def _difficulty(group: Group, column: str) -> float:
    found = group.task.metadata.get(column)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise DataError(
            f"algorithm.sequence_weights.difficulty names the column {column}, which is {found!r} for task "
            f"{group.task.group_id}: it must be a number"
        )
    return float(found)


def _teacher_log_probs(cuts: Sequence[tuple[Trajectory, int]], mask: Tensor) -> Tensor | None:
    """Lay a teacher's log-probs of the spans end to end; None unless every trajectory has some."""
    spans = [each.teacher_log_probs[start:] for each, start in cuts if each.teacher_log_probs is not None]
    if len(spans) < len(cuts):
        return None
    return torch.where(mask, torch.from_numpy(np.concatenate(spans).astype(np.float32)), 0.0)


def _episodes(groups: Sequence[Group]) -> tuple[Tensor | None, Tensor | None]:
    """Number the episodes of all scored trajectories, and share 1 among those of each; None where none has two."""
    numbers: list[int] = []
    count = 0
    for group in groups:
        found = episodes_of(scored_trajectories(group))
        numbers += [count + number for number in found]
        count += len(set(found))
    index = torch.tensor(numbers)
    sizes = torch.bincount(index)
    return (None, None) if len(sizes) == len(index) else (index, 1.0 / sizes[index])


def _wholes(groups: Sequence[Group]) -> Tensor | None:
    """Number the trajectories that the sequences are parts of; None where each is a whole one."""
    counts = [len(piece_starts(each)) for group in groups for each in scored_trajectories(group)]
    if max(counts) == 1:
        return None
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def _taken(values: Tensor | None, members: Tensor) -> Tensor | None:
    return None if values is None else values[members]


def _span_start(trajectory: Trajectory) -> int:
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(sampled[0]) if sampled.size else int(trajectory.token_ids.shape[0])


@dataclass(frozen=True, eq=False)
class TurnLayout:
    """N turns of the batch's S sequences, in order.

    Attributes:
        sequences: the batch's span tokens [T], each turn a sequence of its own.
        owner: [N] int64, the sequence of each turn.
        episode: [N] int64, the episode of each turn; the sequence's number where each is an episode of its own.
        place: [N] int64, its place among that episode's turns.
        rewards: [N] float32, what the environment gave; 0 where nothing did.
        states: [N] int64, the state that the turn began in; a number of its own where none is known.
    """

    sequences: PackedSequences
    owner: Tensor
    episode: Tensor
    place: Tensor
    rewards: Tensor
    states: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch) -> "TurnLayout":
        """Lay out a batch's turns, on its device."""
        device = batch.rewards.device
        owner: list[int] = []
        rewards: list[float] = []
        states: list[int] = []
        numbers = []
        for sequence, turns in enumerate(batch.turns):
            start, length = batch.span_starts[sequence], len(batch.token_ids[sequence])
            ends = np.array([turn.end for turn in turns] or [length])
            numbers.append(len(owner) + np.searchsorted(ends, np.arange(start, length), side="right"))
            for at in range(len(ends)):
                reward, state = (turns[at].reward, turns[at].state) if turns else (None, None)
                rewards.append(reward or 0.0)
                # Negative numbers are unused: states are not negative.
                states.append(-1 - len(states) if state is None else state)
                owner.append(sequence)
        owners = torch.tensor(owner, device=device)
        episode = owners if batch.episode_index is None else batch.episode_index[owners]
        # Turns of an episode follow each other: the first one's number is where its episode begins.
        place = torch.arange(len(owners), device=device) - torch.searchsorted(episode, episode)
        index = torch.from_numpy(np.concatenate(numbers)).to(device)
        return cls(
            PackedSequences(index, batch.sequences.response_mask, len(owner)),
            owners,
            episode,
            place,
            torch.tensor(rewards, dtype=torch.float32, device=device),
            torch.tensor(states, dtype=torch.int64, device=device),
        )


def turn_rewards(batch: TrainingBatch, weight: float) -> Tensor | None:
    """Put the environment's rewards, weighted, where they were earned: [T]; None if there are none."""
    if not weight or not any(turn.reward for turns in batch.turns for turn in turns):
        return None
    layout = TurnLayout.of(batch)
    return rewards_at_last_token(weight * layout.rewards, layout.sequences)


def environment_steps(batch: TrainingBatch, layout: TurnLayout, weight: float) -> EnvironmentSteps:
    """Make each turn a step, whose score is its weighted reward; what else an episode's reward has, its last turn gets.

    Args:
        batch: the sequences.
        layout: their turns.
        weight: of the environment's rewards in the reward.
    """
    scores = weight * layout.rewards
    earned = torch.zeros_like(batch.rewards).index_add(0, layout.episode, scores)
    is_last = torch.ones_like(layout.owner, dtype=torch.bool)
    is_last[:-1] = layout.episode[1:] != layout.episode[:-1]
    rest = batch.rewards[layout.owner] - earned[layout.episode]
    return EnvironmentSteps(
        step_scores=scores + torch.where(is_last, rest, 0.0),
        trajectory_index=layout.episode,
        step_index=layout.place,
        state_index=layout.states,
        episode_scores=batch.rewards[layout.owner],
    )


def piece_starts(trajectory: Trajectory) -> list[int]:
    """Return where each sequence begins in the trajectory's tokens, the first at 0."""
    return [0, *(turn.start for turn in trajectory.turns[1:] if turn.is_fresh)]


def pieces(trajectory: Trajectory) -> list[Trajectory]:
    """Cut a trajectory before each prompt that stands alone; each part has the reward of the whole."""
    starts = piece_starts(trajectory)
    if len(starts) == 1:
        return [trajectory]
    ends = [*starts[1:], trajectory.token_ids.shape[0]]
    spans = list(zip(starts, ends, strict=True))
    routed: list[RoutedExperts | None] = [None] * len(spans)
    if trajectory.experts is not None:
        routed = [*trajectory.experts.parts([(start, end - 1) for start, end in spans])]
    return [_part(trajectory, *span, experts) for span, experts in zip(spans, routed, strict=True)]


def _part(whole: Trajectory, start: int, end: int, experts: RoutedExperts | None) -> Trajectory:
    taught = whole.teacher_log_probs
    before = [version for at, version in whole.versions if at <= start]
    return replace(
        whole,
        token_ids=whole.token_ids[start:end],
        loss_mask=whole.loss_mask[start:end],
        log_probs=whole.log_probs[start:end],
        versions=((0, before[-1]), *((at - start, version) for at, version in whole.versions if start < at < end)),
        turns=tuple(
            replace(turn, start=turn.start - start, sampled=turn.sampled - start, end=turn.end - start)
            for turn in whole.turns
            if start <= turn.start < end
        ),
        teacher_log_probs=None if taught is None else taught[start:end],
        experts=experts,
        images=within(whole.images, start, end),
    )
