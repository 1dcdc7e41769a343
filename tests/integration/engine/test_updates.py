"""Weight updates in flight: every token is what its version says, exactly."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.cache_utils import DynamicCache

from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Unavailable, WeightTransferFailed
from tests.contract.engine.models import make_model, save_image, scores
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, outcomes, steps, update_errors

Saved = Callable[[str], SavedModel]
PROMPT = tuple(range(10, 21))


@pytest.fixture
def newer(tmp_path: Path) -> Callable[[str], tuple[nn.Module, Path]]:
    """Make other weights for a family, and their image."""

    def make(family: str) -> tuple[nn.Module, Path]:
        model = make_model(family, seed=1)
        return model, save_image(model, tmp_path / f"{family}.safetensors")

    return make


def update_after(
    engine: TorchEngine, num_steps: int, image: Path, mode: OnWeightUpdate, **request: int
) -> Sequence[Completion]:
    """Run a request, and update the weights when so many steps are done."""
    in_flight = a_request(PROMPT, seeds=(1, 2, 3), **{"max_new_tokens": 30, **request})
    engine.submit(in_flight)
    answers = steps(engine, num_steps)
    engine.request_update(1, image, 5, mode)
    return (answers | steps(engine))[in_flight.request_id]


@pytest.mark.parametrize("family", ["qwen3", "llama-gqa-tied", "qwen2", "gpt2", "mistral-window", "mamba"])
def test_weights_that_are_read_over_discarded_ones_are_exact(saved: Saved, newer: Callable, family: str) -> None:
    new, image = newer(family)
    engine = saved(family).engine()
    engine.discard_weights()
    with pytest.raises(Unavailable, match="no weights yet"):
        engine.submit(a_request(PROMPT))

    engine.request_update(1, image, 5, OnWeightUpdate.INTERRUPT)
    steps(engine)

    [completion] = answer(engine, a_request(PROMPT, max_new_tokens=12))
    assert completion.versions == ((0, 5),)
    expected = scores(new, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)
    engine.discard_weights()
    engine.wake()
    [initial] = answer(engine, a_request(PROMPT, max_new_tokens=12))
    expected = scores(saved(family).model, PROMPT, initial.token_ids)
    np.testing.assert_allclose(initial.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "llama-gqa-tied", "qwen2", "gpt2", "mistral-window", "mamba"])
def test_interrupt_goes_on_under_the_new_weights_exactly(saved: Saved, newer: Callable, family: str) -> None:
    new, image = newer(family)

    for completion in update_after(saved(family).engine(), 9, image, OnWeightUpdate.INTERRUPT):
        [(_, _), (start, _)] = completion.versions
        assert completion.versions == ((0, 0), (start, 5))
        assert start == 10  # a step samples one token, and the first one two: the prompt's and its own
        by_old = scores(saved(family).model, PROMPT, completion.token_ids)
        by_new = scores(new, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs[:start], by_old[:start], atol=1e-5, rtol=0)
        np.testing.assert_allclose(completion.log_probs[start:], by_new[start:], atol=1e-5, rtol=0)
        assert np.abs(by_old - by_new).min() > 1e-4


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_continue_keeps_the_old_keys_and_values(saved: Saved, newer: Callable, family: str) -> None:
    new, image = newer(family)

    for completion in update_after(saved(family).engine(), 9, image, OnWeightUpdate.CONTINUE):
        [(_, _), (start, version)] = completion.versions
        assert version == 5
        token_ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        cached = len(PROMPT) + start - 1
        cache = DynamicCache()
        with torch.inference_mode():
            saved(family).model(token_ids[:, :cached], past_key_values=cache, use_cache=True)
            logits = new(token_ids[:, cached:-1], past_key_values=cache, use_cache=True).logits[0]
        mixed = logits.log_softmax(dim=-1).numpy()[np.arange(30 - start), completion.token_ids[start:]]
        by_old = scores(saved(family).model, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs[:start], by_old[:start], atol=1e-5, rtol=0)
        np.testing.assert_allclose(completion.log_probs[start:], mixed, atol=1e-5, rtol=0)


def test_drain_ends_what_runs_under_the_old_weights(saved: Saved, newer: Callable) -> None:
    new, image = newer("qwen3")
    engine = saved("qwen3").engine()
    later = a_request(PROMPT)

    for completion in update_after(engine, 9, image, OnWeightUpdate.DRAIN):
        assert completion.versions == ((0, 0),)
        by_old = scores(saved("qwen3").model, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, by_old, atol=1e-5, rtol=0)

    [fresh] = answer(engine, later)
    assert fresh.versions == ((0, 5),)
    np.testing.assert_allclose(fresh.log_probs, scores(new, PROMPT, fresh.token_ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", list(OnWeightUpdate))
def test_who_holds_the_weights_is_waited_for(saved: Saved, newer: Callable, mode: OnWeightUpdate) -> None:
    _, image = newer("qwen3")
    engine = saved("qwen3").engine()
    held = a_request(PROMPT, seeds=range(20), max_new_tokens=10, holds_weights=True)
    other = a_request(PROMPT, seeds=(1, 2), max_new_tokens=50)
    engine.submit(other)
    engine.submit(held)
    steps(engine, 3)
    engine.request_update(1, image, 5, mode)

    answers = steps(engine)

    assert {completion.versions for completion in answers[held.request_id]} == {((0, 0),)}
    for completion in answers[held.request_id]:
        by_old = scores(saved("qwen3").model, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, by_old, atol=1e-5, rtol=0)
    versions = [version for _, version in answers[other.request_id][0].versions]
    assert versions == ([0] if mode is OnWeightUpdate.DRAIN else [0, 5])


def test_updates_are_applied_in_order(saved: Saved, newer: Callable, tmp_path: Path) -> None:
    _, image = newer("qwen3")
    engine = saved("qwen3").engine()
    request = a_request(PROMPT, max_new_tokens=30)
    engine.submit(request)
    steps(engine, 4)
    engine.request_update(1, image, 5, OnWeightUpdate.INTERRUPT)
    engine.request_update(2, tmp_path / "missing", 6, OnWeightUpdate.INTERRUPT)
    engine.request_update(3, saved("qwen3").path / "model.safetensors", 7, OnWeightUpdate.INTERRUPT)

    found = outcomes(engine)

    assert [type(error) for error in update_errors(found)] == [type(None), WeightTransferFailed, type(None)]
    assert engine.version == 7


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "truncated"])
def test_an_image_that_does_not_fit_changes_nothing(saved: Saved, tmp_path: Path, family: str, fault: str) -> None:
    engine = saved(family).engine()
    [before] = answer(engine, a_request(PROMPT))
    model = make_model(family, seed=1)
    last = list(dict(model.named_parameters()))[-1]
    shape = dict(model.named_parameters())[last].shape
    changes: dict[str, dict[str, torch.Tensor]] = {
        "unknown": {"extra.weight": torch.zeros(3)},
        "shape": {last: torch.zeros(*shape, 1)},
        "dtype": {last: torch.zeros(shape, dtype=torch.int32)},
    }
    image = save_image(model, tmp_path / "image.safetensors", **changes.get(fault, {}))
    if fault == "missing":
        save_file({name: tensor for name, tensor in load_file(image).items() if name != last}, image)
    if fault == "truncated":
        image.write_bytes(image.read_bytes()[:-100])

    engine.request_update(1, image, 5, OnWeightUpdate.DRAIN)
    [error] = update_errors(outcomes(engine))

    assert isinstance(error, WeightTransferFailed)
    assert fault in {"unknown", "truncated"} or last in error.detail
    assert engine.version == 0
    [after] = answer(engine, a_request(PROMPT))
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.log_probs.tolist() == before.log_probs.tolist()
    assert after.versions == ((0, 0),)


def test_an_image_of_another_type_is_converted(saved: Saved, tmp_path: Path) -> None:
    engine = saved("qwen3").engine()
    half = make_model("qwen3", seed=1).to(torch.bfloat16)
    rounded = make_model("qwen3", seed=1)
    rounded.load_state_dict(half.state_dict())
    engine.request_update(1, save_image(half, tmp_path / "half.safetensors"), 5, OnWeightUpdate.DRAIN)

    [completion] = answer(engine, a_request(PROMPT))

    expected = scores(rounded, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "llama-gqa-tied", "gpt2"])
@pytest.mark.parametrize("fault", ["none", "corrupt", "given up"])
def test_weights_are_read_as_they_arrive(
    saved: Saved, newer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fault: str
) -> None:
    new, image = newer(family)
    content = image.read_bytes()
    sent = content[:-5000] + bytes(5000) if fault == "corrupt" else content
    arriving = tmp_path / "arriving"
    # As after an earlier version: the right header and the wrong bytes.
    arriving.write_bytes(content[: len(content) // 4] + bytes(len(content) - len(content) // 4))
    engine = saved(family).engine(overlap_load=True)
    arrival = Arrival(arriving, 5)
    engine.begin_transfer(arrival)
    with arriving.open("r+b", buffering=0) as file:
        for start in range(0, len(content), len(content) // 7):
            file.write(sent[start : start + len(content) // 7])
            arrival.advance(file.tell())
            [before] = answer(engine, a_request(PROMPT))
    assert before.versions == ((0, 0),)
    np.testing.assert_allclose(
        before.log_probs, scores(saved(family).model, PROMPT, before.token_ids), atol=1e-5, rtol=0
    )

    if fault == "corrupt":
        arrival.abort(fault)  # Then comes the same version, right, elsewhere.
        engine.request_update(1, image, 5, OnWeightUpdate.DRAIN)
    elif fault == "given up":
        arrival.abort(fault)
        engine.request_update(1, arriving, 5, OnWeightUpdate.DRAIN)
    else:
        monkeypatch.setattr(
            "flotilla.services.rollout.engines.decoders.adapted.open_tensors", None
        )  # It is not read again.
        arrival.complete()
        engine.complete_transfer(arrival)
        engine.request_update(1, arriving, 5, OnWeightUpdate.DRAIN)

    assert update_errors(outcomes(engine)) == [None]
    [after] = answer(engine, a_request(PROMPT))
    assert after.versions == ((0, 5),)
    np.testing.assert_allclose(after.log_probs, scores(new, PROMPT, after.token_ids), atol=1e-5, rtol=0)


def test_the_image_may_vanish_once_it_serves(saved: Saved, newer: Callable) -> None:
    new, image = newer("qwen3")
    engine = saved("qwen3").engine()
    engine.request_update(1, image, 5, OnWeightUpdate.DRAIN)
    assert update_errors(outcomes(engine)) == [None]

    image.write_bytes(bytes(image.stat().st_size))
    image.unlink()

    [completion] = answer(engine, a_request(PROMPT))
    np.testing.assert_allclose(completion.log_probs, scores(new, PROMPT, completion.token_ids), atol=1e-5, rtol=0)
