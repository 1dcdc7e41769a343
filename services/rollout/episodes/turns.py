"""How turns are sampled, and the requests that sample them."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from flotilla.services.rollout.engines.base import Completion, Engine, GenerationRequest, SamplingParameters
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError
from flotilla.shared.models.prompts import PromptLimit
from flotilla.shared.schemas.task import Task

GENERATION_SECONDS = "generation_seconds"
SAMPLING = "rollout.sampling."


@dataclass(frozen=True, slots=True)
class Turns:
    """How a turn is sampled, in training and in evaluation, and how long its prompt may be.

    ``greedy_baseline``: whether each training task is answered greedily once more than its group size says.
    """

    train: SamplingConfig
    evaluation: SamplingConfig
    prompt: PromptLimit = field(default_factory=PromptLimit)
    greedy_baseline: bool = False

    @classmethod
    def of(cls, spec: ExperimentSpec) -> Self:
        """Read it from a spec."""
        training = spec.rollout.sampling
        return cls(
            train=training,
            evaluation=spec.evaluation.sampling(training) if spec.evaluation else training,
            prompt=PromptLimit.of(spec),
            greedy_baseline=spec.algorithm.advantage.kind == "remax",
        )

    def has_baseline(self, task: Task) -> bool:
        """Whether a greedy answer belongs to the task's group."""
        return self.greedy_baseline and task.pinned_version is None

    def sampling_of(self, task: Task) -> SamplingConfig:
        """Choose the spec's settings for a task's turns; in training, with what was changed before it was issued."""
        if task.pinned_version is not None:
            return self.evaluation
        changed = {path[len(SAMPLING) :]: v for path, v in task.settings.items() if path.startswith(SAMPLING)}
        return self.train.model_copy(update=changed) if changed else self.train

    def parameters(
        self, task: Task, stop_token_ids: tuple[int, ...], *, greedy: bool = False, most: int | None = None
    ) -> SamplingParameters:
        """Make the engine's sampling parameters for a turn, with ``most`` tokens at the most."""
        sampling = self.sampling_of(task)
        max_new_tokens = sampling.max_new_tokens
        return SamplingParameters(
            max_new_tokens=max_new_tokens if most is None else min(max_new_tokens, most),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            **sampling.rarer,
            greedy=greedy or task.greedy,
            stop_token_ids=() if sampling.ignore_eos else stop_token_ids,
            stop=sampling.stop,
            ignore_eos=sampling.ignore_eos,
        )


class Requests:
    """The engine's requests of a session's episodes, which an interruption ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight: set[str] = set()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample; see ``Engine.generate``."""
        self._in_flight.add(request.request_id)
        try:
            return await self._engine.generate(request)
        finally:
            self._in_flight.discard(request.request_id)

    async def abort_all(self) -> None:
        """End all that are in flight, at once: each returns with what it has."""
        await asyncio.gather(*map(self._abort, list(self._in_flight)))

    async def _abort(self, request_id: str) -> None:
        # An engine that has died reports it to its waiters.
        with contextlib.suppress(FlotillaError):
            await self._engine.abort(request_id)


def request_name(task: Task, delivery: str) -> str:
    """Name the requests of one delivery of a task."""
    return f"{'e' if task.pinned_version is not None else 't'}{task.group_id}-{delivery}"
