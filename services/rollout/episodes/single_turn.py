"""One prompt, one completion: the simplest episode. Tokens are appended, never re-made."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.rollout.engines.base import Completion, Engine, GenerationRequest, SamplingParameters
from services.rollout.episodes.rendering import Renderer
from shared.config.rollout import SamplingConfig
from shared.prompts import PromptLimit
from shared.schemas.task import Task, sample_seed
from shared.schemas.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Upper bounds on sampled tokens per turn, for training and for evaluation, and on those of a prompt."""

    train: int
    evaluation: int
    prompt: PromptLimit = field(default_factory=PromptLimit)


class SingleTurnEpisodes:
    """Answers a task with ``group_size`` completions of its prompt."""

    def __init__(self, engine: Engine, renderer: Renderer, sampling: SamplingConfig, limits: TurnLimits) -> None:
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._limits = limits

    async def run(self, task: Task) -> Group:
        """Sample the task's group.

        Raises:
            InvalidRequest: the prompt is longer than the spec allows and not to be cut, or does not fit the engine's
                context together with a completion.
            WorkerDied: the engine's process ended.
        """
        started = time.perf_counter()
        prompt_ids = self._limits.prompt.fit(self._renderer.prompt_ids(task.messages))
        request = GenerationRequest(
            request_id=f"{'e' if task.pinned_version is not None else 't'}{task.group_id}",
            prompt_ids=prompt_ids,
            seeds=tuple(sample_seed(task.seed, index) for index in range(task.group_size)),
            sampling=self._parameters(task),
            holds_weights=task.pinned_version is not None,
        )
        completions = await self._engine.generate(request)
        seconds = time.perf_counter() - started
        trajectories = tuple(self._trajectory(prompt_ids, each, seconds) for each in completions)
        return Group(task, trajectories, prompt=self._renderer.text(prompt_ids, with_special_tokens=True))

    def _parameters(self, task: Task) -> SamplingParameters:
        is_evaluation = task.pinned_version is not None
        return SamplingParameters(
            max_new_tokens=self._limits.evaluation if is_evaluation else self._limits.train,
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            greedy=task.greedy,
            stop_token_ids=() if self._sampling.ignore_eos else self._renderer.stop_token_ids,
            stop=self._sampling.stop,
            ignore_eos=self._sampling.ignore_eos,
        )

    def _trajectory(self, prompt_ids: Sequence[int], completion: Completion, seconds: float) -> Trajectory:
        num_prompt, num_sampled = len(prompt_ids), completion.token_ids.shape[0]
        token_ids = np.concatenate([np.asarray(prompt_ids, dtype=np.int32), completion.token_ids])
        mask = np.zeros(num_prompt + num_sampled, dtype=np.uint8)
        mask[num_prompt:] = 1
        log_probs = np.zeros(num_prompt + num_sampled, dtype=np.float32)
        log_probs[num_prompt:] = completion.log_probs
        shifted = [(start + num_prompt if start else 0, version) for start, version in completion.versions]
        return Trajectory(
            token_ids=token_ids,
            loss_mask=mask,
            log_probs=log_probs,
            versions=tuple(shifted),
            finish_reason=completion.finish_reason,
            text=self._renderer.text(completion.token_ids.tolist()),
            timings={"generation_seconds": seconds},
        )
