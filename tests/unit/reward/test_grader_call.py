"""Whatever a grader answers, each sample gets a grade or an error, soon, and in little memory."""

import asyncio
import gc
import json
import random
import resource
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.services.reward.grader_call import parse_grades, parse_openrlhf, read_json
from flotilla.shared.errors import GradingFailed
from flotilla.shared.schemas.grading import Grade
from tests.unit.reward.test_remote import HOSTILE_BODIES, SAMPLES, Stream, a_verifier, httpx

NUM_REPLIES = 10_000
MOST_MEMORY_KIB = 64 * 1024
LONGEST_HOLD_SECONDS = 0.05

numbers = st.floats() | st.integers() | st.integers(min_value=10**300, max_value=10**400)
leaves = st.none() | st.booleans() | numbers | st.text(st.characters(), max_size=20)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
names = st.sampled_from(["grades", "version", "id", "rewards", "scores", "extra_logs", "other"])
grades = st.lists(
    values
    | st.dictionaries(
        st.sampled_from(["status", "reward", "components", "metrics", "reason", "answer"]), values, max_size=6
    ),
    max_size=3,
)


def read(body: bytes) -> list[list[Grade]]:
    """Read a reply in both dialects, as ``RemoteVerifier`` does."""
    found = []
    for parse in (lambda answer: parse_grades(answer, 2, "id"), lambda answer: parse_openrlhf(answer, 2)):
        try:
            found.append(parse(read_json(body)))
        except GradingFailed as error:
            found.append([Grade.error(error.detail)] * 2)
    return found


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, values | grades, max_size=5))
def test_any_json_is_grades_or_errors(reply: dict[str, Any]) -> None:
    for found in read(json.dumps(reply).encode()):
        assert len(found) == 2
        for each in found:
            each.model_dump_json().encode()


def mutated(source: random.Random) -> bytes:
    """Make a reply: a good or hostile one, cut, repeated, mixed or with bytes changed."""
    good = b'{"grades": [{"reward": 1, "components": {"a": 0.5}, "reason": "\\ud83d"}, {}], "rewards": [1, 0]}'
    body = source.choice([good, *HOSTILE_BODIES])
    match source.randrange(7):
        case 0:
            return body
        case 1:
            return body[: source.randrange(len(body) + 1)]
        case 2:
            piece = body[source.randrange(len(body) + 1) :][: source.randrange(1, 40)]
            return body + piece * source.randrange(1, 2000)
        case 3:
            return body[:2000].replace(
                b"1", source.choice([b"1e400", b"9" * 4000, b"-0", b"NaN", b'"\\udc00"', b"[[]]"])
            )
        case 4:
            noise = bytearray(body[:4096])
            for _ in range(source.randrange(1, 20)):
                if noise:
                    noise[source.randrange(len(noise))] = source.randrange(256)
            return bytes(noise)
        case 5:
            opened = source.choice([b"[", b'{"a":', b'{"grades":[', b'["', b"[1,", b"[{},"])
            return (opened * source.randrange(1, 400_000))[: source.choice([100, 10_000, 1_048_576])]
        case _:
            text = source.choice([b"\\u0000", b"\\ud800", b"\\\\", b"a,", b"{["]) * source.randrange(1, 150_000)
            return b'{"grades": [{"reward": 1, "reason": "%s"}, {"reason": "%s"}]}' % (text, text[:12])


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_ten_thousand_replies_neither_hold_the_loop_nor_fill_memory() -> None:
    source = random.Random(7)
    gc.collect()
    gc.freeze()  # what the other tests have left is not looked through again while this one is timed
    before = 0
    longest, num_errors = 0.0, 0

    for number in range(NUM_REPLIES):
        if number == 100:
            # What modules and caches take is there by now.
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        body = mutated(source)
        verifier, _ = a_verifier(
            lambda _, body=body: httpx.Response(200, stream=Stream(body)),  # type: ignore[misc]
            dialect=source.choice(["flotilla", "openrlhf"]),
        )
        # Processor time of the loop's thread, which nothing here gives up meanwhile: other processes do not count.
        began = time.thread_time()
        found = await verifier.score(SAMPLES)
        longest = max(longest, time.thread_time() - began)
        await asyncio.sleep(0)
        assert len(found) == len(SAMPLES)
        for each in found:
            num_errors += each.reward is None
            each.model_dump_json().encode()
        await verifier.aclose()

    gc.unfreeze()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{NUM_REPLIES} replies: loop held {longest * 1000:.1f} ms at most, {grown} KiB more, {num_errors} errors")
    assert grown < MOST_MEMORY_KIB
    assert longest < LONGEST_HOLD_SECONDS
