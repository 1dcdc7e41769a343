"""What was computed of earlier turns is found again by its tokens, within a bound of memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.embedded.prefix_cache import Entry, PrefixCache, names_of


def ids(*tokens: int) -> npt.NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


def a_cache(*sequences: Sequence[int], max_bytes: int = 1000) -> PrefixCache[str]:
    """Keep sequences, of one byte a token, named by their order."""
    cache = PrefixCache[str](max_bytes)
    for number, sequence in enumerate(sequences):
        cache.add(Entry(ids(*sequence), f"entry {number}", len(sequence)))
    return cache


def test_a_next_turn_finds_what_came_before_it() -> None:
    cache = a_cache(range(20), range(100, 150))

    assert cache.find(ids(*range(20), 7, 8)) == ("entry 0", 20)
    assert cache.find(ids(*range(100, 140), 7, 8)) == ("entry 1", 40)


def test_a_beginning_that_differs_in_one_token_is_not_taken_for_it() -> None:
    cache = a_cache(range(40))

    assert cache.find(ids(*range(17), 99, *range(18, 60))) == ("entry 0", 17)
    assert cache.find(ids(*range(9), 99, *range(10, 60))) is None
    assert cache.find(ids(99, *range(1, 60))) is None


def test_the_last_token_is_always_computed() -> None:
    cache = a_cache(range(40))

    assert cache.find(ids(*range(40))) == ("entry 0", 39)
    assert cache.find(ids(*range(16))) is None


def test_the_longest_beginning_is_taken() -> None:
    cache = a_cache([*range(32), 50, *range(20)], [*range(32), 60, *range(20)], range(16))

    assert cache.find(ids(*range(32), 50, *range(20), 1)) == ("entry 0", 53)
    assert cache.find(ids(*range(32), 60, *range(20), 1)) == ("entry 1", 53)


def test_a_continued_sequence_is_kept_once() -> None:
    cache = a_cache(range(20), range(50), range(30))

    assert len(cache) == 1
    assert cache.num_bytes == 50
    assert cache.find(ids(*range(25))) == ("entry 1", 24)


def test_what_was_used_longest_ago_makes_room() -> None:
    cache = a_cache(range(40), range(100, 140), max_bytes=100)
    cache.find(ids(*range(41)))

    cache.add(Entry(ids(*range(200, 230)), "new", 30))

    assert cache.num_bytes == 70
    assert cache.find(ids(*range(41))) == ("entry 0", 40)
    assert cache.find(ids(*range(100, 141))) is None
    assert cache.find(ids(*range(200, 231))) == ("new", 30)


def test_what_is_larger_than_the_bound_drives_nothing_out() -> None:
    cache = a_cache(range(40), range(100, 220), max_bytes=100)

    assert cache.find(ids(*range(41))) == ("entry 0", 40)
    assert len(cache) == 1


def test_new_weights_empty_it() -> None:
    cache = a_cache(range(40))

    cache.clear()

    assert (len(cache), cache.num_bytes) == (0, 0)
    assert cache.find(ids(*range(41))) is None
    cache.add(Entry(ids(*range(40)), "again", 40))
    assert cache.find(ids(*range(41))) == ("again", 40)


def test_tokens_of_images_are_told_apart_by_what_the_images_are() -> None:
    tokens = ids(1, 2, 5, 5, 5, 3, 5)
    one, same, other = (names_of(tokens, [PromptImage(2, 3, data)]) for data in (b"one", b"one", b"other"))

    assert one.tolist() == same.tolist()
    assert [*one[:2], *one[5:]] == [1, 2, 3, 5], "a token that was sampled, or said, stays what it is"
    assert (one[2:5] < 0).all()
    assert len({*one[2:5].tolist(), *other[2:5].tolist()}) == 6
    assert names_of(tokens, ()) is tokens
