"""A real vLLM server that adds adapters itself has the log-probabilities of the merged weights, token by token."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.engines.servers.adapters import MAX_HELD, WEIGHTS_FILE
from flotilla.services.rollout.engines.servers.dialect import Caller
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.servers.settings import AdapterSettings
from flotilla.services.rollout.engines.vllm.engine import VllmAdapters, VllmDialect
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightsDiverged, WorkerDied
from tests.contract.engine.conftest import begin_running, server_settings
from tests.contract.engine.models import make_model, merged, save_adapters, save_long_model, scores
from tests.contract.engine.requests import a_request
from tests.servers.test_server import CONTEXT, PROMPT

pytestmark = [pytest.mark.timeout(900), pytest.mark.vllm]
INTERRUPT = OnWeightUpdate.INTERRUPT
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("model"), positions=CONTEXT)


@pytest.fixture(scope="module")
def images(model_path: Path) -> dict[int, Path]:
    """Of versions 3 to 6; rank 4, where the server has room for 8."""
    return {
        seed: save_adapters(model_path, model_path.parent / f"{seed}.safetensors", seed=seed) for seed in range(3, 7)
    }


@pytest.fixture(scope="module")
def models(images: dict[int, Path]) -> dict[int, nn.Module]:
    made = {version: merged(make_model("qwen3-32"), image) for version, image in images.items()}
    return {2: make_model("qwen3-32"), **made}


@pytest.fixture(scope="module")
async def engine(model_path: Path) -> AsyncIterator[ServerEngine]:
    adapters = AdapterSettings("tiny", 4)
    settings = server_settings(model_path, "vllm", context_tokens=CONTEXT, version=2, adapters=adapters)
    made = ServerEngine(settings, VllmDialect(raw=False))
    await made.start()
    yield made
    await made.close()


def farthest(models: dict[int, nn.Module], completions: Sequence[Completion]) -> float:
    """Rescore every token under the merged weights of its own version; the largest difference in nats."""
    worst = 0.0
    for completion in completions:
        ends = [start for start, _ in completion.versions[1:]] + [completion.token_ids.size]
        for (start, version), end in zip(completion.versions, ends, strict=True):
            own = scores(models[version], PROMPT, completion.token_ids)
            worst = max(worst, float(np.abs(completion.log_probs[start:end] - own[start:end]).max()))
    return worst


async def test_versions_are_those_of_the_merged_weights_and_a_request_in_flight_goes_from_one_to_the_next(
    engine: ServerEngine, images: dict[int, Path], models: dict[int, nn.Module]
) -> None:
    seen = await engine.generate(a_request(PROMPT, seeds=(1, 2), max_new_tokens=24))
    assert {run for each in seen for run in each.versions} == {(0, 2)}
    assert await engine.load_proved(images[3], 3, INTERRUPT, "digest"), "it tells its weights and its adapters"
    seen = [*seen, *await engine.generate(a_request(PROMPT, seeds=(1, 2), max_new_tokens=24))]
    in_flight = a_request(PROMPT, seeds=(3, 4), max_new_tokens=300)
    sampling = await begin_running(engine, in_flight, running=2, new_tokens=6)
    assert await engine.load_proved(images[4], 4, INTERRUPT, "digest")
    over = await sampling
    assert all([version for _, version in each.versions] == [3, 4] for each in over), [each.versions for each in over]
    assert all(each.token_ids.size == 300 for each in over)
    await engine.load_weights(images[3], 5, OnWeightUpdate.DRAIN)
    again = await engine.generate(a_request(PROMPT, seeds=(5,), max_new_tokens=24))

    assert farthest(models, [*seen, *over]) < TOLERANCE
    assert farthest({5: models[3]}, again) < TOLERANCE
    assert farthest({5: models[4]}, again) > TOLERANCE, "another version would be seen"
    assert farthest({3: models[2], 4: models[2], 2: models[2]}, [*seen[2:], *over]) > TOLERANCE
    connection = engine._connection
    assert connection is not None
    names = [each["id"] for each in (await connection.get("/v1/models"))["data"]]
    assert [each for each in names if each.startswith("tiny-")] == [engine._adapters.serving], names  # type: ignore[union-attr]
    assert len(names) <= MAX_HELD and len(list(engine._place.glob("adapters-*"))) == 1


def damage_file(folder: Path, former: Path, damage: str) -> None:
    """Write what a server has that kept the adapters before, loaded half of them, or has one whose sign is flipped."""
    with safe_open(folder / WEIGHTS_FILE, "pt") as opened:
        metadata = opened.metadata()
    made, old = load_file(folder / WEIGHTS_FILE), load_file(former)
    names = sorted(made)
    if damage == "keep":
        made = old
    elif damage == "half":
        made |= {name: torch.zeros_like(made[name]) for name in names[: len(names) // 2]}
    else:
        [name] = [each for each in names if each.endswith("layers.1.mlp.down_proj.lora_B.weight")]
        place = int(made[name].abs().argmax())
        made[name].view(-1).view(torch.int32)[place] ^= -(1 << 31) if damage == "flip" else 1
    save_file(made, folder / WEIGHTS_FILE, metadata)


class Damaging(VllmAdapters):
    """Has the server read something else than what is in its folder."""

    def __init__(self, former: Path) -> None:
        self.former, self.damage = former, "none"

    async def load(self, caller: Caller, name: str, directory: Path, *, seconds: float) -> None:
        """Load a folder that is damaged meanwhile."""
        whole = (directory / WEIGHTS_FILE).read_bytes()
        if self.damage != "none":
            damage_file(directory, self.former, self.damage)
        await super().load(caller, name, directory, seconds=seconds)
        (directory / WEIGHTS_FILE).write_bytes(whole)


async def test_a_server_with_other_adapters_than_it_was_given_is_named_and_rescoring_shows_it_too(
    engine: ServerEngine, images: dict[int, Path], models: dict[int, nn.Module]
) -> None:
    adapters, proof, connection = engine._adapters, engine._proof, engine._connection
    assert adapters is not None and proof is not None and connection is not None and proof.can_tell_adapters
    host = adapters.host = Damaging(images[5])
    for number, (host.damage, is_seen) in enumerate({"keep": True, "half": True, "flip": True, "bit": False}.items()):
        # What the engine does at a load without a proof: what serves then is rescored, and asked for.
        version = 10 + number
        await engine.load_weights(images[6], version, INTERRUPT)
        [wrong] = await engine.generate(a_request(PROMPT, max_new_tokens=200))
        assert (farthest({version: models[6]}, [wrong]) > TOLERANCE) is is_seen, host.damage
        assert adapters.serving is not None
        with pytest.raises(WeightsDiverged, match=f"version {version} as the server has it is not what was published"):
            await proof.check_adapters(connection, adapters, adapters.serving, version)
    host.damage = "bit"

    with pytest.raises(WeightsDiverged, match=r"first that differs is model\.layers\.1\.mlp\.down_proj"):
        await engine.load_proved(images[4], 20, INTERRUPT, "digest")
    with pytest.raises(WorkerDied):
        await engine.generate(a_request(PROMPT, max_new_tokens=1))
