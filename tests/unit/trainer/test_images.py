"""The files of weight images may be deleted under a running fleet: what is offered can still be pulled."""

from pathlib import Path

import pytest
import torch
from torch import nn

from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.errors import NotFound
from flotilla.shared.weights.image.digests import combined, of_tensor
from flotilla.shared.weights.pull.server import PublishedImages


def a_pool(directory: Path) -> ImagePool:
    return ImagePool(FlatParameters(nn.Linear(4, 4)), directory=directory)


async def test_an_offered_image_is_served_although_its_file_was_deleted(tmp_path: Path) -> None:
    pool, published = a_pool(tmp_path), PublishedImages()
    served = ServedImages(published)
    path = pool.snapshot()
    content = path.read_bytes()
    await served.offer(3, path, pool.manifest(path, 3).checksum)

    path.unlink()

    image, _ = await published.open(3)
    assert bytes(image.view) == content
    image.close()
    await served.withdraw()
    with pytest.raises(NotFound):
        await published.open(3)
    pool.close()


async def test_an_image_that_is_deleted_before_it_is_offered_is_written_again(tmp_path: Path) -> None:
    pool = a_pool(tmp_path)
    path = pool.snapshot()
    content = path.read_bytes()
    assert pool.renew(path) == path, "it is there"

    path.unlink()
    renewed = pool.renew(path)

    assert renewed != path
    assert renewed.read_bytes() == content
    pool.close()


async def test_no_snapshot_is_taken_into_a_file_that_nobody_can_open(tmp_path: Path) -> None:
    pool = a_pool(tmp_path)
    first, second = pool.snapshot(), pool.snapshot()
    for path in (first, second):
        path.unlink()

    assert all(pool.snapshot().exists() for _ in range(4))
    pool.close()


def test_a_manifest_says_what_an_engine_finds_that_has_loaded_it(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    pool = ImagePool(FlatParameters(layer), directory=tmp_path, served_as=torch.bfloat16)

    manifest = pool.manifest(pool.snapshot(), 3)

    held = {name: tensor.detach().to(torch.bfloat16) for name, tensor in layer.named_parameters()}
    assert manifest.digest == combined({name: of_tensor(tensor) for name, tensor in held.items()})
    pool.close()
