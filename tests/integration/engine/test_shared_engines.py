"""Two experiments in one engine's process: what each samples, publishes and loses is its own."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.shared.engine import SharedEngine
from flotilla.services.rollout.engines.shared.pool import SharedEngines
from flotilla.services.rollout.loading import Loaded, load
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import WorkerDied
from flotilla.shared.locations.allowed import Places
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from tests.contract.engine.requests import a_request
from tests.fleet import tiny_model
from tests.unit.gateway.builders import a_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"),
]

PROMPT = tuple(range(10, 21))
SECONDS = 240.0


def spec_of(rank: int) -> ExperimentSpec:
    """Make an experiment that may share."""
    return a_spec(
        model={"path": str(tiny_model()), "dtype": "float32", "lora": {"rank": rank}},
        rollout={
            "engine": {"kind": "torch", "device": "cpu", "slots": 8, "context_tokens": 96, "threads": 1},
            "sampling": {"max_new_tokens": 40},
        },
        asynchrony={"publication": {"lora": "adapters"}},
        parallelism={"device": "cpu"},
    )


def adapter(directory: Path, rank: int, seed: int) -> Path:
    """Write an image of adapters of some layers, as a trainer publishes it."""
    from safetensors.numpy import save_file

    from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of
    from flotilla.shared.weights.image.layout import read_layout

    files = safetensors_files(tiny_model())
    shapes = {each.name: each.shape for file in files for each in read_layout(file).tensors}
    draws, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            low, high = names_of(name)
            tensors[low] = draws.normal(size=(rank, shape[1])).astype(np.float32) / 3
            tensors[high] = draws.normal(size=(shape[0], rank)).astype(np.float32) / 3
    path = directory / f"r{rank}-{seed}.safetensors"
    save_file(tensors, path, AdaptersHeader(checksum_of(files), 1.0).metadata)
    return path


class Rollout:
    """A rollout process's experiments; what makes engines is counted."""

    def __init__(self) -> None:
        self.made: list[ProcessEngine] = []
        self.pool = SharedEngines(self._make)
        self.loaded: list[Loaded] = []

    def _make(self, settings: EngineSettings) -> ProcessEngine:
        self.made.append(ProcessEngine(settings))
        return self.made[-1]

    async def begin(self, *ranks: int) -> list[SharedEngine]:
        """Load what experiments need, all at once, as the services of one process do."""
        specs = [spec_of(rank) for rank in ranks]
        engines = [await self.pool.engine_for(spec, f"e{rank}") for spec, rank in zip(specs, ranks, strict=True)]
        loads = (load(spec, {}, Places(), "127.0.0.1", each) for spec, each in zip(specs, engines, strict=True))
        self.loaded += await asyncio.gather(*loads)
        return [each for each in engines if each is not None]

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(each.close() for each in self.loaded))


@pytest.fixture
async def rollout() -> AsyncIterator[Rollout]:
    rollout = Rollout()
    try:
        async with asyncio.timeout(SECONDS):
            yield rollout
    finally:
        await rollout.close()


def asked(seed: int, **fields: Any) -> GenerationRequest:
    return a_request(PROMPT, seeds=(seed, seed + 1), max_new_tokens=40, **fields)


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> bool:
    return all(
        np.array_equal(one.token_ids, other.token_ids)
        and np.array_equal(one.log_probs, other.log_probs)
        and one.versions == other.versions
        for one, other in zip(found, expected, strict=True)
    )


async def test_samples_are_to_the_bit_what_each_has_alone_through_all_versions(
    rollout: Rollout, tmp_path: Path
) -> None:
    images = {rank: [adapter(tmp_path, rank, seed) for seed in (1, 2)] for rank in (4, 8)}

    async def sampled(engine: SharedEngine, rank: int) -> list[Sequence[Completion]]:
        found = [await engine.generate(asked(rank))]
        for version, image in enumerate(images[rank], 1):
            await engine.load_weights(image, version, OnWeightUpdate.DRAIN)
            found.append(await engine.generate(asked(rank + version)))
        return found

    both = await rollout.begin(4, 8)
    together = await asyncio.gather(*(sampled(engine, rank) for engine, rank in zip(both, (4, 8), strict=True)))
    assert len(rollout.made) == 1
    assert [(await each.load()).sharers for each in both] == [2, 2]
    await rollout.close()
    rollout.loaded.clear()
    for rank, found in zip((4, 8), together, strict=True):
        [engine] = await rollout.begin(rank)
        alone = await sampled(engine, rank)
        await rollout.close()
        rollout.loaded.clear()
        assert all(same(one, other) for one, other in zip(found, alone, strict=True))
        assert [each[0].versions for each in alone] == [((0, 0),), ((0, 1),), ((0, 2),)]
    assert len(rollout.made) == 3


async def test_an_update_of_one_does_not_hold_up_the_other(rollout: Rollout, tmp_path: Path) -> None:
    mine, theirs = await rollout.begin(4, 8)
    held = asyncio.create_task(mine.generate(replace(asked(1), holds_weights=True)))
    while not (await mine.load()).running:
        await asyncio.sleep(0)
    update = asyncio.create_task(mine.load_weights(adapter(tmp_path, 4, 1), 1, OnWeightUpdate.DRAIN))
    found = await theirs.generate(asked(5))
    await update

    assert [each.versions for each in found] == [((0, 0),)] * 2
    assert [each.versions for each in await held] == [((0, 0),)] * 2
    assert (await mine.load()).version == 1


async def test_all_lose_a_process_that_is_killed_and_have_one_again(rollout: Rollout, tmp_path: Path) -> None:
    mine, theirs = await rollout.begin(4, 8)
    await mine.load_weights(adapter(tmp_path, 4, 1), 1, OnWeightUpdate.DRAIN)
    sampling = [asyncio.create_task(each.generate(asked(1))) for each in (mine, theirs)]
    await asyncio.sleep(0)
    pid = rollout.made[0].process_id
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ended = await asyncio.gather(*sampling, return_exceptions=True)

    assert [type(each) for each in ended] == [WorkerDied, WorkerDied]
    for each in ended:
        assert isinstance(each, WorkerDied)
        assert "SIGKILL" in each.detail
        assert "engine loaded" not in each.detail
    await rollout.close()
    rollout.loaded.clear()
    again, _ = await rollout.begin(4, 8)
    assert len(rollout.made) == 2
    assert [each.versions for each in await again.generate(asked(1))] == [((0, 0),)] * 2
