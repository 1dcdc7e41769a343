"""Who shares an engine's process with whom, and what each asks of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.shared import pool as pools
from flotilla.services.rollout.engines.shared.engine import CannotShare, SharedEngine
from flotilla.services.rollout.engines.shared.pool import SharedEngines, reason_not_shared
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, ModelError, WeightTransferFailed, WorkerDied
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from flotilla.shared.telemetry.logging import experiment_id
from flotilla.shared.weights.image.adapters import AdaptersHeader
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from tests.fleet import tiny_model
from tests.unit.gateway.builders import a_spec

LORA: dict[str, Any] = {
    "model": {"path": "model", "dtype": "float32", "lora": {"rank": 4}},
    "rollout": {"engine": {"kind": "torch", "device": "cpu"}},
    "asynchrony": {"publication": {"lora": "adapters"}},
}


def lora_spec(**sections: dict[str, Any]) -> ExperimentSpec:
    """Make a spec that shares, with keys of its sections changed."""
    merged = {name: LORA.get(name, {}) | sections.get(name, {}) for name in LORA.keys() | sections.keys()}
    return a_spec(parallelism={"device": "cpu"}, **merged)


class Process:
    """What experiments share; nothing is computed."""

    def __init__(self, settings: EngineSettings, *, takes_adapters: bool = True) -> None:
        self.settings, self.takes_adapters = settings, takes_adapters
        self.process_id: int | None = None
        self.num_starts = self.num_closed = 0
        self.adapters: dict[str, tuple[Path | None, float, int, OnWeightUpdate]] = {}
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.refusal: Exception | None = None
        self.answers = self.shows_last_words = True
        self.started_for: str | None = None

    def hide_last_words(self) -> None:
        """Note it."""
        self.shows_last_words = False

    async def start(self) -> None:
        """Load the base."""
        self.started_for = experiment_id.get()
        self.num_starts += 1
        await self.may_start.wait()
        if self.refusal is not None:
            raise self.refusal
        self.process_id = 77

    async def close(self) -> None:
        """End."""
        self.num_closed += 1
        self.process_id = None

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Note what is asked."""
        self.requests.append(request)
        if not self.answers:
            await asyncio.Event().wait()
        return []

    async def abort(self, request_id: str) -> None:
        """Note it."""
        self.aborted.append(request_id)

    async def load_adapter(
        self, name: str, file: Path | None, scale: float, version: int, on_update: Any = OnWeightUpdate.CONTINUE
    ) -> None:
        """Note it."""
        self.adapters[name] = (file, scale, version, on_update)

    async def drop_adapter(self, name: str) -> None:
        """Forget it."""
        del self.adapters[name]

    async def load(self, adapter: str | None = None) -> EngineLoad:
        """Say whose load is asked for by its version."""
        version = 0 if adapter is None else self.adapters[adapter][2]
        return EngineLoad(version, 0, 0, 8, 0, 0, takes_adapters=self.takes_adapters)


class World:
    """A pool, and the processes that it made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Process] = []
        self.takes_adapters = self.starts_at_once = True
        self.refusal: Exception | None = None
        self.pool = SharedEngines(self.make)  # type: ignore[arg-type]
        monkeypatch.setattr(pools, "check_engine", lambda *_: None)

    def make(self, settings: EngineSettings) -> Process:
        """Make a process."""
        self.made.append(Process(settings, takes_adapters=self.takes_adapters))
        self.made[-1].refusal = self.refusal
        if not self.starts_at_once:
            self.made[-1].may_start.clear()
        return self.made[-1]

    async def begun(self, experiment_id: str, **sections: dict[str, Any]) -> SharedEngine:
        """Start an experiment's part."""
        model = {"path": str(tiny_model())} | sections.pop("model", {})
        engine = await self.pool.engine_for(lora_spec(model=model, **sections), experiment_id)
        assert engine is not None
        await engine.start()
        return engine


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def request(request_id: str = "r") -> GenerationRequest:
    return GenerationRequest(request_id, (1,), (1,), SamplingParameters(1))


def image_of(directory: Path, base: str | None, scale: float = 2.0) -> Path:
    """Write an image: of adapters of a base, or of whole weights."""
    metadata = {} if base is None else AdaptersHeader(base, scale).metadata
    layout = ImageLayout.of({"a": ((1,), "F32")}, metadata)
    image = WeightImage.create(layout.image_bytes, directory=directory)
    with image.writing() as view:
        view[: len(layout.header)] = layout.header
    return image.hand_over()


def base() -> str:
    return checksum_of(safetensors_files(tiny_model()))


def test_experiments_that_train_adapters_share() -> None:
    assert reason_not_shared(lora_spec()) is None


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"model": {"lora": None}, "asynchrony": {"publication": {}}}, "all weights"),
        ({"asynchrony": {"publication": {"lora": "merged"}}}, "merged"),
        (
            {"rollout": {"engine": {"kind": "vllm", "device": "cpu"}}, "asynchrony": {"publication": {"lora": "auto"}}},
            "vllm",
        ),
        ({"model": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"rollout": {"engine": {"kind": "torch", "device": "cuda:0"}}}, "cuda:0"),
        ({"tracking": {"profiler": {"engine_versions": [2]}}}, "profiler"),
        ({"resources": {"sharing": "time"}}, "sharing"),
    ],
)
def test_what_needs_an_engine_of_its_own_says_why(sections: dict[str, Any], why: str) -> None:
    reason = reason_not_shared(lora_spec(**sections))

    assert reason is not None
    assert why in reason


async def test_one_process_serves_ranks_of_any_size_and_each_under_its_own_versions(
    world: World, tmp_path: Path
) -> None:
    one = await world.begun("one")
    other = await world.begun("other", model={"lora": {"rank": 8}, "dtype": "float32"})
    image = image_of(tmp_path, base(), scale=2.0)
    await one.load_weights(image, 3, OnWeightUpdate.INTERRUPT)
    await one.generate(request())
    await other.generate(request())

    [process] = world.made
    assert process.num_starts == 1
    first, second = process.requests
    assert first.request_id != second.request_id
    assert process.adapters[first.adapter or ""] == (image, 2.0, 3, OnWeightUpdate.INTERRUPT)
    assert process.adapters[second.adapter or ""][:3] == (None, 1.0, 0)
    assert [(await each.load()).version for each in (one, other)] == [3, 0]
    assert (await one.load()).sharers == 2


async def test_its_process_works_for_no_experiment_and_shows_its_last_words_to_one_alone(world: World) -> None:
    experiment_id.set("one")
    await world.begun("one")
    [process] = world.made
    assert (process.started_for, process.shows_last_words) == (None, True)

    await world.begun("other")
    assert not process.shows_last_words


async def test_other_settings_or_another_base_get_another_process(world: World, tmp_path: Path) -> None:
    await world.begun("one")
    await world.begun("narrow", rollout={"engine": {"kind": "torch", "device": "cpu", "slots": 4}})
    (tmp_path / "other").symlink_to(tiny_model())
    await world.begun("elsewhere", model={"path": str(tmp_path / "other"), "lora": {"rank": 4}, "dtype": "float32"})

    assert [each.settings.slots for each in world.made] == [128, 4, 128]


async def test_one_that_ends_takes_only_its_own_away_and_the_last_ends_the_process(world: World) -> None:
    one, other = await world.begun("one"), await world.begun("other")
    [process] = world.made
    process.answers = False
    sampling = asyncio.create_task(one.generate(request("mine")))
    await asyncio.sleep(0)
    await one.close()
    await one.close()

    assert len(process.aborted) == 1
    assert "mine" in process.aborted[0]
    assert (len(process.adapters), process.num_closed) == (1, 0)
    with pytest.raises(WorkerDied):
        await one.generate(request())
    await other.close()
    assert process.num_closed == 1
    sampling.cancel()
    await world.begun("later")
    assert len(world.made) == 2


async def test_a_process_that_died_is_replaced_once_for_all_who_come_back(world: World) -> None:
    one, other = await world.begun("one"), await world.begun("other")
    world.made[0].process_id = None

    again = await world.begun("one")
    await one.close()
    both = await world.begun("other")
    await other.close()

    assert len(world.made) == 2
    assert world.made[0].num_closed == 1
    assert (await again.load()).sharers == (await both.load()).sharers == 2


async def test_all_who_wait_for_a_base_hear_that_it_cannot_be_loaded(world: World) -> None:
    world.refusal = ModelError("there is no such model")
    found = await asyncio.gather(world.begun("one"), world.begun("other"), return_exceptions=True)

    assert [type(each) for each in found] == [ModelError, ModelError]
    world.refusal = None
    await world.begun("one")


async def test_one_who_no_longer_waits_does_not_end_the_start_of_others(world: World) -> None:
    spec = lora_spec(model={"path": str(tiny_model()), "lora": {"rank": 4}, "dtype": "float32"})
    one, other = await world.pool.engine_for(spec, "one"), await world.pool.engine_for(spec, "other")
    assert one is not None
    assert other is not None
    world.starts_at_once = False
    starting = asyncio.create_task(one.start())
    waiting = asyncio.create_task(other.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    world.made[0].may_start.set()

    await waiting
    assert (await other.load()).sharers == 1


async def test_a_model_without_adapters_of_single_samples_is_not_shared(world: World) -> None:
    world.takes_adapters = False
    with pytest.raises(CannotShare):
        await world.begun("one")
    assert world.made[0].num_closed == 1


async def test_an_experiment_whose_versions_are_whole_weights_gets_an_engine_of_its_own(
    world: World, tmp_path: Path
) -> None:
    one, other = await world.begun("one"), await world.begun("other")
    with pytest.raises(WorkerDied, match="engine of its own: version 1 is whole weights"):
        await one.load_weights(image_of(tmp_path, None), 1, OnWeightUpdate.DRAIN)
    await one.close()

    spec = lora_spec(model={"path": str(tiny_model()), "lora": {"rank": 4}, "dtype": "float32"})
    assert await world.pool.engine_for(spec, "one") is None
    await other.load_weights(image_of(tmp_path, base()), 1, OnWeightUpdate.DRAIN)


async def test_adapters_of_another_base_are_refused_and_the_version_before_stays(world: World, tmp_path: Path) -> None:
    one = await world.begun("one")
    with pytest.raises(WeightTransferFailed, match="the same model"):
        await one.load_weights(image_of(tmp_path, "0123456789abcdef"), 1, OnWeightUpdate.DRAIN)

    assert (await one.load()).version == 0


async def test_it_neither_sleeps_nor_takes_adapters_by_name(world: World) -> None:
    one = await world.begun("one")
    with pytest.raises(InvalidRequest):
        await one.sleep()
    with pytest.raises(InvalidRequest):
        await one.generate(GenerationRequest("r", (1,), (1,), SamplingParameters(1), adapter="other"))
    transfer = one.begin_transfer(Path("nowhere"), 1)
    transfer.advance(1)
    transfer.complete()
    transfer.abort("late")


def test_it_is_not_kept_for_ever_who_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_ALONE", 2)
    engines = SharedEngines()
    for number in range(4):
        engines.cannot_share(cast(Any, SimpleNamespace(experiment_id=f"e{number}")), "its adapter cannot be read")

    assert list(engines._alone) == ["e2", "e3"]
