"""What every engine promises of an image on its way: it serves when it is whole and asked for, and never before."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla.services.rollout.engines.base import Completion, DiscardsWeights, Engine, WeightTransfer
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Unavailable, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.conftest import HERE, LONG, maker_of, until_running
from tests.contract.engine.requests import a_request

PIECES = 5


@pytest.fixture(scope="module")
def overlap_load() -> bool:
    return True


@pytest.fixture(scope="module", params=HERE)
def make_engine(request: pytest.FixtureRequest, model_path: Path, overlap_load: bool) -> Callable[[], Engine]:
    """Real servers read images whole, as those in memory do: they have nothing to add."""
    return maker_of(request.param, model_path, overlap_load)


@pytest.fixture
def arriving(image: Path, tmp_path: Path) -> Path:
    """A file of the image's size, into which it is received."""
    path = tmp_path / "arriving.safetensors"
    path.write_bytes(bytes(image.stat().st_size))
    return path


def receive(transfer: WeightTransfer, content: bytes, path: Path, pieces: int = PIECES) -> None:
    """Write the first pieces of an image into its file, and say so."""
    size = -(-len(content) // PIECES)
    with path.open("r+b", buffering=0) as file:
        for start in range(0, size * pieces, size):
            file.write(content[start : start + size])
            transfer.advance(file.tell())


async def sampled(engine: Engine) -> Completion:
    [completion] = await engine.generate(a_request(seeds=(7,), max_new_tokens=12))
    return completion


async def under(engine: Engine, image: Path, version: int) -> list[int]:
    """What is sampled when a whole image was loaded, with nothing ahead of it."""
    await engine.load_weights(image, version, OnWeightUpdate.DRAIN)
    return (await sampled(engine)).token_ids.tolist()


def check_same_weights(engine: Engine, completion: Completion, expected: list[int]) -> None:
    """The same weights give the same tokens of a seed; those of the scripted engine depend on the version alone."""
    if EngineCapability.SEEDED_SAMPLING in engine.capabilities and not isinstance(engine, ScriptedEngine):
        assert completion.token_ids.tolist() == expected


@asynccontextmanager
async def sampling(engine: Engine) -> AsyncIterator[None]:
    """Keep a sample in flight."""
    running = asyncio.create_task(engine.generate(a_request(request_id="long", max_new_tokens=LONG)))
    await until_running(engine, running=1, new_tokens=5)
    try:
        yield
    finally:
        await engine.abort("long")
        await running


async def test_an_image_that_came_piece_by_piece_serves_once_it_is_asked_for(
    engine: Engine, image: Path, arriving: Path
) -> None:
    expected = await under(engine, image, 4)
    async with sampling(engine):
        transfer = engine.begin_transfer(arriving, 5)
        receive(transfer, image.read_bytes(), arriving)
        assert (await sampled(engine)).versions == ((0, 4),)
        transfer.complete()
        assert (await sampled(engine)).versions == ((0, 4),)

        await engine.load_weights(arriving, 5, OnWeightUpdate.CONTINUE)

    completion = await sampled(engine)
    assert completion.versions == ((0, 5),)
    check_same_weights(engine, completion, expected)


async def test_an_image_that_is_whole_already_may_be_announced_at_once(engine: Engine, image: Path) -> None:
    transfer = engine.begin_transfer(image, 4)
    transfer.complete()

    await engine.load_weights(image, 4, OnWeightUpdate.DRAIN)

    assert (await sampled(engine)).versions == ((0, 4),)


@pytest.mark.parametrize("pieces", [0, 3, PIECES])
async def test_an_aborted_transfer_changes_nothing_and_the_next_one_serves(
    engine: Engine, image: Path, arriving: Path, pieces: int
) -> None:
    expected = await under(engine, image, 4)
    wrong = bytes(reversed(image.read_bytes()))
    failed = engine.begin_transfer(arriving, 5)
    receive(failed, wrong, arriving, pieces)

    failed.abort("connection closed by peer")
    failed.advance(len(wrong))
    failed.complete()
    failed.abort("again")

    assert (await sampled(engine)).versions == ((0, 4),)
    again = engine.begin_transfer(arriving, 5)
    receive(again, image.read_bytes(), arriving)
    again.complete()
    await engine.load_weights(arriving, 5, OnWeightUpdate.DRAIN)
    completion = await sampled(engine)
    assert completion.versions == ((0, 5),)
    check_same_weights(engine, completion, expected)


async def test_another_image_may_be_loaded_than_the_one_that_arrives(
    engine: Engine, image: Path, arriving: Path
) -> None:
    expected = await under(engine, image, 4)
    transfer = engine.begin_transfer(arriving, 6)
    receive(transfer, image.read_bytes(), arriving, 2)

    await engine.load_weights(image, 5, OnWeightUpdate.DRAIN)

    completion = await sampled(engine)
    assert completion.versions == ((0, 5),)
    check_same_weights(engine, completion, expected)
    transfer.abort("its publication was aborted")


async def test_a_later_transfer_takes_the_place_of_an_earlier_one(engine: Engine, image: Path, arriving: Path) -> None:
    earlier = engine.begin_transfer(arriving, 4)
    receive(earlier, image.read_bytes(), arriving, 2)
    later = engine.begin_transfer(image, 5)
    later.complete()
    earlier.abort("another version is published")

    await engine.load_weights(image, 5, OnWeightUpdate.DRAIN)

    assert (await sampled(engine)).versions == ((0, 5),)


async def test_a_transfer_outlives_its_engine_in_silence(
    make_engine: Callable[[], Engine], image: Path, arriving: Path
) -> None:
    engine = make_engine()
    await engine.start()
    ended, open_still = engine.begin_transfer(arriving, 4), engine.begin_transfer(arriving, 5)
    ended.abort("connection closed by peer")

    await engine.close()

    for transfer in (ended, open_still):
        transfer.advance(10)
        transfer.complete()
        transfer.abort("the engine is gone")
    with pytest.raises(WorkerDied):
        engine.begin_transfer(image, 6)


def that_discards(engine: Engine) -> DiscardsWeights:
    """Leave a test out for an engine that cannot read weights over those that it has."""
    if not isinstance(engine, DiscardsWeights):
        pytest.skip("the engine does not discard weights")
    return engine


async def test_nothing_is_sampled_between_discarded_weights_and_the_next(
    engine: Engine, image: Path, arriving: Path
) -> None:
    discarding, expected = that_discards(engine), await under(engine, image, 4)
    running = asyncio.create_task(engine.generate(a_request(request_id="long", max_new_tokens=LONG)))
    await until_running(engine, running=1, new_tokens=5)

    await discarding.discard_weights()
    await discarding.discard_weights()

    assert [each.finish_reason for each in await running] == [FinishReason.ABORTED]
    with pytest.raises(Unavailable):
        await sampled(engine)
    transfer = engine.begin_transfer(arriving, 5)
    receive(transfer, image.read_bytes(), arriving)
    with pytest.raises(Unavailable):
        await sampled(engine)
    transfer.complete()
    await engine.load_weights(arriving, 5, OnWeightUpdate.INTERRUPT)
    completion = await sampled(engine)
    assert completion.versions == ((0, 5),)
    check_same_weights(engine, completion, expected)


@pytest.mark.parametrize("pieces", [0, 3, PIECES])
async def test_what_was_read_over_discarded_weights_and_aborted_leaves_nothing_behind(
    engine: Engine, image: Path, arriving: Path, pieces: int
) -> None:
    discarding, expected = that_discards(engine), await under(engine, image, 4)
    await discarding.discard_weights()
    failed = engine.begin_transfer(arriving, 5)
    receive(failed, image.read_bytes()[:-4] + bytes(4), arriving, pieces)
    failed.abort("its checksum is wrong")
    missing = arriving.with_name("missing.safetensors")
    with pytest.raises(WeightTransferFailed):
        await engine.load_weights(missing, 5, OnWeightUpdate.DRAIN)
    with pytest.raises(Unavailable):
        await sampled(engine)

    await engine.load_weights(image, 6, OnWeightUpdate.DRAIN)

    completion = await sampled(engine)
    assert completion.versions == ((0, 6),)
    check_same_weights(engine, completion, expected)


async def test_an_engine_that_discarded_its_weights_wakes_with_those_that_it_began_with(
    engine: Engine, image: Path, arriving: Path
) -> None:
    discarding, before = that_discards(engine), await sampled(engine)
    await discarding.discard_weights()
    transfer = engine.begin_transfer(arriving, 5)
    receive(transfer, image.read_bytes(), arriving, 3)

    await engine.wake()

    after = await sampled(engine)
    assert after.versions == ((0, 3),)
    check_same_weights(engine, after, before.token_ids.tolist())
    transfer.abort("nobody wants it")
