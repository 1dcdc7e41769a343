"""Launching a step before the last one's tokens are read changes nothing that is sampled, as it is done on a GPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.models import EOS, VOCAB, make_model, save_image
from tests.integration.engine.conftest import SavedModel

Saved = Callable[[str], SavedModel]
Texts = dict[str, list[tuple[list[int], list[float], FinishReason, tuple[tuple[int, int], ...]]]]


def a_request(number: int, length: int) -> GenerationRequest:
    generator = np.random.default_rng(number)
    prompt = tuple(generator.integers(2, VOCAB, 3 + number).tolist())
    sampling = SamplingParameters(max_new_tokens=length, temperature=1.5, stop_token_ids=(EOS, *range(5, 12)))
    return GenerationRequest(f"r{number}", prompt, tuple(range(10 * number, 10 * number + 3)), sampling)


def play(engine: TorchEngine, image: Path, *, aborts: bool) -> Texts:
    """Let requests come, go and be updated at fixed steps; more than there are slots."""
    found: Texts = {}
    step, coming = 0, [a_request(number, 4 + 3 * number) for number in range(6)]
    for request in coming[:4]:
        engine.submit(request)
    while step < 12 or not engine.is_idle:
        if step == 3:
            engine.request_update(1, image, 1, OnWeightUpdate.INTERRUPT)
        if step == 5:
            for request in coming[4:]:
                engine.submit(request)
        if step == 7 and aborts:
            engine.abort("r3")
        for outcome in engine.step():
            if isinstance(outcome, Generated):
                found[outcome.request_id] = [
                    (each.token_ids.tolist(), each.log_probs.tolist(), each.finish_reason, each.versions)
                    for each in outcome.completions
                ]
        step += 1
    return found


@pytest.mark.parametrize("invariant", [False, True])
def test_completions_versions_and_ends_are_the_same(saved: Saved, tmp_path: Path, invariant: bool) -> None:
    image = save_image(make_model("qwen3", seed=3), tmp_path / "new.safetensors")
    for_all = {"slots": 16 if invariant else 18, "batch_invariant": invariant}
    one, other = (
        play(saved("qwen3").engine(goes_ahead=ahead, **for_all), image, aborts=False) for ahead in (False, True)
    )

    assert one.keys() == other.keys() == {f"r{number}" for number in range(6)}
    reasons = set()
    for name, completions in one.items():
        for (tokens, log_probs, reason, versions), theirs in zip(completions, other[name], strict=True):
            assert (tokens, reason, versions) == (theirs[0], theirs[2], theirs[3])
            np.testing.assert_allclose(log_probs, theirs[1], atol=1e-5)
            reasons.add(reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_an_abort_ends_with_what_was_read(saved: Saved, tmp_path: Path) -> None:
    image = save_image(make_model("qwen3", seed=3), tmp_path / "new.safetensors")
    engine = saved("qwen3").engine(goes_ahead=True, slots=12)
    found = play(engine, image, aborts=True)

    assert FinishReason.ABORTED in {each[2] for each in found["r3"]}
    assert found.keys() == {f"r{number}" for number in range(6)}
    assert engine.load().running == 0


def test_a_token_that_ends_surely_is_read_before_the_next_step(saved: Saved) -> None:
    """No place beyond the context is written."""
    engine = saved("qwen3").engine(goes_ahead=True, slots=2, context_tokens=16)
    sampling = SamplingParameters(max_new_tokens=10, ignore_eos=True)
    engine.submit(GenerationRequest("full", tuple(range(2, 8)), (1, 2), sampling))
    while not engine.is_idle:
        engine.step()
    assert engine.load().generated_tokens == 20
