import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from flotilla.shared.errors import DataError
from flotilla.shared.vision.files import MOST_BYTES, check_file, pixels_of, plain_of, size_of


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def a_bomb(side: int) -> bytes:
    """Write a PNG of so many pixels on each side in a hundred bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_a_picture_is_decoded_as_rgb(form: str) -> None:
    data = encoded(Image.new("RGB", (30, 20), (200, 10, 10)), form)

    assert size_of(data) == (30, 20)
    assert pixels_of(data).mode == "RGB"


@pytest.mark.parametrize("side", [9_000, 12_000, 100_000])
@pytest.mark.parametrize("read", [size_of, pixels_of])
def test_more_pixels_than_a_picture_may_have_are_refused_unread(read: Callable[[bytes], object], side: int) -> None:
    with pytest.raises(DataError, match=r"x .* pixels|DecompressionBomb"):
        read(a_bomb(side))


def test_more_bytes_than_a_picture_may_have_are_refused() -> None:
    with pytest.raises(DataError, match=str(MOST_BYTES)):
        size_of(b"\x89PNG" + bytes(MOST_BYTES))


@pytest.mark.parametrize("data", [b"", b"<svg/>", encoded(Image.new("RGB", (8, 8)), "TIFF")])
def test_what_is_no_picture_of_a_known_format_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="no image"):
        size_of(data)


def test_a_damaged_picture_is_refused() -> None:
    data = encoded(Image.effect_noise((64, 64), 90).convert("RGB"))

    with pytest.raises(DataError, match="cannot be decoded"):
        pixels_of(data[: len(data) // 2])


def test_transparency_becomes_white() -> None:
    assert pixels_of(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))).getpixel((1, 1)) == (255, 255, 255)


def test_a_photograph_is_turned_as_the_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6

    assert pixels_of(encoded(Image.new("RGB", (30, 20)), "JPEG", exif=exif)).size == (20, 30)


def test_a_pipe_is_no_picture_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "picture.png")

    with pytest.raises(DataError, match="is no file"):
        check_file(tmp_path / "picture.png")


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.effect_noise((12, 8), 90).convert("RGB"), "JPEG", exif=exif)


def see_through() -> bytes:
    noise = Image.effect_noise((12, 8), 90)
    return encoded(Image.merge("RGBA", (noise, noise, noise, noise)))


@pytest.mark.parametrize("data", [turned(), see_through(), encoded(Image.effect_noise((12, 8), 90), "GIF")])
def test_a_plain_picture_is_decoded_by_anybody_as_it_is_seen_here(data: bytes) -> None:
    with Image.open(io.BytesIO(plain_of(data))) as found:
        assert (found.format, found.mode) == ("PNG", "RGB")
        assert found.tobytes() == pixels_of(data).tobytes()


def test_a_picture_that_is_plain_already_stays_what_it_is() -> None:
    data = encoded(Image.effect_noise((12, 8), 90).convert("RGB"))

    assert plain_of(data) is data
