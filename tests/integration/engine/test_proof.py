"""Before anything is sampled an engine reads back what it has loaded, and gives up what is not what was published."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Unavailable, WeightsDiverged
from flotilla.shared.faults.armed import arm, disarm
from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.weights.image.digests import of_image
from flotilla.shared.weights.image.tensors import open_image
from tests.contract.engine.models import make_model, save_image
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, outcomes, steps, update_errors

Saved = Callable[[str], SavedModel]
PROMPT = tuple(range(10, 21))
FAMILIES = ("qwen3", "llama-gqa-tied", "qwen2", "gpt2")


@pytest.fixture(autouse=True)
def unarmed() -> Iterator[None]:
    yield
    disarm()


def newer(family: str, tmp_path: Path) -> Path:
    return save_image(make_model(family, seed=1), tmp_path / f"{family}.safetensors")


def published(image: Path, dtype: torch.dtype = torch.float32) -> str:
    return of_image(open_image(image), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_published_is_found_in_every_layout(
    saved: Saved, family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, engine = newer(family, tmp_path), saved(family).engine(dtype=dtype)
    if family != "gpt2":  # whose tied head and embedding are two tensors of the state
        # The publisher's digest alone has to do: tensors of the image are read only where it differs.
        monkeypatch.setattr("flotilla.services.rollout.engines.embedded.updates._as_loaded", frozenset)

    engine.request_update(1, image, 5, OnWeightUpdate.INTERRUPT, published(image, getattr(torch, dtype)))

    assert update_errors(outcomes(engine)) == [None]
    assert engine.version == 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ["engine.read flip", "engine.read half", "engine.switch keep"])
def test_what_is_not_is_named_samples_nothing_and_is_loaded_again(
    saved: Saved, family: str, fault: str, tmp_path: Path
) -> None:
    image, engine = newer(family, tmp_path), saved(family).engine()
    arm(parse_plan(f"{fault} times=1"), "engine")
    in_flight = a_request(PROMPT, seeds=(1, 2), max_new_tokens=30)
    engine.submit(in_flight)
    before = steps(engine, 3)
    assert not before

    engine.request_update(1, image, 5, OnWeightUpdate.CONTINUE, published(image))
    ended = outcomes(engine)

    [error] = update_errors(ended)
    assert isinstance(error, WeightsDiverged)
    assert "version 5" in error.detail and "the first is " in error.detail
    completions = [each for outcome in ended for each in getattr(outcome, "completions", ())]
    assert [each.versions for each in completions] == [((0, 0),)] * 2, "of the wrong weights there is no token"
    with pytest.raises(Unavailable):
        engine.submit(a_request(PROMPT))
    engine.request_update(2, image, 5, OnWeightUpdate.CONTINUE, published(image))
    assert update_errors(outcomes(engine)) == [None]
    [completion] = answer(engine, a_request(PROMPT, max_new_tokens=4))
    assert completion.versions == ((0, 5),)


def test_an_engine_whose_image_is_gone_before_it_is_read_back_samples_nothing_and_says_so(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, engine = newer("qwen3", tmp_path), saved("qwen3").engine()
    decoder, digest = engine._decoder, published(image)
    switch = decoder.switch
    monkeypatch.setattr(decoder, "switch", lambda: (switch(), image.unlink()))

    engine.request_update(1, image, 5, OnWeightUpdate.CONTINUE, digest)
    [error] = update_errors(outcomes(engine))

    assert isinstance(error, WeightsDiverged)
    assert "version 5 as it was loaded cannot be proved" in error.detail
    with pytest.raises(Unavailable):
        engine.submit(a_request(PROMPT))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied"])
def test_packed_weights_that_change_in_memory_are_found(saved: Saved, family: str, tmp_path: Path) -> None:
    image, engine = newer(family, tmp_path), saved(family).engine()
    decoder = engine._decoder
    engine.request_update(1, image, 5, OnWeightUpdate.DRAIN, published(image))
    outcomes(engine)
    for matrix in decoder._weights._matrices():  # type: ignore[attr-defined]
        before = dict(decoder.digests())
        memory = matrix.native if matrix._kernels is not None else matrix.plain
        if memory is None:
            continue
        with torch.inference_mode():
            memory.view(-1)[0] += 1
        assert dict(decoder.digests()) != before
