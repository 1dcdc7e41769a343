"""One prompt, one completion: the simplest episode. Tokens are appended, never re-made.

A group that was handed over continues from what it has: finished members stay, the others are resumed.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from flotilla.services.rollout.engines.base import Completion, Engine, GenerationRequest, PromptImage, ResumeRule
from flotilla.services.rollout.engines.requests import condensed
from flotilla.services.rollout.episodes.rendering import Renderer, opened
from flotilla.services.rollout.episodes.resumption import Begun, begun, rule_of
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.episodes.turns import GENERATION_SECONDS, Requests, Turns, request_name
from flotilla.shared.concurrency.cancelling import all_of
from flotilla.shared.schemas.task import Task, sample_seed
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.streams.partials import Partials

FEW_TOKENS = 1024
"""So many are made text in about a millisecond: not much longer than it takes to have a thread do it."""


class SingleTurnEpisodes:
    """Answers a task with ``group_size`` completions of its prompt, and a greedy one where a baseline is wanted.

    Args:
        turns: how they are sampled.
        resume: which tokens of groups that were handed over may be kept.
        tally: counts special tokens in what is sampled for training.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        turns: Turns,
        resume: ResumeRule,
        tally: SamplingTally | None = None,
    ) -> None:
        self._tally = tally or SamplingTally()
        self._requests = Requests(engine)
        self._renderer = renderer
        self._turns = turns
        self._resume = resume

    async def run(self, task: Task, partials: Partials = (), serving: int = 0, *, delivery: str = "") -> Group:
        """Sample the task's group; see ``Episodes.run``."""
        started = time.perf_counter()
        # Long texts take the tokenizer longer than health and leases may wait for the loop.
        prompt_ids, images = await asyncio.to_thread(opened, self._renderer, task, task.shown_messages)
        prompt_ids = self._turns.prompt.fit(prompt_ids, has_images=bool(images))
        num_members = task.group_size + self._turns.has_baseline(task)
        max_new_tokens = self._turns.sampling_of(task).max_new_tokens
        had = begun(task, partials, prompt_ids, rule_of(task, self._resume), serving, max_new_tokens)
        wanted = [index for index in range(num_members) if index not in had.finished]
        completions = await self._complete(task, request_name(task, delivery), prompt_ids, images, had, wanted)
        if task.pinned_version is None:
            self._tally.add_prompt(condensed(prompt_ids, images))
            for completion in completions:
                self._tally.add_completion(completion.token_ids)
        seconds = time.perf_counter() - started
        answered = dict(zip(wanted, completions, strict=True))
        shown = condensed(prompt_ids, images)
        make = partial(self._group, task, prompt_ids, shown, had, answered, partials, seconds)
        num_tokens = len(shown) + sum(completion.token_ids.size for completion in completions)
        return make() if num_tokens <= FEW_TOKENS else await asyncio.to_thread(make)

    async def interrupt(self) -> None:
        """End what is being sampled now: each ``run`` returns with what it has."""
        await self._requests.abort_all()

    async def _complete(
        self,
        task: Task,
        request_id: str,
        prompt_ids: tuple[int, ...],
        images: tuple[PromptImage, ...],
        had: Begun,
        wanted: Sequence[int],
    ) -> Sequence[Completion]:
        """Sample the wanted members; the one behind the group, if any, is answered greedily."""
        parts = []
        for greedy in (False, True):
            members = [index for index in wanted if (index >= task.group_size) is greedy]
            if not members:
                continue
            request = GenerationRequest(
                request_id=request_id + ("-greedy" if greedy else ""),
                prompt_ids=prompt_ids,
                seeds=tuple(sample_seed(task.seed, index) for index in members),
                sampling=self._turns.parameters(task, self._renderer.stop_token_ids, greedy=greedy),
                holds_weights=task.pinned_version is not None,
                prefixes=tuple(had.prefixes.get(index) for index in members) if had.prefixes else (),
                resume=rule_of(task, self._resume),
                images=images,
            )
            parts.append(self._requests.generate(request))
        return [completion for part in await all_of(parts) for completion in part]

    def _group(
        self,
        task: Task,
        prompt_ids: tuple[int, ...],
        shown: tuple[int, ...],
        had: Begun,
        completions: Mapping[int, Completion],
        partials: Partials,
        seconds: float,
    ) -> Group:
        members = {index: replace(each, resumed_tokens=each.num_sampled) for index, each in had.finished.items()}
        for index, completion in completions.items():
            before = partials[index] if partials and completion.num_resumed else None
            spent = seconds + (before.timings.get(GENERATION_SECONDS, 0.0) if before is not None else 0.0)
            made = self._trajectory(prompt_ids, completion, spent)
            members[index] = made if index < task.group_size else replace(made, is_baseline=True)
        trajectories = tuple(members[index] for index in range(len(members)))
        return Group(task, trajectories, prompt=self._renderer.text(shown, with_special_tokens=True))

    def _trajectory(self, prompt_ids: Sequence[int], completion: Completion, seconds: float) -> Trajectory:
        num_prompt, num_sampled = len(prompt_ids), completion.token_ids.shape[0]
        token_ids = np.concatenate([np.asarray(prompt_ids, dtype=np.int32), completion.token_ids])
        mask = np.zeros(num_prompt + num_sampled, dtype=np.uint8)
        mask[num_prompt:] = 1
        log_probs = np.zeros(num_prompt + num_sampled, dtype=np.float32)
        log_probs[num_prompt:] = completion.log_probs
        # A completion without a token has no version; such a trajectory is never forwarded.
        runs = completion.versions or ((0, 0),)
        shifted = [(start + num_prompt if start else 0, version) for start, version in runs]
        return Trajectory(
            token_ids=token_ids,
            loss_mask=mask,
            log_probs=log_probs,
            versions=tuple(shifted),
            finish_reason=completion.finish_reason,
            text=self._renderer.text(completion.token_ids.tolist()),
            timings={GENERATION_SECONDS: seconds},
            resumed_tokens=completion.num_resumed,
            experts=completion.experts,
        )
