"""Sampling: one uniform number per token, a function of (seed, position) alone.

So a completion depends neither on its neighbours in the batch nor on a restart. A token of probability 0 is never
sampled: the cumulative sum is float64 and the threshold lies strictly below its last value.

Penalties on tokens that a sample has already are those of vLLM. They change which token is sampled, not the recorded
log-probability: that stays the policy's own, which the trainer computes again without knowing of them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.native.kernels import kernels_for

log = logging.getLogger(__name__)


class History:
    """Which tokens the prompts of rows have, and how often each was sampled: [rows, V] each.

    Args:
        num_rows: of the batch.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)

    def begin(self, row: int, prompt_ids: Tensor) -> None:
        """Forget what a row had; its prompt is [N] int64."""
        self.in_prompt[row] = False
        self.counts[row] = 0
        self.in_prompt[row, prompt_ids.to(self.in_prompt.device)] = True

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count a sampled token for each row, [N] int64 both; a row may come several times."""
        device = self.counts.device
        ones = torch.ones(len(rows), device=device)
        self.counts.index_put_((rows.to(device), token_ids.to(device)), ones, accumulate=True)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move rows [N] to others."""
        sources, targets = sources.to(self.counts.device), targets.to(self.counts.device)
        self.in_prompt[targets] = self.in_prompt[sources]
        self.counts[targets] = self.counts[sources]


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """Penalties of R of a step's rows.

    Attributes:
        places: [R] int64, where they are among the step's rows.
        rows: [R] int64, where they are in the batch.
        repetition, presence, frequency: [R, 1] float32.
        history: of the batch, as it is when a token is sampled.
    """

    places: Tensor
    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    history: History

    def applied(self, logits: Tensor) -> Tensor:
        """Return the logits [R, V] of these rows, penalised.

        A token of the prompt or the completion has its logit divided by ``repetition`` where it is positive, and
        multiplied elsewhere; then ``frequency`` times the number of times that it was sampled is taken off, and
        ``presence`` if it was at all.

        Source: vLLM, ``vllm/v1/sample/ops/penalties.py``; the first is of Keskar et al., CTRL, 2019.
        """
        counts = self.history.counts[self.rows]
        was_sampled = counts > 0
        repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        penalised = torch.where(was_sampled | self.history.in_prompt[self.rows], repeated, logits)
        return penalised - self.frequency * counts - self.presence * was_sampled


PlainSample = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
PROBE_ROWS = 8
PROBE_VOCABULARY = 10_000

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S12, _S27, _S30, _S31 = (np.uint64(shift) for shift in (12, 27, 30, 31))


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> _S30)) * _FIRST
    state = (state ^ (state >> _S27)) * _SECOND
    return state ^ (state >> _S31)


def seed_keys(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter seeds over 64 bits, so that neighbouring seeds do not give neighbouring streams."""
    return _mix(seeds + _GOLDEN)


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Draw one number per row, a function of its key and position alone.

    Args:
        keys: [B] from ``seed_keys``.
        positions: [B] or [N, B], index of the token in its completion.

    Returns:
        As many, in [0, 1 - 2**-52]: multiples of 2**-52.

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
    """
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN) >> _S12
    return bits.astype(np.float64) * 2.0**-52


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the rows of a batch are sampled; None where no row needs it.

    Attributes:
        temperatures: [B] float32, 1 for greedy rows; None when all are 1.
        greedy: [B] bool.
        filtered: [R] int64, the rows with top-k, top-p or min-p.
        top_k: [R] int64, at least 1 (the vocabulary size where it is off).
        top_p: [R] float64.
        min_p: [R] float32; None where none of them has it.
        widest_top_k: the largest of ``top_k``.
        penalties: of the rows that have some.
    """

    temperatures: Tensor | None = None
    greedy: Tensor | None = None
    filtered: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    widest_top_k: int = 0
    penalties: RowPenalties | None = None

    @property
    def is_plain(self) -> bool:
        """Whether rows are sampled from the softmax of their logits by temperature, and from nothing else."""
        return self.filtered is None and self.greedy is None and self.penalties is None


def sample(logits: Tensor, draws: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: [B, V].
        draws: [B] float64 from ``uniforms``.
        rows: how each row is sampled.

    Returns:
        Token ids [B] int64, and their log-probabilities [B] float32 under ``softmax(logits / temperature)`` over the
        whole vocabulary, without penalties. The log-probability of a row whose logits are not finite is not finite.
    """
    if rows.is_plain and logits.is_contiguous():
        kernels = kernels_for(logits.device, logits.dtype)
        if kernels is not None and logits.dtype == torch.float32:
            return kernels.sample(logits, draws, rows.temperatures)
        if logits.device.type == "cuda" and (by_triton := _triton_sample(logits.device, logits.dtype)) is not None:
            return by_triton(logits, draws, rows.temperatures)
    return _sample_by_torch(logits, draws, rows)


@cache
def _triton_sample(device: torch.device, dtype: torch.dtype) -> PlainSample | None:
    """Give Triton's kernel, if it is found by trying that it works for such logits; None: it does not."""
    if find_spec("triton") is None:
        return None
    try:
        from flotilla.services.rollout.engines.decoders import triton_kernels

        if _samples_alike(triton_kernels.sample, device, dtype):
            return triton_kernels.sample
        log.warning("Triton's kernel samples other tokens than torch's operators")
    except Exception as error:  # No compiler for its launchers, a folder that cannot be written, an unknown GPU.
        log.warning("Triton's kernel for sampling does not work on this device", extra={"error": repr(error)})
    return None


def _samples_alike(sample_plainly: PlainSample, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it samples what torch's operators do, of rows longer than one block of its kernel."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((PROBE_ROWS, PROBE_VOCABULARY), generator=generator).to(device, dtype)
    draws = torch.rand(PROBE_ROWS, generator=generator, dtype=torch.float64).to(device)
    temperatures = torch.linspace(0.5, 2.0, PROBE_ROWS, device=device)
    found = sample_plainly(logits, draws, temperatures)
    wanted = _sample_by_torch(logits, draws, RowSampling(temperatures=temperatures))
    return torch.equal(found[0], wanted[0]) and torch.allclose(found[1], wanted[1], atol=1e-4, rtol=1e-4)


def _sample_by_torch(logits: Tensor, draws: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    if rows.temperatures is not None:
        scores = scores / rows.temperatures.unsqueeze(1)
    own, penalties = scores, rows.penalties
    if penalties is not None:
        penalised = penalties.applied(logits.float()[penalties.places])
        if rows.temperatures is not None:
            penalised = penalised / rows.temperatures[penalties.places].unsqueeze(1)
        scores = scores.index_copy(0, penalties.places, penalised)
    probabilities = scores.softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draws.unsqueeze(1) * total, right=True)
    if rows.filtered is not None:
        tokens.index_copy_(0, rows.filtered, _sample_filtered(probabilities, total, draws, rows))
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy.unsqueeze(1), scores.argmax(dim=-1, keepdim=True), tokens)
    # Only logits that are no numbers lead beyond the last token.
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    if penalties is not None:
        # A penalty below 0 may lead to a token whose own probability float32 cannot hold.
        return tokens.squeeze(1), own.log_softmax(dim=-1).gather(1, tokens).squeeze(1)
    # The logarithm of a float32 probability is as exact as a log-softmax: a relative error of 1e-7 becomes an
    # absolute one, and what float32 cannot hold is never sampled.
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1).log()


def _sample_filtered(probabilities: Tensor, total: Tensor, draws: Tensor, rows: RowSampling) -> Tensor:
    """Sample the rows with top-k, top-p or min-p among their most likely tokens: [R, 1].

    Each cut is made on the whole distribution, as SGLang does.
    """
    chosen, top_k, top_p, min_p = rows.filtered, rows.top_k, rows.top_p, rows.min_p
    assert chosen is not None and top_k is not None and top_p is not None
    likeliest, token_ids = probabilities[chosen].topk(rows.widest_top_k, dim=-1)
    ranks = torch.arange(rows.widest_top_k, device=probabilities.device)
    before = likeliest.cumsum(dim=-1, dtype=torch.float64) - likeliest
    kept = (ranks < top_k.unsqueeze(1)) & (before < top_p.unsqueeze(1) * total[chosen])
    if min_p is not None:
        kept &= likeliest >= min_p.unsqueeze(1) * likeliest[:, :1]
    cumulative = torch.where(kept, likeliest, 0.0).cumsum(dim=-1, dtype=torch.float64)
    threshold = draws[chosen].unsqueeze(1) * cumulative[:, -1:]
    rank = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=rows.widest_top_k - 1)
    return token_ids.gather(1, rank)


class Flight:
    """Sampled tokens that the next step may compute with before the host knows them.

    Args:
        token_ids: [B] int64, on the device.
        log_probs: [B] float32, there too.
        routed: [B, 1, layers, top_k] int16, experts of the tokens that were read for them; None: not recorded.

    Attributes:
        token_ids: as given.
    """

    def __init__(self, token_ids: Tensor, log_probs: Tensor, routed: Tensor | None = None) -> None:
        self.token_ids = token_ids
        self._done: Any = None
        if token_ids.device.type != "cuda":
            self._on_host = token_ids, log_probs, routed
            return
        # Copied behind the computation, which the host does not wait for before it has launched the next one.
        self._on_host = _pinned(token_ids), _pinned(log_probs), None if routed is None else _pinned(routed)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def land(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int16] | None]:
        """Wait until they are here: token ids and log-probabilities, [B] each, and experts, if any."""
        if self._done is not None:
            self._done.synchronize()
        token_ids, log_probs, routed = self._on_host
        return token_ids.numpy(), log_probs.numpy(), None if routed is None else routed[:, -1].numpy()


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
