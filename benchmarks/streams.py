"""Throughput of a fenced hop against what the bare client can do.

They move entries of the same size from one stream to the next on the same server, in turns within one run:

- *raw*, the named baseline: redis-py as it comes, one pipeline per batch: for each entry XADD to the next stream, XACK
  and XDEL, and the XREADGROUP of the next batch; so one round trip per batch. It moves ready bytes: nothing is encoded,
  fenced, counted or safe to repeat.
- *unacknowledged*: the same without XACK and XDEL. No hop can do without: it would leave everything pending for ever.
- *whole*: ``claim`` and ``forward_many`` of groups at hand, as a hop does that changes all: each is encoded and sent
  as a whole. Fenced, counted in the ledger, safe to repeat.
- *graded*: what the reward service does, ``claim``, ``group``, a grade for each trajectory, ``forward_many``. Only the
  grades are encoded again. Decoding and grading are the service's work, not the hop's, and half of its time for short
  groups.

Of both, four batches are in work at a time, as services have several groups in work.

``python -m benchmarks.streams [--seconds 1] [--rounds 24] [--directory DIR] [--json FILE]``
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from flotilla.cli.redis_server import LocalRedis
from flotilla.services.reward.grading import with_grades
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.codec import encode_body, encode_grades, group_header
from flotilla.shared.streams.hop import CONSUMER_GROUP, Claim, Hop, HopName, StreamKeys
from flotilla.shared.streams.redis.connection import check_server, connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group

CASES = {"2 KB": (2_000, 64), "64 KB": (64_000, 16), "1 MB": (1_000_000, 4)}
"""Name -> payload bytes, entries per batch."""
BATCHES_IN_WORK = 4
BYTES_PER_TOKEN = 9
ROUND_BYTES = 48_000_000
"""At most this much is in flight in one round."""


def group_of(payload_bytes: int) -> Group:
    """Make a group of two whose payload is about this large."""
    overhead = size_of(a_group(0, sampled_tokens=1))
    return a_group(0, sampled_tokens=max(1, (payload_bytes - overhead) // (2 * BYTES_PER_TOKEN)))


def size_of(group: Group) -> int:
    """Add up the bytes of its body and its grades."""
    return len(encode_body(group)) + len(encode_grades(group))


async def fill(redis: Redis, stream: str, group: Group, count: int) -> None:
    """Put entries of the same size as the result into a stream, with its consumer group."""
    await redis.xgroup_create(stream, CONSUMER_GROUP, id="0", mkstream=True)
    fields = {"header": group_header(group).to_bytes(), "payload": encode_body(group), "grades": encode_grades(group)}
    for start in range(0, count, 16):
        async with redis.pipeline(transaction=False) as pipeline:
            for _ in range(start, min(start + 16, count)):
                pipeline.xadd(stream, fields)
            await pipeline.execute()


async def raw(url: str, group: Group, batch: int, acknowledges: bool, count: int) -> float:
    """Move entries with the client alone; returns entries per second."""
    redis = Redis.from_url(url, protocol=2)
    source, destination = f"bench:{uuid.uuid4().hex}", f"bench:{uuid.uuid4().hex}"
    await fill(redis, source, group, count)
    moved = 0
    started = time.perf_counter()
    answer = await redis.xreadgroup(CONSUMER_GROUP, "bench", {source: ">"}, count=batch)
    while moved < count:
        ((_, entries),) = answer
        async with redis.pipeline(transaction=False) as pipeline:
            for entry_id, fields in entries:
                pipeline.xadd(destination, fields)
                if acknowledges:
                    pipeline.xack(source, CONSUMER_GROUP, entry_id)
                    pipeline.xdel(source, entry_id)
            pipeline.xreadgroup(CONSUMER_GROUP, "bench", {source: ">"}, count=batch)
            *_, answer = await pipeline.execute()
        moved += len(entries)
    elapsed = time.perf_counter() - started
    await redis.unlink(source, destination)
    await redis.aclose()
    return count / elapsed


async def hop(redis: Redis, group: Group, batch: int, answer: Callable[[Claim], Group], count: int) -> float:
    """Move entries through the generated hop, each answered by a group; returns entries per second."""
    experiment_id = uuid.uuid4().hex
    plane = RedisDataPlane(redis, experiment_id)
    await fill(redis, StreamKeys(experiment_id).stream(HopName.GENERATED), group, count)
    rate = await through(plane.hop(HopName.GENERATED, "bench"), batch, count, answer)
    await plane.remove()
    return rate


def graded(claim: Claim) -> Group:
    """Do what the reward service does with a group of two."""
    return with_grades(claim.group(), [Grade.scored(0.0), Grade.scored(1.0)], 0.01)


async def through(hop: Hop, batch: int, count: int, answer: Callable[[Claim], Group]) -> float:
    """Claim and forward all that waits, several batches at a time; returns entries per second."""
    moved = 0

    async def lane() -> None:
        nonlocal moved
        while claims := await hop.claim(batch, wait_seconds=0):
            assert all(await hop.forward_many([(claim, answer(claim)) for claim in claims]))
            moved += len(claims)

    started = time.perf_counter()
    await asyncio.gather(*[lane() for _ in range(BATCHES_IN_WORK)])
    elapsed = time.perf_counter() - started
    assert moved == count
    return count / elapsed


async def measure(url: str, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Run every case, all ways in turns; returns medians of entries per second and of ratios."""
    redis = connect(url)
    gc.freeze()  # what the imports made is not looked through again and again, in any of the ways
    results = {}
    for name, (payload_bytes, batch) in CASES.items():
        group = group_of(payload_bytes)
        ways: dict[str, Callable[[int], Awaitable[float]]] = {
            "raw": partial(raw, url, group, batch, True),
            "unacknowledged": partial(raw, url, group, batch, False),
            "whole": partial(hop, redis, group, batch, lambda _claim, group=group: group),
            "graded": partial(hop, redis, group, batch, graded),
        }
        rate = await ways["raw"](16 * batch)
        count = max(4, min(int(rate * seconds / 3), ROUND_BYTES // payload_bytes) // batch) * batch
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            # Each way comes after each other one: what one has written to the log, the server syncs during the next.
            turn = number % len(ways)
            order = [*ways][turn:] + [*ways][:turn]
            for way in order if number % 2 == 0 else reversed(order):
                rates[way].append(await ways[way](count))
        medians = {way: statistics.median(values) for way, values in rates.items()}
        results[name] = {
            "payload_bytes": size_of(group),
            "entries": count,
            **{f"{way}_per_second": round(value, 1) for way, value in medians.items()},
            **{
                f"{ours}_to_{theirs}": median_ratio(rates[ours], rates[theirs])
                for ours in ("whole", "graded")
                for theirs in ("raw", "unacknowledged")
            },
        }
    gc.unfreeze()
    await redis.aclose()
    return results


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Compare round by round, since a shared machine changes its speed from one to the next."""
    return round(statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 3)


def main() -> None:
    """Measure on a server of our own and print one line per payload size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1.0, help="rough length of one case's round")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--directory", type=Path, help="where the server keeps its log; a disk's speed matters")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, LocalRedis(Path(directory)) as server:
        name = asyncio.run(check_server(server.url))
        results = asyncio.run(measure(server.url, arguments.seconds, arguments.rounds))
    print(f"server: {name}, append-only log every second, unix socket; medians of {arguments.rounds} rounds")
    for case, result in results.items():
        print(
            f"{case:>6}: per second: raw {result['raw_per_second']:.0f}, unacknowledged "
            f"{result['unacknowledged_per_second']:.0f}, whole {result['whole_per_second']:.0f}, graded "
            f"{result['graded_per_second']:.0f}; of raw: whole {result['whole_to_raw']:.2f}, graded "
            f"{result['graded_to_raw']:.2f}; of unacknowledged: whole {result['whole_to_unacknowledged']:.2f}, graded "
            f"{result['graded_to_unacknowledged']:.2f}"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"server": name, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
