"""The running batch: which sample is in which row, and what each has sampled.

State is kept in arrays over rows, so that one step costs a few array operations whatever the number of rows; Python
touches a sample only when it joins, finishes or checks stop strings. A row without a sample is computed along with the
others and ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engines.base import Completion, GenerationRequest
from services.rollout.engines.sampling import RowSampling, seed_keys, uniforms
from services.rollout.engines.stop_text import StopText
from shared.schemas.trajectory import FinishReason

NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that the engine has accepted.

    Attributes:
        request: what was asked.
        stop_ids: tokens that end its completions, the model's own included unless ignored.
        stop_text: its stop strings, or None.
        admitted: how many of its seeds have joined the batch.
        completions: one per seed, None while unfinished.
    """

    request: GenerationRequest
    stop_ids: tuple[int, ...]
    stop_text: StopText | None
    admitted: int = 0
    completions: list[Completion | None] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Count the seeds that have not joined the batch."""
        return len(self.request.seeds) - self.admitted

    @property
    def is_finished(self) -> bool:
        """Tell whether every seed has its completion."""
        return all(completion is not None for completion in self.completions)


@dataclass(slots=True, eq=False)
class Sample:
    """One seed of a request, in a row; ``runs`` are its run-length versions."""

    owner: ActiveRequest
    index: int
    runs: list[tuple[int, int]]


class Batch:
    """Rows of samples, at most ``num_slots``.

    Args:
        num_slots: the most rows.
        context_tokens: the longest prompt and completion together.
        vocab_size: of the model.
        device: of the tensors that it hands to the sampler.
    """

    def __init__(self, num_slots: int, context_tokens: int, vocab_size: int, device: torch.device) -> None:
        self.samples: list[Sample | None] = [None] * num_slots
        self.num_rows = 0
        """Rows in use: every live sample lies below."""
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        """Cached tokens: prompt and completion without the last sampled token."""
        self.last_tokens = np.zeros(num_slots, dtype=np.int64)
        self.counts = np.zeros(num_slots, dtype=np.int64)
        self._vocab_size = vocab_size
        self._device = device
        self._is_alive = np.zeros(num_slots, dtype=np.bool_)
        self._limits = np.zeros(num_slots, dtype=np.int64)
        self._keys = np.zeros(num_slots, dtype=np.uint64)
        self._stop_ids = np.full((num_slots, 1), NO_TOKEN, dtype=np.int64)
        self._has_stop_text = np.zeros(num_slots, dtype=np.bool_)
        self._token_ids = np.empty((num_slots, context_tokens), dtype=np.int32)
        self._log_probs = np.empty((num_slots, context_tokens), dtype=np.float32)
        self._places = np.arange(num_slots)
        self._sampling: RowSampling | None = None

    @property
    def num_running(self) -> int:
        """Count the live samples."""
        return int(self._is_alive.sum())

    def alive(self) -> npt.NDArray[np.int64]:
        """List the rows that hold a sample."""
        return np.flatnonzero(self._is_alive)

    def free_rows(self, num: int) -> list[int]:
        """Find ``num`` rows to join, the lowest first."""
        return [int(row) for row in np.flatnonzero(~self._is_alive)[:num]]

    def join(self, row: int, owner: ActiveRequest, index: int, version: int) -> None:
        """Put one seed of a request into a free row; its prompt is cached and nothing is sampled yet."""
        request, sampling = owner.request, owner.request.sampling
        self.samples[row] = Sample(owner, index, [(0, version)])
        self.num_rows = max(self.num_rows, row + 1)
        self.lengths[row] = len(request.prompt_ids)
        self.counts[row] = 0
        self._is_alive[row] = True
        self._limits[row] = sampling.max_new_tokens
        self._keys[row] = seed_keys(np.array([request.seeds[index]], dtype=np.uint64))[0]
        if len(owner.stop_ids) > self._stop_ids.shape[1]:
            more = len(owner.stop_ids) - self._stop_ids.shape[1]
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        self._stop_ids[row] = NO_TOKEN
        self._stop_ids[row, : len(owner.stop_ids)] = owner.stop_ids
        self._has_stop_text[row] = owner.stop_text is not None
        self._sampling = None

    def draws(self, rows: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.float64]:
        """Draw the random number of each row's next token."""
        return uniforms(self._keys[rows], self.counts[rows])

    def record(
        self,
        rows: npt.NDArray[np.int64] | slice,
        token_ids: npt.NDArray[np.int64],
        log_probs: npt.NDArray[np.float32],
    ) -> list[int]:
        """Append a sampled token to rows.

        Returns:
            The rows whose completion ended by it.
        """
        counts, alive = self.counts[rows], self._is_alive[rows]
        self._token_ids[self._places[rows], counts] = token_ids
        self._log_probs[self._places[rows], counts] = log_probs
        self.last_tokens[rows] = token_ids
        self.counts[rows] = counts + alive
        ended = self._stops(rows, token_ids) | (self.counts[rows] >= self._limits[rows])
        ended &= alive
        if self._has_stop_text.any():
            ended |= self._ends_with_text(rows)
        if not ended.any():
            return []
        return [int(row) for row in self._places[rows][ended]]

    def _stops(self, rows: npt.NDArray[np.int64] | slice, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if self._stop_ids.shape[1] == 1:
            only: npt.NDArray[np.bool_] = self._stop_ids[rows, 0] == token_ids
            return only
        stops: npt.NDArray[np.bool_] = (self._stop_ids[rows] == token_ids[:, None]).any(axis=1)
        return stops

    def _ends_with_text(self, rows: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.bool_]:
        return np.array([self._text_stops(int(row)) for row in self._places[rows]], dtype=np.bool_)

    def _text_stops(self, row: int) -> bool:
        sample = self.samples[row]
        if sample is None or sample.owner.stop_text is None:
            return False
        return sample.owner.stop_text.ends(self._token_ids[row, : self.counts[row]])

    def completed(self, row: int) -> FinishReason:
        """Say why a row that ``record`` reported has ended."""
        last = self.last_tokens[row]
        stopped = (self._stop_ids[row] == last).any() or self._text_stops(row)
        return FinishReason.STOP if stopped else FinishReason.LENGTH

    def has_finite_log_prob(self, row: int) -> bool:
        """Tell whether the last log-probability of a row is finite."""
        return bool(np.isfinite(self._log_probs[row, self.counts[row] - 1]))

    def leave(self, row: int, reason: FinishReason) -> Sample:
        """Take a sample out of its row and give its owner the completion."""
        sample, count = self.samples[row], int(self.counts[row])
        assert sample is not None
        sample.owner.completions[sample.index] = Completion(
            token_ids=self._token_ids[row, :count].copy(),
            log_probs=self._log_probs[row, :count].copy(),
            versions=tuple(run for run in sample.runs if run[0] < count),
            finish_reason=reason,
        )
        self._vacate(row)
        self._shrink()
        return sample

    def _vacate(self, row: int) -> None:
        self.samples[row] = None
        self._is_alive[row] = False
        self._has_stop_text[row] = False
        self._stop_ids[row] = NO_TOKEN
        self.lengths[row] = self.counts[row] = self.last_tokens[row] = 0
        self._sampling = None

    def _shrink(self) -> None:
        alive = self.alive()
        self.num_rows = int(alive[-1]) + 1 if alive.size else 0

    def compaction(self) -> tuple[list[int], list[int]]:
        """Plan to move the highest rows into the free ones below: (sources, targets)."""
        alive = self.alive()
        targets = np.flatnonzero(~self._is_alive[: alive.size])
        sources = alive[alive >= alive.size]
        return [int(row) for row in sources], [int(row) for row in targets]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move samples to free rows, as ``compaction`` planned."""
        for source, target in zip(sources, targets, strict=True):
            for per_row in (self.lengths, self.last_tokens, self.counts, self._is_alive, self._limits, self._keys):
                per_row[target] = per_row[source]
            count = self.counts[source]
            self._token_ids[target, :count] = self._token_ids[source, :count]
            self._log_probs[target, :count] = self._log_probs[source, :count]
            self._stop_ids[target] = self._stop_ids[source]
            self._has_stop_text[target] = self._has_stop_text[source]
            self.samples[target] = self.samples[source]
            self._vacate(source)
        self._shrink()

    def tag(self, version: int) -> None:
        """Note that the next tokens of every sample are sampled under ``version``."""
        for row in self.alive():
            sample = self.samples[row]
            assert sample is not None
            count = int(self.counts[row])
            if sample.runs[-1][0] == count:
                sample.runs.pop()
            if not sample.runs or sample.runs[-1][1] != version:
                sample.runs.append((count, version))

    def cached_tokens(self, row: int) -> npt.NDArray[np.int64]:
        """List the tokens whose KV the row holds: the prompt and all sampled tokens but the last."""
        sample = self.samples[row]
        assert sample is not None
        prompt = np.array(sample.owner.request.prompt_ids, dtype=np.int64)
        return np.concatenate([prompt, self._token_ids[row, : max(self.counts[row] - 1, 0)].astype(np.int64)])

    def sampling(self) -> RowSampling:
        """Say how the rows in use are sampled; made anew only when a sample joined, left or moved."""
        if self._sampling is None:
            self._sampling = self.sampling_of(list(range(self.num_rows)))
        return self._sampling

    def sampling_of(self, rows: Sequence[int]) -> RowSampling:
        """Say how some rows are sampled, in that order."""
        parameters = [s.owner.request.sampling if (s := self.samples[row]) is not None else None for row in rows]
        temperatures = [1.0 if p is None or p.greedy else p.temperature for p in parameters]
        is_greedy = [p is not None and p.greedy for p in parameters]
        filtered = [
            (place, min(p.top_k or self._vocab_size, self._vocab_size), p.top_p)
            for place, p in enumerate(parameters)
            if p is not None and not p.greedy and (p.top_k or p.top_p < 1)
        ]
        device = self._device
        places, top_k, top_p = zip(*filtered, strict=True) if filtered else ((), (), ())
        return RowSampling(
            temperatures=torch.tensor(temperatures, device=device) if set(temperatures) - {1.0} else None,
            greedy=torch.tensor(is_greedy, device=device) if any(is_greedy) else None,
            filtered=torch.tensor(places, device=device) if filtered else None,
            top_k=torch.tensor(top_k, device=device) if filtered else None,
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device) if filtered else None,
            widest_top_k=max(top_k, default=0),
        )
