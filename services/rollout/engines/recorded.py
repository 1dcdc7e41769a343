"""An engine without a model: it gives the completions of a dump again, with their lengths and log-probabilities.

For all that is around an engine: a fleet whose rollouts cost nothing, or take a given time for each token, and whose
answers are known. Tokens have the version that serves, as with any engine; their log-probabilities are the recorded.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.base import GenerationRequest
from flotilla.services.rollout.engines.scripted import ScriptedEngine, ScriptedSample
from flotilla.shared.errors import DataError, ModelError
from flotilla.shared.samples.dump import Dump, dump_at
from flotilla.shared.schemas.task import sample_seed
from flotilla.shared.schemas.trajectory import FinishReason, Group, Trajectory

ANY_TOKEN: Final = 1 << 31
"""Size of a vocabulary without bound: a prompt's tokens are not checked."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCompletion:
    """What was sampled behind a prompt.

    Attributes:
        token_ids: [N] int32, at least one.
        log_probs: [N] float32 nats, as recorded.
        finish_reason: stop or length.
        seed: that it was sampled with; None in later turns of an episode.
    """

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    seed: int | None


class Recordings:
    """The completions of a dump, by their prompts; all of them in memory."""

    def __init__(self) -> None:
        self._of_prompt: dict[bytes, list[RecordedCompletion]] = {}
        self._all: list[RecordedCompletion] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, group: Group) -> None:
        """Take the completions of a group."""
        for member, trajectory in enumerate(group.trajectories):
            for prompt, completion in _completions(trajectory, sample_seed(group.task.seed, member)):
                self._of_prompt.setdefault(_key(prompt), []).append(completion)
                self._all.append(completion)

    def of(self, prompt_ids: Sequence[int], seed: int) -> RecordedCompletion:
        """Choose what follows a prompt: of its own completions that of the seed, else one by the seed's number; where
        the prompt was never answered one of another.
        """
        own = self._of_prompt.get(_key(np.array(prompt_ids, np.int32)), self._all)
        return next((each for each in own if each.seed == seed), own[seed % len(own)])


class RecordedEngine(ScriptedEngine):
    """An ``Engine`` that answers out of a dump.

    Args:
        path: of the dump, as ``data.dump``.
        token_seconds: time that one token of every running sample takes.
        slots: completions that the batch holds.
        context_tokens: the longest prompt and completion together.
        check: called with the folder that is read; raises where that is not allowed.
    """

    def __init__(
        self,
        path: Path,
        *,
        token_seconds: float,
        slots: int,
        context_tokens: int,
        check: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(slots=slots, context_tokens=context_tokens, vocab_size=ANY_TOKEN, token_seconds=token_seconds)
        self._path = path
        self._check = check
        self._recordings = Recordings()

    async def start(self) -> None:
        """Read the dump and begin to work.

        Raises:
            ModelError: it cannot be read, or nothing was sampled in it.
        """
        try:
            self._recordings = await asyncio.to_thread(lambda: _read(dump_at(self._path, self._check, field="dump")))
        except DataError as error:
            raise ModelError(f"rollout.engine.recorded: {error.detail}") from error
        if not len(self._recordings):
            raise ModelError(f"rollout.engine.recorded: no token was sampled in {self._path}")
        await super().start()

    def _extend(self, request: GenerationRequest, sample: ScriptedSample) -> None:
        if sample.script is None:
            sample.script = self._recordings.of(request.prompt_ids, sample.seed)
        found = sample.script
        assert isinstance(found, RecordedCompletion)
        position, length = len(sample.tokens), found.token_ids.shape[0]
        if position < length:
            self._append(sample, int(found.token_ids[position]), float(found.log_probs[position]))
        if position + 1 >= length:
            sample.finish_reason = found.finish_reason
        elif position + 1 >= request.sampling.max_new_tokens:
            sample.finish_reason = FinishReason.LENGTH


def _read(dump: Dump) -> Recordings:
    recordings = Recordings()
    for index in range(len(dump)):
        recordings.add(dump.group(index))
    return recordings


def _key(prompt: npt.NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


def _completions(trajectory: Trajectory, seed: int) -> Iterator[tuple[npt.NDArray[np.int32], RecordedCompletion]]:
    """Go through what was sampled, each with all that the policy was shown before it."""
    begins = 0
    for start, end, shown, reason in _spans(trajectory):
        begins = begins if shown is None else shown
        ended = FinishReason.LENGTH if reason is FinishReason.LENGTH else FinishReason.STOP
        completion = RecordedCompletion(
            trajectory.token_ids[start:end].copy(),
            trajectory.log_probs[start:end].copy(),
            ended,
            seed if start == _first_sampled(trajectory) else None,
        )
        yield trajectory.token_ids[begins:start], completion


def _spans(trajectory: Trajectory) -> Iterator[tuple[int, int, int | None, FinishReason]]:
    """List where each sampled run begins and ends, where a prompt of its own begins before it, and why it ended."""
    if trajectory.turns:
        for turn in trajectory.turns:
            yield turn.sampled, turn.end, turn.start if turn.is_fresh else None, turn.finish_reason
        return
    edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(np.int8), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2).tolist():
        yield start, end, None, trajectory.finish_reason


def _first_sampled(trajectory: Trajectory) -> int:
    return int(np.argmax(trajectory.loss_mask))
