"""What one program may use."""

import pytest

from flotilla.services.sandbox.limits import MEBIBYTE, Limits


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="processes"):
        Limits(processes=0)


def test_a_call_can_only_lower_the_memory_limit() -> None:
    limits = Limits(memory_bytes=100 * MEBIBYTE)

    assert limits.with_memory(50 * MEBIBYTE).memory_bytes == 50 * MEBIBYTE
    assert limits.with_memory(200 * MEBIBYTE).memory_bytes == 100 * MEBIBYTE
