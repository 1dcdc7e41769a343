"""A naive reading of what an engine may answer: one plain forward pass of transformers a token, and loops.

An engine adds in another order, so a token is not compared with the one that a reading samples: it is right if the
random number that its seed and its position give lies where the reading has that token, within a tolerance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix, SamplingParameters
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.models import EOS

Values = npt.NDArray[np.float64]
LEAD_TOKENS = 8
"""Text is looked for in the words of the last tokens, of which a stop text has at most these."""


@dataclass(frozen=True)
class Tolerance:
    """How far an engine may be from a reading.

    Attributes:
        log_prob: nats, of one token.
        share: of probability.
    """

    log_prob: float
    share: float


EXACT = Tolerance(log_prob=2e-5, share=2e-5)
COARSE = Tolerance(log_prob=0.35, share=0.2)
"""Of bfloat16: eight bits of each intermediate value."""


@dataclass(frozen=True)
class Reading:
    """Reads completions.

    Attributes:
        models: by version.
        keeps_cache: whether an update leaves what was computed of a running completion as it is.
        tolerance: of the model's type.
        is_seeded: whether a seed and a position give the random number of a token.
    """

    models: Mapping[int, nn.Module]
    keeps_cache: bool
    tolerance: Tolerance
    is_seeded: bool = True

    def check(self, request: GenerationRequest, index: int, completion: Completion) -> None:
        """Check every token of a completion, its log-probability, its version and its end."""
        tokens, sampling = completion.token_ids.tolist(), request.sampling
        assert 1 <= len(tokens) <= sampling.max_new_tokens
        resumed = completion.num_resumed
        if resumed:
            prefix = request.prefixes[index]
            assert prefix is not None
            assert tokens[:resumed] == list(prefix.token_ids)
            assert completion.log_probs[:resumed].tolist() == np.float32(prefix.log_probs).tolist()
        ends = [is_end(sampling, tokens[: place + 1]) for place in range(len(tokens))]
        assert not any(ends[resumed:-1])
        assert completion.finish_reason is (FinishReason.STOP if ends[-1] else FinishReason.LENGTH)
        assert ends[-1] or len(tokens) == sampling.max_new_tokens
        logits = self._logits(request.prompt_ids, completion)
        for place in range(resumed, len(tokens)):
            self._check_token(request, index, place, tokens, logits[place], float(completion.log_probs[place]))

    def _check_token(
        self, request: GenerationRequest, index: int, place: int, tokens: list[int], logits: Values, log_prob: float
    ) -> None:
        sampling, token, share = request.sampling, tokens[place], self.tolerance.share
        temperature = 1.0 if sampling.greedy else sampling.temperature
        expected = np.log(softmax(logits / temperature))[token]
        where = f"token {place} of {len(tokens)}, seed {request.seeds[index]}"
        assert abs(log_prob - expected) <= self.tolerance.log_prob, f"{where}: {log_prob} for {expected}"
        scores = penalised(logits, request.prompt_ids, tokens[:place], sampling) / temperature
        if sampling.greedy:
            assert scores[token] >= scores.max() - self.tolerance.log_prob, where
            return
        below, above = interval_of(softmax(scores), token, sampling, share)
        draw = uniform(request.seeds[index], place) if self.is_seeded else below
        assert below - share <= draw <= above + share, f"{where}: {draw} is not in {below} to {above}"

    def _logits(self, prompt_ids: Sequence[int], completion: Completion) -> Values:
        """Compute the logits that each token was sampled from: [N, V]."""
        tokens = completion.token_ids.tolist()
        ids = torch.tensor([[*prompt_ids, *tokens]])
        starts = [start for start, _ in completion.versions]
        runs = list(
            zip(starts, [*starts[1:], len(tokens)], [version for _, version in completion.versions], strict=True)
        )
        # What it joined with was computed once, by the version that served then.
        joined = [run for run in runs if run[1] > completion.num_resumed]
        rows: list[Values] = []
        cache = DynamicCache(config=next(iter(self.models.values())).config)
        computed = 0
        for start, end, version in joined:
            model, first = self.models[version], len(prompt_ids) + start - 1
            with torch.inference_mode():
                if self.keeps_cache:
                    logits = model(ids[:, computed : len(prompt_ids) + end - 1], past_key_values=cache, use_cache=True)
                    rows.append(logits.logits[0, max(first - computed, 0) :].double().numpy())
                    computed = len(prompt_ids) + end - 1
                else:
                    logits = model(ids[:, : len(prompt_ids) + end - 1], use_cache=False)
                    rows.append(logits.logits[0, first:].double().numpy())
        found = np.concatenate(rows)
        before = len(tokens) - len(found)
        return np.concatenate([np.full((before, found.shape[1]), np.nan), found])


def is_end(sampling: SamplingParameters, tokens: Sequence[int]) -> bool:
    """Whether the last of these tokens ends a completion, unless one before did."""
    stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])}
    text = " ".join(f"w{token}" for token in tokens[-LEAD_TOKENS:])
    return tokens[-1] in stops or any(stop in text for stop in sampling.stop)


def penalised(logits: Values, prompt: Sequence[int], sampled: Sequence[int], sampling: SamplingParameters) -> Values:
    """Penalise logits [V] as vLLM does, token by token."""
    found = logits.copy()
    for token in {*prompt, *sampled}:
        factor = sampling.repetition_penalty
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token in sampled:
        found[token] -= sampling.frequency_penalty
    for token in set(sampled):
        found[token] -= sampling.presence_penalty
    return found


def interval_of(probabilities: Values, token: int, sampling: SamplingParameters, share: float) -> tuple[float, float]:
    """Say which random numbers lead to a token: the likeliest first where tokens are cut, in their order otherwise.

    What lies on a cut within the tolerance counts as kept and as cut, and what is as likely as the token as before and
    behind it.
    """
    is_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if not is_cut:
        return float(probabilities[:token].sum()), float(probabilities[: token + 1].sum())
    likeliest, own = np.sort(probabilities)[::-1], probabilities[token]
    place = int((likeliest > own).sum())
    most, fewest = (num_kept(likeliest, sampling, slack) for slack in (share, -share))
    assert place < most, f"token {token} of probability {own} is cut"
    ends = []
    for kept in (likeliest[:most], likeliest[: max(fewest, place + 1)]):
        before, after = kept[kept > own * (1 + share)].sum(), kept[kept < own * (1 - share)].sum()
        ends.append((before / kept.sum(), 1 - after / kept.sum()))
    return float(min(low for low, _ in ends)), float(max(high for _, high in ends))


def num_kept(likeliest: Values, sampling: SamplingParameters, slack: float) -> int:
    """Count the tokens that no cut takes away: at most so many with slack above 0, at least so many below.

    Each cut is made on the whole distribution, given with its likeliest token first.
    """
    mass = 0.0
    for rank, own in enumerate(likeliest):
        limit = likeliest[sampling.top_k - (slack > 0)] * (1 - slack) if sampling.top_k else 0.0
        if own < limit or mass >= sampling.top_p + slack or own < (sampling.min_p - slack) * likeliest[0]:
            return rank
        mass += own
    return len(likeliest)


def softmax(logits: Values) -> Values:
    powers = np.exp(logits - logits.max())
    found: Values = powers / powers.sum()
    return found


def uniform(seed: int, place: int) -> float:
    """Draw the number of a seed's token with whole numbers alone: SplitMix64."""
    mask = 2**64 - 1

    def mixed(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    golden = 0x9E3779B97F4A7C15
    key = mixed(seed + golden & mask)
    return (mixed(key + (place + 1) * golden & mask) >> 12) * 2.0**-52


def prefix_of(completion: Completion, num: int) -> Prefix | None:
    """Make the tokens that another engine has sampled before; None if that leaves nothing to sample."""
    num = min(num, completion.token_ids.size - 1)
    if num < 1:
        return None
    tokens, log_probs = completion.token_ids[:num].tolist(), completion.log_probs[:num].tolist()
    return Prefix(tuple(tokens), tuple(log_probs), ((0, 0),))
