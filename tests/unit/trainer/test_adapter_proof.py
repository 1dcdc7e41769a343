"""A version of adapters alone is proved as it is served: the trainer's digest of the sums, in an engine's memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.checkpoint import TensorSource
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, Unavailable, WeightsDiverged
from flotilla.shared.faults.armed import arm, disarm
from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.weights.image.adapted import added_to
from tests.contract.engine.models import make_model
from tests.contract.engine.requests import a_request
from tests.integration.engine.running import answer, outcomes, update_errors
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import uneven_groups
from tests.unit.trainer.test_adapter_publications import a_learner

PROMPT = tuple(range(10, 21))


@pytest.fixture(autouse=True)
def unarmed() -> Iterator[None]:
    yield
    disarm()


class World:
    """A trainer that publishes adapters alone, and an engine with their base."""

    def __init__(self, directory: Path, family: str = "Qwen3", dtype: str = "float32") -> None:
        self.learner = a_learner(
            directory / "model", ARCHITECTURES.get(family, lambda: make_model(family).requires_grad_(True))
        )
        self.learner.train(uneven_groups(2), 1)
        self.pool = ImagePool(
            self.learner.weights,  # type: ignore[arg-type]  # of one rank
            directory=directory,
            served_as=getattr(torch, dtype),
            base=self.learner.spec.model,
        )
        settings = EngineSettings(str(directory / "model"), slots=4, context_tokens=64, dtype=dtype)
        self.engine = TorchEngine(settings)

    def publish(self, version: int, *, told: str | None = None) -> list[FlotillaError | None]:
        """Publish what the trainer has, and have the engine load and prove it."""
        path = self.pool.snapshot()
        digest = told or self.pool.manifest(path, version).digest
        assert digest is not None
        self.engine.request_update(version, path, version, OnWeightUpdate.INTERRUPT, digest)
        return update_errors(outcomes(self.engine))

    def train(self, step: int) -> None:
        """Change the adapters."""
        self.learner.train(uneven_groups(2), step)

    def close(self) -> None:
        """Remove the images."""
        self.pool.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama"])
def test_the_sums_that_an_engine_serves_are_those_that_the_trainer_knows(
    tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, family, dtype)
    # The publisher's digest alone has to do: sums are made again only where it differs.
    monkeypatch.setattr("flotilla.services.rollout.engines.embedded.updates._as_loaded", frozenset)

    assert world.publish(5) == [None]
    world.train(2)
    assert world.publish(6) == [None]
    assert world.engine.version == 6
    world.close()


@pytest.mark.parametrize("family", ["Llama", "gpt2"])
def test_an_engine_that_rounds_the_sums_otherwise_proves_them_by_its_own(tmp_path: Path, family: str) -> None:
    world = World(tmp_path, family)

    assert world.publish(5, told="0" * 32) == [None]
    world.close()


def test_sums_that_come_out_otherwise_when_they_are_made_again_are_those_that_were_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another number of threads since: the publisher's digest is another machine's, too."""

    def otherwise(*terms: Any) -> Tensor:
        total = added_to(*terms)
        return torch.nextafter(total, total.new_tensor(torch.inf))

    switch = world.engine._decoder.switch

    def switched() -> None:
        switch()
        monkeypatch.setattr("flotilla.services.rollout.engines.decoders.adapted.added_to", otherwise)

    world.engine._decoder.switch = switched  # type: ignore[method-assign]

    assert world.publish(5, told="0" * 32) == [None]


@pytest.mark.parametrize("term", ["weight", "A", "B"])
def test_a_sum_that_was_loaded_of_other_bytes_proves_nothing(
    world: World, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TensorSource.read

    def damaged(source: Any, name: str) -> Tensor:
        tensor = read(source, name)
        names = {"weight": "q_proj.weight", "A": "lora_A.weight", "B": "lora_B.weight"}
        if is_loading and name.endswith(names[term]):
            tensor = tensor.clone()
            tensor.view(torch.int32).view(-1)[5] ^= 1 << 20
        return tensor

    is_loading, switch = True, world.engine._decoder.switch

    def switched() -> None:
        nonlocal is_loading
        switch()
        is_loading = False

    monkeypatch.setattr(TensorSource, "read", damaged)
    world.engine._decoder.switch = switched  # type: ignore[method-assign]

    [error] = world.publish(5)

    assert isinstance(error, WeightsDiverged)


@pytest.mark.parametrize("fault", ["engine.read flip", "engine.read half", "engine.switch keep"])
def test_adapters_that_are_flipped_half_there_or_the_former_ones_are_named_and_sample_nothing(
    world: World, fault: str
) -> None:
    assert world.publish(4) == [None]
    world.train(2)
    arm(parse_plan(f"{fault} times=1"), "engine")

    [error] = world.publish(5)

    assert isinstance(error, WeightsDiverged)
    assert "version 5" in error.detail and "the first is " in error.detail
    with pytest.raises(Unavailable):
        world.engine.submit(a_request(PROMPT))
    assert world.publish(6) == [None], "loaded again, it serves"
    [completion] = answer(world.engine, a_request(PROMPT, max_new_tokens=4))
    assert completion.versions == ((0, 6),)


def test_one_bit_of_one_sum_is_found_where_the_digest_is_another_machines_too(world: World) -> None:
    decoder = world.engine._decoder
    switch = decoder.switch

    def flipping() -> None:
        switch()
        weights = decoder._weights if decoder._native is None else decoder._native.weights  # type: ignore[attr-defined]
        memory = next(m.native if m._kernels is not None else m.plain for m in weights._matrices())
        with torch.inference_mode():
            memory.view(torch.int32).view(-1)[3] ^= 1

    decoder.switch = flipping  # type: ignore[method-assign]

    [error] = world.publish(5, told="0" * 32)

    assert isinstance(error, WeightsDiverged) and "1 of " in error.detail
