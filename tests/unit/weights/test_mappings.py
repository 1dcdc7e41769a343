"""Mappings that stay: they show new bytes, and keep nobody from writing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.mapped.mappings import KeptMappings

IMAGE_BYTES = 4096


@pytest.fixture
def image(tmp_path: Path) -> Iterator[WeightImage]:
    with WeightImage.create(IMAGE_BYTES, directory=tmp_path) as made:
        yield made


@pytest.fixture
def mappings() -> Iterator[KeptMappings]:
    kept = KeptMappings()
    yield kept
    kept.close()


def test_a_mapping_is_kept_and_shows_what_was_written_since(mappings: KeptMappings, image: WeightImage) -> None:
    with mappings.use((image.path, IMAGE_BYTES)) as (first,):
        pass
    with image.writing() as view:
        view[0] = 7

    with mappings.use((image.path, IMAGE_BYTES)) as (second,):
        assert second is first
        assert second[0] == 7


def test_an_image_in_use_cannot_be_written(mappings: KeptMappings, image: WeightImage) -> None:
    with mappings.use((image.path, IMAGE_BYTES)), pytest.raises(Conflict), image.writing():
        pass


def test_an_image_being_written_cannot_be_used(mappings: KeptMappings, image: WeightImage) -> None:
    with mappings.use((image.path, IMAGE_BYTES)):
        pass

    with (
        image.writing(),
        pytest.raises(WeightTransferFailed, match="being written"),
        mappings.use((image.path, IMAGE_BYTES)),
    ):
        pass


def test_a_withdrawn_image_is_missing(mappings: KeptMappings, image: WeightImage) -> None:
    with mappings.use((image.path, IMAGE_BYTES)):
        pass
    image.close()

    with pytest.raises(WeightTransferFailed, match="cannot open"), mappings.use((image.path, IMAGE_BYTES)):
        pass


def test_another_size_is_refused_and_leaves_no_lock(mappings: KeptMappings, image: WeightImage) -> None:
    with pytest.raises(WeightTransferFailed, match="the manifest says 1"), mappings.use((image.path, 1)):
        pass

    with image.writing():
        pass
