"""Samples of several adapters in one batch of the embedded engine."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from flotilla.services.rollout.engines.base import AddsAdapters, Completion, GenerationRequest
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated, Updated
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import InvalidRequest, Unavailable, WeightTransferFailed
from tests.contract.engine.models import save_image, scores
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, outcomes, steps
from tests.integration.engine.test_adapters import SCALE, adapted

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler")

Saved = Callable[[str], SavedModel]
PROMPT = tuple(range(10, 21))
RANKS = (1, 2, 3, 4, 5, 8, 12, 16)


def several(model: SavedModel, directory: Path, family: str) -> dict[str, tuple[nn.Module, Path]]:
    return {f"r{rank}": adapted(family, model.path, directory, seed=rank, rank=rank) for rank in RANKS}


def begun(engine: TorchEngine, adapters: dict[str, tuple[nn.Module, Path]]) -> TorchEngine:
    for version, (name, (_, image)) in enumerate(adapters.items(), 1):
        engine.load_adapter(name, image, SCALE, version)
    return engine


def asked(name: str | None, number: int) -> GenerationRequest:
    """Ask for samples of different lengths, so that rows are moved while others go on."""
    return a_request(PROMPT, seeds=(number, number + 50), max_new_tokens=5 + 6 * number, adapter=name)


def same(one: Completion, other: Completion) -> bool:
    is_same = np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.log_probs, other.log_probs)
    return is_same and one.versions == other.versions


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama-gqa-tied"])
def test_samples_of_eight_adapters_in_one_batch_are_what_each_alone_samples_to_the_bit(
    saved: Saved, tmp_path: Path, family: str
) -> None:
    model = saved(family)
    adapters = several(model, tmp_path, family)
    names: list[str | None] = [None, *adapters]
    engine = begun(model.engine(slots=32), adapters)
    together = [asked(name, number) for number, name in enumerate(names)]
    for request in together:
        engine.submit(request)
    found = steps(engine)

    for number, (name, request) in enumerate(zip(names, together, strict=True)):
        [alone, _] = answer(begun(model.engine(slots=32), adapters), asked(name, number))
        [first, second] = found[request.request_id]
        assert same(first, alone)
        for each in (first, second):
            assert each.versions == ((0, number),)
            merged = model.model if name is None else adapters[name][0]
            np.testing.assert_allclose(
                each.log_probs, scores(merged, PROMPT, each.token_ids), atol=1e-4, rtol=0, err_msg=str(name)
            )


def test_one_adapter_is_replaced_while_it_and_others_are_sampled_with(saved: Saved, tmp_path: Path) -> None:
    model = saved("qwen3")
    old, file = adapted("qwen3", model.path, tmp_path, seed=1)
    new, newer = adapted("qwen3", model.path, tmp_path, seed=2, rank=7)
    engine = model.engine()
    engine.load_adapter("mine", file, SCALE, 1)
    engine.load_adapter("theirs", file, SCALE, 2)
    mine, theirs = (a_request(PROMPT, max_new_tokens=30, adapter=name) for name in ("mine", "theirs"))
    engine.submit(mine)
    engine.submit(theirs)
    steps(engine, 9)

    engine.load_adapter("mine", newer, SCALE, 3)
    found = steps(engine)

    [unmoved], [moved] = found[theirs.request_id], found[mine.request_id]
    assert unmoved.versions == ((0, 2),)
    np.testing.assert_allclose(unmoved.log_probs, scores(old, PROMPT, unmoved.token_ids), atol=1e-4, rtol=0)
    [(_, first), (start, second)] = moved.versions
    assert (first, second, start) == (1, 3, 10)  # the first step gives two tokens
    np.testing.assert_allclose(moved.log_probs[:start], scores(old, PROMPT, moved.token_ids)[:start], atol=1e-4, rtol=0)
    # From here on its KV cache is the old one's and the rest the new one's; a later request has the new one whole.
    behind = scores(old, PROMPT, moved.token_ids)[start:]
    assert np.abs(moved.log_probs[start:] - behind).max() > 1e-2
    [after] = answer(engine, a_request(PROMPT, max_new_tokens=12, adapter="mine"))
    assert after.versions == ((0, 3),)
    np.testing.assert_allclose(after.log_probs, scores(new, PROMPT, after.token_ids), atol=1e-4, rtol=0)


def test_turns_that_were_kept_serve_the_weights_without_an_adapter_alone(saved: Saved, tmp_path: Path) -> None:
    model = saved("qwen3")
    merged, file = adapted("qwen3", model.path, tmp_path)
    engine = model.engine(prefix_cache_mb=50)
    engine.load_adapter("a", file, SCALE, 1)
    long = tuple(range(10, 50))
    for name in (None, "a"):
        answer(engine, a_request(long, is_turn=True, adapter=name))

    for name, scored in (("a", merged), (None, model.model)):
        [found] = answer(engine, a_request(long, is_turn=True, adapter=name))
        np.testing.assert_allclose(found.log_probs, scores(scored, long, found.token_ids), atol=1e-4, rtol=0)
    assert engine.load().reuses == 1


@pytest.mark.parametrize("mode", list(OnWeightUpdate))
def test_new_weights_wait_for_samples_with_adapters_and_forget_these(
    saved: Saved, tmp_path: Path, mode: OnWeightUpdate
) -> None:
    model = saved("qwen3")
    merged, file = adapted("qwen3", model.path, tmp_path)
    image = save_image(merged, tmp_path / "whole.safetensors")
    engine = model.engine(slots=1)
    engine.load_adapter("a", file, SCALE, 1)
    running, waiting = (a_request(PROMPT, adapter="a") for _ in range(2))
    engine.submit(running)
    steps(engine, 2)
    engine.submit(waiting)

    engine.request_update(1, image, 4, mode)
    found = outcomes(engine)

    done = {each.request_id: each.completions[0].versions for each in found if isinstance(each, Generated)}
    assert done == {running.request_id: ((0, 1),), waiting.request_id: ((0, 1),)}
    assert isinstance(found[-1], Updated)
    with pytest.raises(InvalidRequest, match="load it first"):
        engine.submit(a_request(adapter="a"))
    [plain] = answer(engine, a_request(PROMPT))
    assert plain.versions == ((0, 4),)


def test_an_adapter_that_is_sampled_with_is_not_dropped(saved: Saved, tmp_path: Path) -> None:
    model = saved("qwen3")
    engine = model.engine()
    engine.load_adapter("a", adapted("qwen3", model.path, tmp_path)[1], SCALE, 1)
    request = a_request(adapter="a")
    engine.submit(request)

    with pytest.raises(InvalidRequest, match="sampled with"):
        engine.drop_adapter("a")
    assert request.request_id in steps(engine)
    engine.drop_adapter("a")
    engine.drop_adapter("never there")

    with pytest.raises(InvalidRequest, match="load it first"):
        engine.submit(a_request(adapter="a"))


def test_an_engine_without_weights_and_one_whose_model_cannot_refuse_adapters(saved: Saved, tmp_path: Path) -> None:
    model = saved("qwen3")
    file = adapted("qwen3", model.path, tmp_path)[1]
    engine = model.engine()
    engine.sleep()
    with pytest.raises(Unavailable):
        engine.load_adapter("a", file, SCALE, 1)

    other = saved("gpt2").engine()
    assert not other.load().takes_adapters
    with pytest.raises(InvalidRequest, match="merged"):
        other.load_adapter("a", file, SCALE, 1)
    with pytest.raises(InvalidRequest, match="load it first"):
        other.submit(a_request(adapter="a"))


async def test_an_engine_in_a_process_of_its_own_takes_adapters(saved: Saved, tmp_path: Path) -> None:
    model = saved("qwen3")
    merged, file = adapted("qwen3", model.path, tmp_path)
    engine = ProcessEngine(EngineSettings(str(model.path), slots=4, context_tokens=64))
    assert isinstance(engine, AddsAdapters)
    try:
        async with asyncio.timeout(120):
            await engine.start()
            assert (await engine.load()).takes_adapters
            await engine.load_adapter("a", file, SCALE, 5)
            [found] = await engine.generate(a_request(PROMPT, adapter="a"))
            with pytest.raises(WeightTransferFailed):
                await engine.load_adapter("a", tmp_path / "none", SCALE, 6)
            await engine.drop_adapter("a")
            with pytest.raises(InvalidRequest):
                await engine.generate(a_request(PROMPT, adapter="a"))
    finally:
        await engine.close()
    assert found.versions == ((0, 5),)
    np.testing.assert_allclose(found.log_probs, scores(merged, PROMPT, found.token_ids), atol=1e-4, rtol=0)
