"""StagedImage images: what is in use or waits is never touched, and a trainer's image is held no longer than needed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from flotilla.services.rollout.weights.staged_images import StagedImage, StagedImages
from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.weights.image.files import lock_shared
from flotilla.shared.weights.image.image import WeightImage


@pytest.fixture
async def images() -> AsyncIterator[StagedImages]:
    made = StagedImages()
    yield made
    await made.close()


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[WeightImage]:
    with WeightImage.create(64, directory=tmp_path) as image:
        yield image


def is_free(image: WeightImage) -> bool:
    try:
        with image.writing():
            return True
    except Conflict:
        return False


async def test_an_image_that_waits_or_is_used_is_not_given_away(images: StagedImages) -> None:
    async with images.own(64) as waiting:
        images.keep(StagedImage(1, "c", waiting))
    async with images.own(64) as used, images.own(64) as third:
        assert len({id(waiting), id(used), id(third)}) == 3
    async with images.own(64) as again:
        assert again in (used, third)


async def test_an_own_image_that_is_free_is_given_away_under_another_name(images: StagedImages) -> None:
    async with images.own(64) as waiting, images.own(64) as free:
        images.keep(StagedImage(1, "c", waiting))
        name = free.path
        knowing = name.open("rb", buffering=0)

        assert images.give_away(64) is None

    assert images.give_away(128) is None
    assert images.give_away(64) is free
    assert images.give_away(64) is None
    assert not name.exists() and free.path.exists()
    with knowing, pytest.raises(WeightTransferFailed, match="withdrawn"):
        lock_shared(knowing, name)  # opened while it still had that name
    again = await images.adopt(free.hand_over())
    assert images.give_away(64) is again
    again.close()


async def test_an_image_that_was_lent_and_given_back_stays_mapped(images: StagedImages) -> None:
    async with images.own(64) as free:
        pass
    lent = images.give_away(64)
    assert lent is free
    mapped = lent.mapped

    path = lent.give_back()
    again = await images.adopt(path)

    assert again is free and again.is_owner
    assert again.mapped is mapped
    await images.close()
    assert not path.exists()


async def test_an_image_that_another_rollout_still_reads_is_not_given_away(images: StagedImages) -> None:
    async with images.own(64) as free:
        pass
    with WeightImage.attach(free.path):
        assert images.give_away(64) is None

    free.path.unlink()
    assert images.give_away(64) is None


async def test_an_image_of_another_size_is_replaced(images: StagedImages) -> None:
    async with images.own(64) as old:
        pass
    async with images.own(128) as new:
        assert new.image_bytes == 128
        assert not old.path.exists()


async def test_a_mapped_image_is_held_until_it_is_replaced_as_the_spare(
    images: StagedImages, theirs: WeightImage
) -> None:
    async with images.mapped(theirs.path, 64) as image:
        assert not is_free(theirs)
        images.keep(StagedImage(1, "c", image))
    assert not is_free(theirs)

    images.keep(None)

    assert is_free(theirs)
    assert theirs.path.exists()


async def test_a_spare_that_is_being_loaded_is_held_until_that_is_done(
    images: StagedImages, theirs: WeightImage
) -> None:
    async with images.mapped(theirs.path, 64) as image:
        images.keep(StagedImage(1, "c", image))
    with images.using(image):
        images.keep(None)
        assert not is_free(theirs)

    assert is_free(theirs)


async def test_an_image_that_was_not_kept_is_let_go(images: StagedImages, theirs: WeightImage) -> None:
    with pytest.raises(ValueError, match="wrong checksum"):
        async with images.mapped(theirs.path, 64):
            raise ValueError("wrong checksum")

    assert is_free(theirs)


@pytest.mark.parametrize(("image_bytes", "message"), [(65, "manifest says 65"), (64, "being written")])
async def test_an_image_that_is_not_as_told_is_refused(
    images: StagedImages, theirs: WeightImage, image_bytes: int, message: str
) -> None:
    if image_bytes == 64:
        with theirs.writing(), pytest.raises(WeightTransferFailed, match=message):
            async with images.mapped(theirs.path, 64):
                pass
    else:
        with pytest.raises(WeightTransferFailed, match=message):
            async with images.mapped(theirs.path, image_bytes):
                pass
    assert is_free(theirs)


async def test_the_same_image_is_mapped_once(images: StagedImages, theirs: WeightImage) -> None:
    async with images.mapped(theirs.path, 64) as first:
        pass
    async with images.mapped(theirs.path, 64) as second:
        assert second is first


async def test_withdrawn_images_are_forgotten(images: StagedImages, tmp_path: Path) -> None:
    gone = WeightImage.create(64, directory=tmp_path)
    async with images.mapped(gone.path, 64) as image:
        pass
    gone.close()
    with WeightImage.create(64, directory=tmp_path) as other:
        async with images.mapped(other.path, 64):
            assert image.is_closed


async def test_an_image_that_two_want_at_once_is_mapped_once(images: StagedImages, theirs: WeightImage) -> None:
    async def wanted() -> WeightImage:
        async with images.mapped(theirs.path, 64) as image:
            return image

    first, second = await asyncio.gather(wanted(), wanted())

    assert first is second
    await images.close()
    assert is_free(theirs), "one that nobody closes would be held against its owner"
