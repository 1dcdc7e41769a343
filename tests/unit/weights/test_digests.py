"""A digest is of a tensor's values, whatever their layout: one other bit changes it, and so does another order."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.shared.weights.image import digests
from flotilla.shared.weights.image.digests import combined, multipliers, of_sums, of_tensor, row_sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((6, 8), (5, 7), (9,), (), (2, 3, 5))


def a_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def naive(tensor: Tensor) -> int:
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    total = 0
    for row, values in enumerate(rows):
        data = values.contiguous().view(torch.uint8).numpy().tobytes()
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        terms = [(w ^ w >> 29) * p for w, p in zip(words, multipliers(0, len(words)).tolist(), strict=True)]
        total += sum(terms) * int(multipliers(1 << 32, row + 1)[row])
    return total % (1 << 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_sum_that_it_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = a_tensor(shape, dtype)

    assert of_tensor(tensor) == naive(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_counts(dtype: torch.dtype) -> None:
    tensor = a_tensor((3, 5), dtype)
    found = {of_tensor(tensor)}
    data = tensor.view(torch.uint8).view(-1)
    for place in range(data.shape[0]):
        for bit in range(8):
            data[place] ^= 1 << bit
            found.add(of_tensor(tensor))
            data[place] ^= 1 << bit

    assert len(found) == 8 * data.shape[0] + 1


def test_two_changes_do_not_cancel() -> None:
    tensor = a_tensor((8, 8), torch.float32)
    changed = tensor.clone()
    changed[0, 1], changed[5, 3] = -changed[0, 1], -changed[5, 3]

    assert len({of_tensor(each) for each in (tensor, changed, -tensor)}) == 3


def test_order_counts() -> None:
    tensor = a_tensor((4, 6), torch.float32)

    others = [tensor[[1, 0, 2, 3]], tensor[:, [1, 0, 2, 3, 4, 5]], tensor.t().contiguous(), tensor.reshape(6, 4)]
    assert of_tensor(tensor) not in [of_tensor(each) for each in others]
    assert combined({"a": 1, "b": 2}) != combined({"a": 2, "b": 1})


def test_rows_that_lie_elsewhere_are_digested_in_place() -> None:
    fused, order = a_tensor((12, 7), torch.bfloat16), torch.randperm(12, generator=torch.Generator().manual_seed(2))

    assert of_sums(row_sums(fused)[order[:5].numpy()]) == of_tensor(fused[order[:5]])
    assert np.array_equal(row_sums(fused[:, ::2]), row_sums(fused[:, ::2].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_once", [1, 32, digests.ON_DEVICE_BYTES])
def test_a_device_computes_the_same(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "ON_DEVICE_BYTES", at_once)
    shapes = [(5, 7), (6, 1), (3, 8), (9, 1), (0, 4), (2, 1)]
    parts = [a_tensor(shape, dtype) for shape in shapes] + [a_tensor((4, 1), torch.float64)]

    found = digests._device_sums_of_all(parts)

    assert [each.tolist() for each in found] == [row_sums(each).tolist() for each in parts]
    assert all(np.array_equal(digests._read(digests._device_sums(each)), row_sums(each)) for each in parts)
