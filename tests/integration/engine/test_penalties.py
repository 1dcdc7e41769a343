"""Penalties and min-p against a naive reading of vLLM's definition, token by token, over a real model.

What is recorded is the policy's own log-probability, which whoever has the weights computes again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel

Saved = Callable[[str], SavedModel]
Logits = npt.NDArray[np.float64]
PROMPT = (5, 6, 7, 6, 40)
ONLY_THE_LIKELIEST = {"temperature": 0.7, "min_p": 1.0}
"""Sampling, of which one token is left."""
PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {},
]


def generated(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> list[Sequence[Completion]]:
    for request in requests:
        engine.submit(request)
    found: dict[str, Sequence[Completion]] = {}
    while not engine.is_idle:
        for outcome in engine.step():
            assert isinstance(outcome, Generated)
            found[outcome.request_id] = outcome.completions
    return [found[request.request_id] for request in requests]


def logits_of(saved: SavedModel, completion: Completion) -> Logits:
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = saved.model(ids).logits[0, len(PROMPT) - 1 : -1]
    found: Logits = logits.double().numpy()
    return found


def penalised(logits: npt.NDArray[np.float64], sampled: Sequence[int], how: dict[str, float]) -> Logits:
    found = logits.copy()
    for token in {*PROMPT, *sampled}:
        factor = how.get("repetition_penalty", 1.0)
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token, count in Counter(sampled).items():
        found[token] -= count * how.get("frequency_penalty", 0.0) + how.get("presence_penalty", 0.0)
    return found


def check(saved: SavedModel, completion: Completion, how: dict[str, float], temperature: float) -> None:
    tokens = completion.token_ids.tolist()
    for place, logits in enumerate(logits_of(saved, completion)):
        assert tokens[place] == int(penalised(logits, tokens[:place], how).argmax())
        own = logits / temperature - np.logaddexp.reduce(logits / temperature)
        assert completion.log_probs[place] == pytest.approx(own[tokens[place]], abs=1e-5)


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize(("base", "temperature"), [({"greedy": True}, 1.0), (ONLY_THE_LIKELIEST, 0.7)])
def test_tokens_are_penalised_and_log_probs_are_not(
    saved: Saved, base: dict[str, Any], temperature: float, goes_ahead: bool
) -> None:
    """Rows of all kinds side by side; some end early, so that the others are moved."""
    model = saved("qwen3")
    engine = model.engine(goes_ahead=goes_ahead)
    requests = [
        a_request(PROMPT, seeds=(1, 2), max_new_tokens=length, **base, **how)
        for how, length in zip(PENALTIES, (5, 24, 9, 24, 24, 7), strict=True)
    ]

    for how, completions in zip(PENALTIES, generated(engine, requests), strict=True):
        for completion in completions:
            check(model, completion, how, temperature)

    again = a_request(PROMPT, seeds=(1,) * 12, max_new_tokens=12, **base)
    [completions] = generated(engine, [again])
    for completion in completions:
        check(model, completion, {}, temperature)


def test_a_resumed_completion_has_the_penalties_of_what_it_kept(saved: Saved) -> None:
    how = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "temperature": 0.9}
    asked: dict[str, Any] = {"seeds": (4, 5), "max_new_tokens": 20, **how}
    [whole] = generated(saved("qwen3").engine(), [a_request(PROMPT, **asked)])
    first = whole[0]
    prefix = Prefix(tuple(first.token_ids[:8].tolist()), tuple(first.log_probs[:8].tolist()), first.versions)

    [resumed] = generated(saved("qwen3").engine(), [a_request(PROMPT, prefixes=(prefix, None), **asked)])

    for each, uninterrupted in zip(resumed, whole, strict=True):
        assert each.token_ids.tolist() == uninterrupted.token_ids.tolist()
        np.testing.assert_allclose(each.log_probs, uninterrupted.log_probs, atol=1e-5)


def test_penalties_change_what_is_sampled(saved: Saved) -> None:
    asked: dict[str, Any] = {"seeds": range(8), "max_new_tokens": 40}
    plain, harsh = generated(
        saved("qwen3").engine(), [a_request(PROMPT, **asked), a_request(PROMPT, frequency_penalty=2.0, **asked)]
    )

    def most(completions: Sequence[Completion]) -> int:
        return max(np.bincount(each.token_ids).max() for each in completions)

    assert most(harsh) < most(plain)
