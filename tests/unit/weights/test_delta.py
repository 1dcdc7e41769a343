"""A patch and its base make the new image bit by bit, in few bytes, or are refused."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.delta import apply_patch, changed_blocks, patch_bytes, write_patch

BLOCK = 16


def make_patch(base: bytes, image: bytes, block_bytes: int = BLOCK) -> bytearray:
    changed = changed_blocks(base, image, block_bytes)
    patch = bytearray(patch_bytes(changed, len(image), block_bytes))
    write_patch(memoryview(patch), image, changed, block_bytes)
    return patch


@given(st.integers(1, 5000), st.lists(st.integers(0, 4999), max_size=20))
def test_base_and_patch_make_the_image(size: int, places: list[int]) -> None:
    base = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    changed = bytearray(base)
    for place in places:
        changed[place % size] ^= 255
    image = bytes(changed)
    result = bytearray(size)

    checksum = apply_patch(make_patch(base, image), base, memoryview(result), BLOCK)

    assert bytes(result) == image
    assert checksum == xxhash.xxh3_64_hexdigest(image)


def test_blocks_are_compared_bit_by_bit() -> None:
    base = np.array([0.0, 1.0, np.nan, 2.0] * 4, np.float32)
    image = base.copy()
    image[0] = -0.0

    assert changed_blocks(base.tobytes(), image.tobytes(), BLOCK).tolist() == [True, False, False, False]


def test_a_twentieth_of_the_blocks_takes_a_twentieth_of_the_bytes() -> None:
    block, num_blocks = 64 << 10, 400
    base = bytes(block * num_blocks)
    image = bytearray(base)
    for number in range(0, num_blocks, 20):
        image[number * block + 5] = 1

    patch = make_patch(base, bytes(image), block)

    assert len(patch) <= 0.0501 * len(image)


@pytest.mark.parametrize("damage", ["cut", "count", "bitmap"])
def test_a_patch_that_does_not_fit_is_refused(damage: str) -> None:
    base = bytes(1000)
    patch = make_patch(base, bytes(500) + b"\1" + bytes(499))
    if damage == "cut":
        patch = patch[:-1]
    elif damage == "count":
        patch[0] += 1
    else:
        patch[8] ^= 128

    with pytest.raises(WeightTransferFailed, match="does not fit"):
        apply_patch(patch, base, memoryview(bytearray(1000)), BLOCK)


def test_images_of_different_sizes_are_no_versions_of_each_other() -> None:
    with pytest.raises(ValueError, match="not versions"):
        changed_blocks(bytes(32), bytes(48), BLOCK)
