"""Which weights and adapters the sampler's engine has when, and which are meant by a number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.tinker import serving
from flotilla.services.rollout.tinker.serving import ServedWeights, Serving, Source
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import InvalidRequest, ModelError, NotFound, WeightTransferFailed
from flotilla.shared.models.hub import ADAPTER, ADAPTER_CONFIG
from flotilla.shared.tinker.paths import SavedPath
from flotilla.shared.tinker.records import MANIFEST, Lora, Saved


class AdaptingEngine:
    """Notes what it is to load."""

    def __init__(self, *, takes_adapters: bool = True) -> None:
        self.takes_adapters = takes_adapters
        self.adapters: dict[str, tuple[bytes, float, int]] = {}
        self.whole: list[tuple[bytes, int, OnWeightUpdate]] = []
        self.while_loading: Callable[[], None] = lambda: None

    async def load(self) -> "AdaptingEngine":
        """Say what it can."""
        return self

    async def load_adapter(self, name: str, file: Path, scale: float, version: int) -> None:
        """Read an adapter."""
        try:
            self.adapters[name] = (file.read_bytes(), scale, version)
        except OSError as error:
            raise WeightTransferFailed(str(error)) from error
        self.while_loading()

    async def drop_adapter(self, name: str) -> None:
        """Forget one."""
        del self.adapters[name]

    async def load_weights(self, image: Path, version: int, mode: OnWeightUpdate) -> None:
        """Read whole weights."""
        self.adapters.clear()
        self.whole.append((image.read_bytes(), version, mode))


class World:
    """A data directory with saved models, and what serves them."""

    def __init__(self, data: Path, monkeypatch: pytest.MonkeyPatch, engine: AdaptingEngine) -> None:
        self.data, self.engine = data, engine
        self.drained = 0

        def write(base: Path, saved: Path | None, image: Path) -> int:
            image.write_bytes(b"base" if saved is None else saved.name.encode())
            return 0 if saved is None else 7

        monkeypatch.setattr(serving, "write_image", write)

        async def drain() -> None:
            self.drained += 1

        self.weights = ServedWeights(engine, Path("/base"), data, drain)  # type: ignore[arg-type]

    def saves(self, path: str, *, step: int = 1, rank: int | None = 4) -> Source:
        """Save a model; rank None: of whole weights."""
        directory = SavedPath.read(path).below(self.data)
        directory.mkdir(parents=True, exist_ok=True)
        lora = None if rank is None else Lora(rank=rank)
        saved = Saved(path=path, owner="me", created=float(step), step=step, num_bytes=10, lora=lora)
        if rank is not None:
            (directory / ADAPTER_CONFIG).write_text(json.dumps({"r": rank, "lora_alpha": 32.0}))
            (directory / ADAPTER).write_bytes(f"{path} {step}".encode())
        (directory / MANIFEST).write_text(saved.model_dump_json())
        return Source(path)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(tmp_path, monkeypatch, AdaptingEngine())
    await found.weights.begin()
    return found


def path_of(number: int, name: str = "a", kind: str = "sampler_weights") -> str:
    return f"tinker://s:train:{number}/{kind}/{name}"


def content(world: World, served: Serving) -> tuple[str, float]:
    assert served.adapter is not None
    found, scale, version = world.engine.adapters[served.adapter]
    assert version == served.version
    return found.decode(), scale


async def test_adapters_of_several_models_are_there_at_once_and_nothing_is_waited_for(world: World) -> None:
    sources = [world.saves(path_of(number), step=number + 1, rank=number + 1) for number in range(3)]

    served = [await world.weights.serve(source) for source in sources]
    again = [await world.weights.serve(source) for source in sources]
    base = await world.weights.serve(Source())

    assert again == served
    assert [content(world, each) for each in served] == [(f"{path_of(n)} {n + 1}", 32.0 / (n + 1)) for n in range(3)]
    assert base == Serving(None, 0)
    assert (world.drained, world.engine.whole) == (0, [])
    told = world.weights.runs([(0, served[1].version), (5, 0)])
    assert [(each.first_token, each.path, each.step) for each in told] == [(0, path_of(1), 2), (5, None, 0)]


async def test_newer_weights_in_flight_take_the_place_of_the_models_own_alone(world: World) -> None:
    world.saves(path_of(0, "1", "ephemeral"))
    world.saves(path_of(0, "2", "ephemeral"), step=2)
    first = await world.weights.serve(Source(path_of(0, "1", "ephemeral"), "s:train:0"))
    other = await world.weights.serve(world.saves(path_of(1)))

    second = await world.weights.serve(Source(path_of(0, "2", "ephemeral"), "s:train:0"))

    assert first.adapter == second.adapter != other.adapter
    assert second.version > other.version > first.version
    assert content(world, second)[0] == f"{path_of(0, '2', 'ephemeral')} 2"
    assert [each.step for each in world.weights.runs([(0, first.version), (3, second.version)])] == [1, 2]


async def test_what_is_saved_again_under_a_name_is_sampled_from_beside_what_was_there(world: World) -> None:
    before = await world.weights.serve(world.saves(path_of(0)))
    world.weights.uses(before)

    after = await world.weights.serve(world.saves(path_of(0), step=2))

    assert after.adapter != before.adapter
    assert content(world, before)[0].endswith(" 1")
    assert content(world, after)[0].endswith(" 2")


async def test_a_model_that_trains_whole_has_the_engine_for_itself_and_the_base_comes_back(world: World) -> None:
    adapted, whole = world.saves(path_of(0)), world.saves(path_of(1, "w"), rank=None)
    first = await world.weights.serve(adapted)

    taken = await world.weights.serve(whole)
    assert taken.adapter is None
    assert (world.drained, world.engine.adapters) == (1, {})
    second = await world.weights.serve(adapted)

    assert world.drained == 2
    assert [each[0] for each in world.engine.whole] == [b"w", b"base"]
    assert second.version > taken.version > first.version
    assert content(world, second)[0].endswith(" 1")
    assert [each.step for each in world.weights.runs([(0, taken.version)])] == [7]


async def test_whole_weights_that_are_saved_again_under_a_name_are_read_again(world: World) -> None:
    first = await world.weights.serve(world.saves(path_of(0, "w"), rank=None))
    assert await world.weights.serve(Source(path_of(0, "w"))) == first

    second = await world.weights.serve(world.saves(path_of(0, "w"), step=2, rank=None))

    assert second.version > first.version
    assert len(world.engine.whole) == 2


async def test_adapters_that_nobody_samples_from_make_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_ADAPTERS", 2)
    sources = [world.saves(path_of(number)) for number in range(4)]
    used = await world.weights.serve(sources[0])
    world.weights.uses(used)
    unused = await world.weights.serve(sources[1])

    third = await world.weights.serve(sources[2])
    assert set(world.engine.adapters) == {used.adapter, third.adapter}
    world.weights.ends(used)
    fourth = await world.weights.serve(sources[3])

    assert set(world.engine.adapters) == {third.adapter, fourth.adapter}
    again = await world.weights.serve(sources[1])
    assert again.version > fourth.version > unused.version


async def test_adapters_take_no_more_memory_than_there_is_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_ADAPTER_BYTES", 25)
    for number in range(5):
        await world.weights.serve(world.saves(path_of(number)))

    assert len(world.engine.adapters) == 2


async def test_numbers_of_what_is_loaded_stay_known(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SERVED_KEPT", 2)
    first = await world.weights.serve(world.saves(path_of(0)))
    for number in range(1, 9):
        await world.weights.serve(world.saves(path_of(number)))

    assert [each.path for each in world.weights.runs([(0, first.version)])] == [path_of(0)]


async def test_a_model_that_is_replaced_while_it_is_read_is_not_there_and_leaves_nothing(world: World) -> None:
    source = world.saves(path_of(0))
    world.engine.while_loading = lambda: world.saves(path_of(0), step=2) and None

    with pytest.raises(NotFound):
        await world.weights.serve(source)

    assert world.engine.adapters == {}
    world.engine.while_loading = lambda: None
    assert content(world, await world.weights.serve(source))[0].endswith(" 2")


@pytest.mark.parametrize(("part", "error"), [(ADAPTER, ModelError), (ADAPTER_CONFIG, ModelError), (MANIFEST, NotFound)])
async def test_a_saved_model_that_lacks_a_file_is_refused(world: World, part: str, error: type[Exception]) -> None:
    source = world.saves(path_of(0))
    (SavedPath.read(path_of(0)).below(world.data) / part).unlink()

    with pytest.raises(error):
        await world.weights.serve(source)
    assert await world.weights.serve(world.saves(path_of(1)))


async def test_what_is_to_be_trained_from_is_not_sampled_from(world: World) -> None:
    with pytest.raises(InvalidRequest, match="trained from"):
        await world.weights.serve(world.saves(path_of(0, kind="weights")))


async def test_an_engine_that_takes_no_adapters_gets_them_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = World(tmp_path, monkeypatch, AdaptingEngine(takes_adapters=False))
    await other.weights.begin()

    served: list[Any] = [await other.weights.serve(other.saves(path_of(number, f"n{number}"))) for number in range(2)]

    assert [each.adapter for each in served] == [None, None]
    assert [each[0] for each in other.engine.whole] == [b"n0", b"n1"]
    assert other.drained == 2
