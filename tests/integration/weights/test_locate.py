"""An image in this host's shared memory: who sees it is told its name, and gets no byte of it over the network."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.files import HOST_ID, SHARED_MEMORY
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.mapped import locate as locate_module
from flotilla.shared.weights.mapped.locate import IMAGE, ImageLocator, LocatedImage
from tests.integration.weights.processes import an_image
from tests.integration.weights.test_pull import TOKEN, a_server

NOWHERE = "http://127.0.0.1:1/v1/weights/3"


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=1) as made:
        yield made


@pytest.mark.parametrize("is_mapped", [False, True], ids=["by path", "mapped"])
async def test_who_sees_the_image_is_told_its_name(image: WeightImage, is_mapped: bool) -> None:
    checksum = image.checksum()
    async with a_server() as server:
        server.images.publish(3, image if is_mapped else image.path, checksum)

        located = await ImageLocator(Credentials(TOKEN))(server.url(3), checksum)

    assert located == LocatedImage(image.path, image.image_bytes, checksum)
    with image.writing():  # nobody holds it
        pass


async def test_an_image_is_found_at_a_rollout_when_the_trainer_is_gone(image: WeightImage) -> None:
    checksum = image.checksum()
    async with a_server() as server:
        server.images.publish(3, image.path, checksum)
        locate = ImageLocator(Credentials(TOKEN))

        located = await locate(NOWHERE, checksum, [server.url(3)])
        believed = await locate(NOWHERE, None, [server.url(3)])

    assert located is not None
    assert believed is None, "without a checksum only the trainer is asked"


async def test_on_another_host_there_is_nothing_to_find(image: WeightImage, monkeypatch: pytest.MonkeyPatch) -> None:
    checksum = image.checksum()
    async with a_server() as server:
        server.images.publish(3, image.path, checksum)
        monkeypatch.setattr(locate_module, "shared_memory_identity", lambda: "another boot/26/0")

        assert await ImageLocator(Credentials(TOKEN))(server.url(3), checksum) is None


async def test_processes_with_other_names_of_the_host_share_nothing(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOST_ID, "a")
    mine = locate_module.shared_memory_identity()
    monkeypatch.setattr(locate_module, "shared_memory_identity", lambda: mine)
    monkeypatch.setenv(HOST_ID, "b")
    checksum = image.checksum()
    async with a_server() as server:
        server.images.publish(3, image.path, checksum)

        assert await ImageLocator(Credentials(TOKEN))(server.url(3), checksum) is None


async def test_an_image_elsewhere_is_not_named(tmp_path: Path) -> None:
    with WeightImage.create(4096, directory=tmp_path) as image:
        checksum = image.checksum()
        async with a_server() as server:
            server.images.publish(3, image.path, checksum)

            assert await ImageLocator(Credentials(TOKEN))(server.url(3), checksum) is None


async def test_an_image_whose_file_is_gone_is_not_named(image: WeightImage) -> None:
    checksum = image.checksum()
    async with a_server() as server:
        server.images.publish(3, image, checksum)
        image.path.unlink()

        assert await ImageLocator(Credentials(TOKEN))(server.url(3), checksum) is None


async def test_who_is_not_let_in_is_told_nothing(image: WeightImage) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)

        assert await ImageLocator(Credentials("wrong"))(server.url(3), None) is None


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("../../etc/passwd", "1"),
        ("flotilla-weights-1-ab.safetensors/../../etc/passwd", "1"),
        ("flotilla-weights-1-00.partial", "1"),
        ("flotilla-weights-1-00.safetensors", "1"),
        ("LINK", "1"),
        ("REAL", "2"),
    ],
    ids=["path", "path behind a name", "partial", "missing", "link", "another checksum"],
)
async def test_a_hostile_source_can_name_no_other_file(image: WeightImage, tmp_path: Path, name: str, tag: str) -> None:
    link = SHARED_MEMORY / f"flotilla-weights-{'9' * 9}-{tmp_path.name.encode().hex()[-12:]}.safetensors"
    link.symlink_to(image.path)
    try:
        named = {"LINK": link.name, "REAL": image.path.name}.get(name, name)
        transport = httpx.MockTransport(lambda _: httpx.Response(204, headers={IMAGE: named, "etag": f'"{tag}"'}))

        assert await ImageLocator(Credentials(TOKEN), transport=transport)(NOWHERE, "1") is None
    finally:
        link.unlink()


async def test_a_source_that_never_answers_holds_nobody_up(image: WeightImage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate_module, "LOCATE_SECONDS", 0.2)
    checksum = image.checksum()

    async def hold(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    started = time.monotonic()
    assert await ImageLocator(Credentials(TOKEN), transport=httpx.MockTransport(hold))(NOWHERE, checksum) is None
    assert time.monotonic() - started < 10
