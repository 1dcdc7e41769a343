"""Encoded images: what is read of one before any of its pixels is, and its pixels under a limit.

Images are untrusted: a few bytes of a file can declare billions of pixels. Its size is read from its header,
and held against ``MOST_PIXELS``, before it is decoded. Pillow is imported only where an image is read.
"""

import hashlib
import io
import warnings
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from flotilla.shared.errors import DataError

MOST_PIXELS = 64_000_000
"""Pixels of an encoded image; one of more is refused unread."""
MOST_BYTES = 32 * 1024 * 1024
"""Bytes of an encoded image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded: formats of single pictures whose decoders are Pillow's own."""


def digest_of(data: bytes) -> str:
    """Name an image by its content."""
    return hashlib.sha256(data).hexdigest()


def size_of(data: bytes) -> tuple[int, int]:
    """Read width and height in pixels from the header.

    Raises:
        DataError: it is no image of a known format, it is too large, or Pillow is not installed.
    """
    with _opened(io.BytesIO(data), len(data)) as image:
        width, height = image.size
    return int(width), int(height)


def check_file(path: Path) -> None:
    """Check a file with an image by its header.

    Raises:
        DataError: as ``size_of``; or it is not there.
    """
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):  # Opening a pipe would wait for its writer.
            raise DataError(f"the image {path} is no file", path=str(path))
        num_bytes = found.st_size
        with path.open("rb") as file, _opened(file, num_bytes):
            pass
    except OSError as error:
        raise DataError(f"the image {path} cannot be read: {error.strerror}", path=str(path)) from error


def pixels_of(data: bytes) -> Any:
    """Decode an image as a Pillow image of mode RGB, turned as its EXIF data says; transparency becomes white.

    Raises:
        DataError: as ``size_of``; or its data are damaged.
    """
    from PIL import ImageOps

    with _opened(io.BytesIO(data), len(data)) as image:
        try:
            turned = ImageOps.exif_transpose(image)
            if turned.mode in {"RGBA", "LA", "PA"} or "transparency" in turned.info:
                return _on_white(turned.convert("RGBA"))
            return turned.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise DataError(f"an image of {len(data)} bytes cannot be decoded: {error}") from error


def plain_of(data: bytes) -> bytes:
    """Encode an image so that decoding gives what ``pixels_of`` does; one already encoded so is returned.

    Raises:
        DataError: as ``pixels_of``.
    """
    with _opened(io.BytesIO(data), len(data)) as image:
        if image.format == "PNG" and image.mode == "RGB" and not image.info and not image.getexif():
            return data
    written = io.BytesIO()
    pixels_of(data).save(written, "PNG", compress_level=1)
    return written.getvalue()


def _on_white(image: Any) -> Any:
    from PIL import Image

    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, image).convert("RGB")


def _opened(file: IO[bytes], num_bytes: int) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("images need Pillow: install flotilla[images]") from None
    if num_bytes > MOST_BYTES:
        raise DataError(f"an image has {num_bytes} bytes, and may have {MOST_BYTES}")
    try:
        with warnings.catch_warnings():
            # Pillow warns of what is refused below, by our limit.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise DataError(
            f"{num_bytes} bytes are no image that can be read ({', '.join(FORMATS)}): {type(error).__name__}"
        ) from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise DataError(f"an image has {width} x {height} pixels, and may have {MOST_PIXELS}")
    return image
