"""A document that somebody sent costs little time and memory, whatever it says."""

import json
import time

import psutil
import pytest

from flotilla.services.gateway.lifecycle.spec_text import INLINE_CHARACTERS, MAX_CHARACTERS, read_document
from flotilla.shared.config.load.yaml_text import FLOAT, read_value
from flotilla.shared.errors import InvalidSpec

FIRST = "a0: &a0 {x0: 1, y0: 2}"
DOUBLING = "\n".join([FIRST, *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 24))])
MANY_ALIASES = f"a: &a [{'1,' * 1500}]\nb: [{'*a,' * 1500}]"
MANY_MERGES = f"a: &a {{x: 1}}\nb: {{<<: [{'*a,' * 500}]}}"


@pytest.mark.parametrize("text", [DOUBLING, MANY_ALIASES, MANY_MERGES])
async def test_a_document_that_multiplies_itself_is_refused_at_once(text: str) -> None:
    assert len(text) <= INLINE_CHARACTERS
    began = time.thread_time()

    with pytest.raises(InvalidSpec):
        await read_document(text)

    assert time.thread_time() - began < 2.0


def test_numbers_are_told_in_time_that_grows_with_their_length() -> None:
    began = time.thread_time()

    assert FLOAT.match("1" * 100_000) is None

    assert time.thread_time() - began < 0.5
    assert [read_value(text) for text in ("1e-5", "1.e3", ".5e1", "-1.5E+2")] == [1e-5, 1000.0, 5.0, -150.0]


async def test_a_large_document_is_read_in_another_process_to_the_same_values() -> None:
    document = {"name": "x" * INLINE_CHARACTERS, "model": {"path": "\u00e9"}, "numbers": [1, 2.5, None, True]}

    assert await read_document(json.dumps(document)) == document
    with pytest.raises(InvalidSpec, match="line 1"):
        await read_document("{" + "x" * INLINE_CHARACTERS)
    with pytest.raises(InvalidSpec, match="quote it"):
        await read_document(f"day: 2026-01-01\nname: {'x' * INLINE_CHARACTERS}")


async def test_one_that_is_larger_than_any_spec_is_refused_unread() -> None:
    with pytest.raises(InvalidSpec, match="262144 at most"):
        await read_document("x" * (MAX_CHARACTERS + 1))


async def test_one_that_takes_too_long_is_given_up_and_its_process_ends() -> None:
    before = {each.pid for each in psutil.Process().children()}

    with pytest.raises(InvalidSpec, match=r"within 0\.01 s"):
        await read_document("a: 1\n" * 2000, seconds=0.01)

    assert {each.pid for each in psutil.Process().children()} <= before
