"""Real SGLang and vLLM servers say what they have in memory, and one that has something else samples no token of it."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightsDiverged, WorkerDied
from tests.contract.engine.conftest import server_settings
from tests.contract.engine.models import make_model, save_image, save_long_model
from tests.contract.engine.requests import a_request
from tests.servers.test_server import CONTEXT, DIALECTS, KINDS

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ServerEngine]:
    model = save_long_model(tmp_path / "model", positions=CONTEXT)
    settings = server_settings(model, request.param, context_tokens=CONTEXT, version=2)
    made = ServerEngine(settings, DIALECTS[request.param]())
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    return save_image(make_model("qwen3-32", seed=1), tmp_path / "newer.safetensors")


def damaged(before: Path, newer: Path, damage: str, target: Path) -> None:
    """Write what a server has that kept its weights, loaded half of them, or has one that flipped a bit."""
    old, new = load_file(before), load_file(newer)
    names = sorted(new)
    made = dict(new)
    if damage == "keep":
        made = {name: old[name] for name in names}
    elif damage == "half":
        made |= {name: old[name] for name in names[: len(names) // 2]}
    else:
        [name] = [each for each in names if each.endswith("layers.1.mlp.down_proj.weight")]
        changed = new[name].clone()
        changed.view(-1).view(torch.int32)[7] ^= 1
        made[name] = changed
    target.unlink()
    save_file(made, target)


@pytest.mark.parametrize("damage", ["flip", "half", "keep"])
async def test_a_server_that_has_other_weights_than_it_was_given_is_named_and_samples_no_token_of_them(
    engine: ServerEngine, newer: Path, damage: str, tmp_path: Path
) -> None:
    [before] = await engine.generate(a_request(max_new_tokens=3))
    assert before.versions == ((0, 2),)
    assert await engine.load_proved(newer, 3, OnWeightUpdate.INTERRUPT, "digest"), "what it has is what it was given"
    assert (await engine.generate(a_request(max_new_tokens=3)))[0].versions == ((0, 3),)
    proof = engine._proof
    assert proof is not None and proof._provable is not None
    # All matrices of the layers, fused or packed, are told, and the embedding where it is not hashed with padding.
    assert sum("proj" in name for name in proof._provable) >= 8, proof._provable
    assert any("embed_tokens" in name for name in proof._provable) is (engine._dialect.name == "vLLM"), proof._provable
    switch, other = engine._dialect.switch, save_image(make_model("qwen3-32", seed=2), tmp_path / "other.safetensors")

    async def switched(caller: Any, source: Path, *arguments: Any, **options: Any) -> None:
        wrong = tmp_path / "wrong"
        shutil.copytree(source, wrong)
        damaged(newer, other, damage, wrong / "model.safetensors")
        await switch(caller, wrong, *arguments, **options)

    engine._dialect.switch = switched  # type: ignore[method-assign]
    with pytest.raises(WeightsDiverged, match="version 4 as the server has it is not what was published") as raised:
        await engine.load_proved(other, 4, OnWeightUpdate.INTERRUPT, "digest")

    if damage == "flip":
        assert "the first that differs is model.layers.1.mlp.down_proj.weight" in raised.value.detail
    with pytest.raises(WorkerDied):
        await engine.generate(a_request(max_new_tokens=1))
