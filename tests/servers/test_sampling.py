"""What real servers sample with min-p and penalties is what a naive reading allows, and is recorded without them."""

from collections.abc import AsyncIterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from tests.contract.engine.conftest import server_settings
from tests.contract.engine.models import make_model, save_long_model
from tests.contract.engine.requests import a_request
from tests.pairs.reading import Reading, Tolerance

pytestmark = pytest.mark.timeout(900)

Sampling = Mapping[str, float]
PROMPT = (5, 6, 7, 6, 40)
TOLERANCE = Tolerance(log_prob=2e-4, share=1e-3)
CUTS: Mapping[str, Sampling] = {
    "min-p": {"min_p": 0.1},
    "min-p beside top-k": {"min_p": 0.05, "top_k": 9},
    "min-p beside top-p": {"min_p": 0.1, "top_p": 0.8},
}
HOW: Mapping[str, Mapping[str, Sampling]] = {
    "sglang": {"by chance": {}, "at a low temperature": {"temperature": 0.6}, "greedy": {"greedy": True}},
    "vllm": {
        "by chance": {},
        "greedy": {"greedy": True},
        "penalised": {"repetition_penalty": 1.4},
        "rewarded": {"repetition_penalty": 0.7},
        "penalised, greedy": {"repetition_penalty": 1.8, "greedy": True},
    },
}
"""As specs allow it: a temperature beside cuts is SGLang's alone, and only vLLM's penalty of repetition is used."""
ROWS = [
    pytest.param(kind, {**CUTS[cut], **HOW[kind][how]}, id=f"{kind}, {cut}, {how}", marks=getattr(pytest.mark, kind))
    for kind in HOW
    for cut, how in product(CUTS, HOW[kind])
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_model("qwen3-32")


@pytest.fixture(scope="module")
async def engines(model_path: Path) -> AsyncIterator[dict[str, ServerEngine]]:
    """Started when they are asked for."""
    started: dict[str, ServerEngine] = {}
    try:
        yield started
    finally:
        for each in started.values():
            await each.close()


async def engine_of(kind: str, engines: dict[str, ServerEngine], model_path: Path) -> ServerEngine:
    if kind not in engines:
        settings = server_settings(model_path, kind)
        engine = SglangEngine(settings) if kind == "sglang" else VllmEngine(settings, raw=True)
        await engine.start()
        engines[kind] = engine
    return engines[kind]


@pytest.mark.parametrize(("kind", "sampling"), ROWS)
async def test_a_server_samples_what_a_naive_reading_allows(
    kind: str, sampling: dict[str, Any], engines: dict[str, ServerEngine], model_path: Path, model: nn.Module
) -> None:
    engine = await engine_of(kind, engines, model_path)
    reading = Reading({3: model}, keeps_cache=False, tolerance=TOLERANCE, is_seeded=False)
    request = a_request(PROMPT, seeds=(1, 2, 3), max_new_tokens=40, **sampling)

    completions = await engine.generate(request)

    for index, completion in enumerate(completions):
        reading.check(request, index, completion)
