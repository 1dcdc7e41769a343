"""Images in a directory as a source: whatever is wrong with a file, others give the weights, and they are right."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.shared.errors import NotFound, WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.pull import client as pull_client
from flotilla.shared.weights.pull import kept_images
from flotilla.shared.weights.pull import source as missing_module
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.kept_images import FileReader, KeptImages, kept_path
from flotilla.shared.weights.pull.sender import InlineSender
from flotilla.shared.weights.pull.server import PublishedImages
from tests.integration.weights.processes import an_image
from tests.integration.weights.test_pull import DEADLINE, TOKEN, a_server


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=4) as made:
        yield made


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_module, "RANGE_BYTES", 1 << 20)
    monkeypatch.setattr(pull_client, "STALL_SECONDS", 0.3)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = tmp_path / "target"
    made.mkdir()
    return made


async def pulled(image: WeightImage, kept: Path, target: Path, url: str | None = None) -> Path:
    pull = WeightPuller(Credentials(TOKEN))
    return await pull(url, 3, target, DEADLINE, checksum=image.checksum(), kept_in=kept)


async def test_an_image_that_is_kept_is_read_where_there_is_no_trainer(
    image: WeightImage, kept: Path, target: Path
) -> None:
    KeptImages(kept, InlineSender()).write(3, image.checksum(), image)

    path = await pulled(image, kept, target)

    assert path.read_bytes() == image.view
    assert list(target.iterdir()) == [path]


async def test_the_directory_and_the_trainer_give_a_part_each(image: WeightImage, kept: Path, target: Path) -> None:
    KeptImages(kept, InlineSender()).write(3, image.checksum(), image)
    async with a_server() as server:
        server.images.publish(3, image.path)
        # The file is read while the trainer thinks about its first answer.
        path = await pulled(image, kept, target, server.url(3))

        assert path.read_bytes() == image.view
        assert len(server.faults.ranges) < image.image_bytes >> 20


def missing(path: Path, image: WeightImage) -> None:
    pass


def cut_off(path: Path, image: WeightImage) -> None:
    path.write_bytes(image.view[: 2 << 20])


def empty(path: Path, image: WeightImage) -> None:
    path.touch()


def of_another_version(path: Path, image: WeightImage) -> None:
    """Whole, of the right size, and of other weights."""
    with an_image(num_megabytes=4, seed=1) as other:
        path.write_bytes(other.view)


def longer(path: Path, image: WeightImage) -> None:
    layout = ImageLayout.of({"weight": ((8 << 20,), "U8")})
    path.write_bytes(layout.header + bytes(8 << 20))


def garbage(path: Path, image: WeightImage) -> None:
    path.write_bytes(os.urandom(image.image_bytes))


def nested(path: Path, image: WeightImage) -> None:
    text = b"[" * 200_000
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(1 << 20))


def link(path: Path, image: WeightImage) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path, image: WeightImage) -> None:
    os.mkfifo(path)


def folder(path: Path, image: WeightImage) -> None:
    path.mkdir()


WRONG = [missing, cut_off, empty, of_another_version, longer, garbage, nested, link, pipe, folder]


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_file_that_is_wrong_costs_nothing_but_time(
    image: WeightImage, kept: Path, target: Path, wrong: Callable[[Path, WeightImage], None]
) -> None:
    kept.mkdir()
    wrong(kept_path(kept, 3, image.checksum()), image)
    async with a_server() as server:
        server.images.publish(3, image.path)

        path = await pulled(image, kept, target, server.url(3))

    assert path.read_bytes() == image.view
    assert list(target.iterdir()) == [path]


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_file_that_is_wrong_is_never_served(
    image: WeightImage, kept: Path, target: Path, wrong: Callable[[Path, WeightImage], None]
) -> None:
    kept.mkdir()
    wrong(kept_path(kept, 3, image.checksum()), image)

    with pytest.raises(NotFound if wrong is missing else WeightTransferFailed):
        await asyncio.wait_for(pulled(image, kept, target), DEADLINE / 2)

    assert list(target.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "preadv"])
async def test_a_file_system_that_hangs_holds_nobody_up_and_writes_nothing_later(
    image: WeightImage, kept: Path, target: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    KeptImages(kept, InlineSender()).write(3, image.checksum(), image)
    monkeypatch.setattr(kept_images, "OPEN_SECONDS", 0.3)
    may_go_on, readers = threading.Event(), []
    real, close = getattr(os, call), FileReader.stop

    def hang(*args: object, **facts: object) -> object:
        path = args[0] if call == "open" else os.readlink(f"/proc/self/fd/{args[0]}")
        if not str(path).startswith(str(kept)):
            return real(*args, **facts)
        may_go_on.wait(DEADLINE)
        if call == "open":
            return real(*args, **facts)
        for buffer in args[1]:  # type: ignore[attr-defined]
            buffer[:] = bytes(len(buffer))
        return sum(map(len, args[1]))  # type: ignore[call-overload]

    def stop(reader: FileReader) -> None:
        readers.append(reader)
        close(reader)

    monkeypatch.setattr(FileReader, "stop", stop)
    monkeypatch.setattr(kept_images.os, call, hang)
    async with a_server() as server:
        server.images.publish(3, image.path)
        started = time.monotonic()

        path = await pulled(image, kept, target, server.url(3))

        assert time.monotonic() - started < DEADLINE / 2
    may_go_on.set()
    monkeypatch.undo()
    assert readers
    await asyncio.to_thread(_join, "weights from a directory")
    assert path.read_bytes() == image.view


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(DEADLINE)


def test_the_newest_two_are_kept_and_what_was_left_half_is_removed(image: WeightImage, kept: Path) -> None:
    images = KeptImages(kept, InlineSender())
    kept.mkdir()
    (kept / "2-00.safetensors.abcd1234").touch()
    (kept / "notes.txt").touch()

    for version in (3, 4, 6):
        images.write(version, "ab", image)

    assert {path.name for path in kept.iterdir()} == {"4-ab.safetensors", "6-ab.safetensors", "notes.txt"}
    assert kept_path(kept, 6, "ab").stat().st_mode & 0o777 == 0o600
    images.clear()
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]


def test_versions_after_a_step_back_replace_those_that_were_given_up(image: WeightImage, kept: Path) -> None:
    images = KeptImages(kept, InlineSender())
    for version, checksum in ((4, "aa"), (5, "aa"), (6, "aa"), (5, "bb")):
        images.write(version, checksum, image)

    assert {path.name for path in kept.iterdir()} == {"5-bb.safetensors"}
    images.write(6, "bb", image)
    assert {path.name for path in kept.iterdir()} == {"5-bb.safetensors", "6-bb.safetensors"}


async def test_a_service_writes_what_it_offers_and_removes_it_at_the_end(image: WeightImage, kept: Path) -> None:
    served = ServedImages(PublishedImages(), InlineSender())
    served.keep_in(kept)
    path = kept_path(kept, 3, image.checksum())

    await served.offer(3, image.path, image.checksum())

    async with asyncio.timeout(DEADLINE):
        while not path.exists():
            await asyncio.sleep(0.005)
    assert path.read_bytes() == image.view
    await served.withdraw()
    assert path.exists(), "another trainer goes on, and rollouts may join meanwhile"
    served.keep_in(kept)
    await served.withdraw(is_over=True)
    assert not kept.exists()


async def test_a_directory_that_cannot_be_written_keeps_nobody_from_training(
    image: WeightImage, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    served = ServedImages(PublishedImages(), InlineSender())
    served.keep_in(tmp_path / "file" / "weights")

    await served.offer(3, image.path, image.checksum())

    await served.withdraw()
