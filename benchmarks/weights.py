"""Bytes per second of each weight transport, beside what bounds it: a memory copy, and a bare gloo broadcast.

    python -m benchmarks.weights [--quick | --mebibytes 8] [--parts rates patches pauses connections]
        [--receivers 1 3] [--json FILE]

All ways take turns within each round, in real processes, so that a busy machine slows them alike: read the ratios.
Each way stands next to what it is compared with, every second round runs backwards, and a ratio is the median over the
rounds of two rates of one round, printed with its quartiles. One ``memcpy`` per receiver is made by all receivers at
once, as they would copy out of shared memory. A ``raw gloo`` round broadcasts one private flat buffer as one tensor;
``gloo`` moves the same bytes from a file to files and computes their checksum. ``shared_memory`` maps the sender's
image and computes its checksum; the sender uses two images in turn. Rates count the image once per receiver.
``connections`` counts the descriptors of a gloo group of so many members, all of them in one process.
"""

import argparse
import asyncio
import itertools
import json
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvicorn
from fastapi import FastAPI

from benchmarks.weight_pause import Pause, measure_pause
from flotilla.services.rollout.weights.staged_images import StagedImages
from flotilla.shared.config.sections.publication import DeltaConfig
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.schemas.publication import Manifest
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.delta import apply_patch, changed_blocks, patch_bytes, write_patch
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.server import PublishedImages, weights_router

PARTS = ("rates", "patches", "pauses", "connections")
GROUP_SIZES = (4, 8, 17, 32, 64)
DEADLINE_SECONDS = 120.0
NUM_WARM_ROUNDS = 2
"""The first rounds touch pages, open windows and map either image of the sender."""
NUM_ROUNDS = {100 << 20: 21, 1 << 30: 11}
"""Odd, so that a median is a round that was. A short round is disturbed as often as a long one, and by more of it."""
NUM_UPDATES = 5
ADAPTERS_RANK = 16
HIDDEN_ELEMENTS = 256
COPY_BYTES = 128 << 20
"""Far more than any cache holds, and still little beside the images."""


@dataclass(frozen=True)
class Row:
    """One transport at one size: rates in MB of image per second and receiver-copy, best and median of the rounds."""

    transport: str
    image_bytes: int
    num_receivers: int
    best: float
    median: float
    ratio: float
    """Median over the rounds of its rate over the baseline's in the same round."""
    quartiles: tuple[float, float]
    """Lower and upper quartile of the same."""
    baseline: str


class Worker:
    """A process of its own that does as it is told, one line at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str = "benchmarks.weights") -> "Worker":
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                "--worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def do(self, action: str, **facts: Any) -> Any:
        """Have it act; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"action": action, **facts}).encode() + b"\n")
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker ended during {action} with {await self._process.wait()}")
        return json.loads(line)

    async def close(self) -> None:
        """Close its input, on which it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Actions:
    """What a worker can do."""

    def __init__(self) -> None:
        self._images = StagedImages()
        self._buffers: list[np.ndarray] = []
        self._raw: Callable[[], None] | None = None

    async def prepare_copy(self) -> None:
        self._buffers = [np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)]

    async def copy(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, COPY_BYTES):
            size = min(COPY_BYTES, num_bytes - start)
            np.copyto(self._buffers[1][:size], self._buffers[0][:size])

    async def join_raw(self, rank: int, world_size: int, port: int, num_bytes: int) -> None:
        self._raw = raw_broadcast(rank, world_size, port, num_bytes)

    async def raw(self) -> None:
        assert self._raw is not None
        self._raw()

    async def map(self, path: str, image_bytes: int) -> str:
        async with self._images.mapped(Path(path), image_bytes) as image:
            return await asyncio.to_thread(image.checksum)

    async def pull(self, url: str, token: str) -> None:
        (await WeightPuller(Credentials(token))(url, 1, None, DEADLINE_SECONDS)).unlink()


def raw_broadcast(rank: int, world_size: int, port: int, num_bytes: int) -> Callable[[], None]:
    """Form a bare gloo group over loopback; the result broadcasts one private tensor of this size."""
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

    timeout = timedelta(seconds=DEADLINE_SECONDS)
    store = TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(store, rank, world_size, options)
    flat = torch.ones(num_bytes, dtype=torch.uint8)
    return lambda: group.broadcast([flat], BroadcastOptions()).wait()


async def work(actions: Actions) -> None:
    """Be a worker: act on each line of standard input, answer on standard output."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        facts = json.loads(line)
        answer = await getattr(actions, facts.pop("action"))(**facts)
        print(json.dumps(answer), flush=True)


def an_image(stack: AsyncExitStack, image_bytes: int) -> tuple[WeightImage, ImageLayout]:
    """Make an image of one tensor."""
    layout = ImageLayout.of({"weights": ((image_bytes // 4 // HIDDEN_ELEMENTS, HIDDEN_ELEMENTS), "F32")})
    source = stack.enter_context(WeightImage.create(layout.image_bytes))
    source.write_from(layout, [secrets.token_bytes(1 << 16) * ((layout.tensors[0].end - len(layout.header)) >> 16)])
    return source, layout


async def measure(image_bytes: int, num_receivers: int, num_rounds: int) -> list[Row]:
    """Measure every transport at one size."""
    async with AsyncExitStack() as stack:
        source, layout = an_image(stack, image_bytes)
        manifest = source.manifest(1)
        targets = [stack.enter_context(WeightImage.create(layout.image_bytes)) for _ in range(num_receivers)]
        workers = [await Worker.start() for _ in range(num_receivers + 1)]
        for worker in workers:
            stack.push_async_callback(worker.close)
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "shared_memory": shared_memory(stack, workers[1:], source, layout),
            "memcpy": await memcpy(workers[1:], manifest),
            "raw gloo": await raw_gloo(workers, manifest),
            "gloo": await gloo(stack, source, targets, manifest),
            "pull": await pull(stack, workers[1:], source, manifest),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(num_rounds + NUM_WARM_ROUNDS):
            for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                await way()
                if number >= NUM_WARM_ROUNDS:
                    seconds[name].append(time.perf_counter() - started)
    return [row_of(name, seconds, manifest, num_receivers) for name in ways]


def row_of(name: str, seconds: dict[str, list[float]], manifest: Manifest, num_receivers: int) -> Row:
    """Sum up one transport's rounds."""
    baseline = "raw gloo" if name == "gloo" else "memcpy"
    rates = [manifest.image_bytes * num_receivers / 1e6 / each for each in seconds[name]]
    ratios = [theirs / ours for ours, theirs in zip(seconds[name], seconds[baseline], strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        transport=name,
        image_bytes=manifest.image_bytes,
        num_receivers=num_receivers,
        best=max(rates),
        median=statistics.median(rates),
        ratio=median,
        quartiles=(lower, upper),
        baseline=baseline,
    )


async def memcpy(workers: Sequence[Worker], manifest: Manifest) -> Callable[[], Awaitable[None]]:
    """One copy between private buffers in every receiver at once."""
    for worker in workers:
        await worker.do("prepare_copy")

    async def run() -> None:
        await asyncio.gather(*(worker.do("copy", num_bytes=manifest.image_bytes) for worker in workers))

    return run


async def raw_gloo(workers: Sequence[Worker], manifest: Manifest) -> Callable[[], Awaitable[None]]:
    """One broadcast of one flat tensor."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    facts = {"world_size": len(workers), "port": port, "num_bytes": manifest.image_bytes}
    await asyncio.gather(*(worker.do("join_raw", rank=rank, **facts) for rank, worker in enumerate(workers)))

    async def run() -> None:
        await asyncio.gather(*(worker.do("raw") for worker in workers))

    return run


async def gloo(
    stack: AsyncExitStack, source: WeightImage, targets: Sequence[WeightImage], manifest: Manifest
) -> Callable[[], Awaitable[None]]:
    """The endpoint, in the slices of the manifest."""
    sender, *receivers = [await stack.enter_async_context(EndpointClient()) for _ in range(len(targets) + 1)]
    rendezvous = await sender.open_sender(1, len(targets) + 1, DEADLINE_SECONDS)
    for rank, receiver in enumerate(receivers, start=1):
        await receiver.open_receiver(rendezvous, rank, DEADLINE_SECONDS)
    await asyncio.gather(*(client.joined(1, DEADLINE_SECONDS) for client in [sender, *receivers]))
    facts = (manifest.image_bytes, manifest.slice_bytes, DEADLINE_SECONDS)

    async def run() -> None:
        _, *checksums = await asyncio.gather(
            sender.send(1, source.path, *facts),
            *(client.receive(1, target.path, *facts) for client, target in zip(receivers, targets, strict=True)),
        )
        assert set(checksums) == {manifest.checksum}

    return run


def shared_memory(
    stack: AsyncExitStack, workers: Sequence[Worker], source: WeightImage, layout: ImageLayout
) -> Callable[[], Awaitable[None]]:
    """Every receiver maps the sender's present image, and checks it."""
    other = stack.enter_context(WeightImage.create(source.image_bytes))
    other.view[:] = source.view
    other.view[-1] ^= 1
    turns = itertools.cycle([(image.path, image.checksum()) for image in (source, other)])

    async def run() -> None:
        path, checksum = next(turns)
        facts = {"path": str(path), "image_bytes": layout.image_bytes}
        found = await asyncio.gather(*(worker.do("map", **facts) for worker in workers))
        assert set(found) == {checksum}

    return run


async def pull(
    stack: AsyncExitStack, workers: Sequence[Worker], source: WeightImage, manifest: Manifest
) -> Callable[[], Awaitable[None]]:
    """HTTP over loopback into a new file each time, from this process."""
    images = PublishedImages()
    images.publish(1, source, manifest.checksum)
    token = secrets.token_urlsafe()
    url = await serve(stack, images, token)

    async def run() -> None:
        await asyncio.gather(*(worker.do("pull", url=url, token=token) for worker in workers))

    return run


async def serve(stack: AsyncExitStack, images: PublishedImages, token: str) -> str:
    """Serve images as a service does; gives the URL of version 1."""
    stack.enter_context(images.served_directly("127.0.0.1"))
    app = FastAPI()
    app.include_router(weights_router(images, Credentials(token)))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))

    async def stop() -> None:
        server.should_exit = True
        await serving

    stack.push_async_callback(stop)
    return f"http://127.0.0.1:{listening.getsockname()[1]}/v1/weights/1"


async def publish_deltas(image_bytes: int) -> None:
    """Print how many bytes a patch takes, and what it costs to make and apply, by the share of changed blocks."""
    block = DeltaConfig().block_kilobytes << 10
    num_blocks = image_bytes // block
    with WeightImage.create(image_bytes) as base, WeightImage.create(image_bytes) as image:
        for share in (0.01, 0.05):
            image.view[:] = base.view
            for number in range(int(share * num_blocks)):
                image.view[number * num_blocks // max(int(share * num_blocks), 1) * block] ^= 1
            started = time.perf_counter()
            changed = changed_blocks(base.view, image.view, block)
            with WeightImage.create(patch_bytes(changed, image_bytes, block)) as patch:
                write_patch(patch.view, image.view, changed, block)
                made = time.perf_counter()
                with WeightImage.create(image_bytes) as result:
                    assert apply_patch(patch.view, base.view, result.view, block) == image.checksum()
                    applied = time.perf_counter()
                part = patch.image_bytes / image_bytes
            facts = f"{part:.2%} of the bytes; made in {made - started:.3f} s, applied in {applied - made:.3f} s"
            print(f"         delta {image_bytes / 1e6:9.0f} MB, {share:.0%} of the blocks changed: {facts}", flush=True)


def count_descriptors(num_members: int) -> tuple[int, float]:
    """Form a gloo group as members do; gives its descriptors, in all, and the seconds that it takes to form."""
    from torch.distributed import HashStore, PrefixStore

    from flotilla.shared.weights.group.endpoint_protocol import Opening
    from flotilla.shared.weights.group.group import GlooBroadcast

    store, started, before = HashStore(), time.monotonic(), psutil.Process().num_fds()

    def member(rank: int) -> GlooBroadcast:
        opening = Opening(
            epoch=1,
            rank=rank,
            world_size=num_members,
            bind_host="127.0.0.1",
            host="127.0.0.1",
            port=0,
            address="127.0.0.1",
            timeout_seconds=DEADLINE_SECONDS,
        )
        return GlooBroadcast(opening, PrefixStore("epoch-1", store), started + DEADLINE_SECONDS)

    with ThreadPoolExecutor(num_members) as threads:
        members = list(threads.map(member, range(num_members)))
    seconds = time.monotonic() - started
    descriptors = psutil.Process().num_fds() - before
    del members
    return descriptors, seconds


async def compare_pauses(sizes: Sequence[int], num_updates: int) -> list[Pause]:
    """Measure pause and stall of publications, of weights and of adapters, with and without overlapped loading."""
    rows = []
    for image_bytes in sizes:
        for overlap_load, rank in itertools.product((False, True), (None, ADAPTERS_RANK)):
            row = await measure_pause(image_bytes, num_updates, overlap_load=overlap_load, rank=rank)
            rows.append(row)
            name = f"{row.holds}, {'overlap' if overlap_load else 'no overlap'}"
            numbers = f"pause {row.pause:.1f} ms (without an update {row.step:.1f}), switched in {row.update:.1f} ms"
            print(
                f"{name:>19} {row.image_bytes / 1e6:9.1f} MB: {numbers}, trainer stall {row.trainer_stall:.1f} ms",
                flush=True,
            )
    return rows


async def compare(sizes: Sequence[int], receivers: Sequence[int]) -> list[Row]:
    """Measure all sizes with each number of receivers, and print each row."""
    print(f"{'transport':>14} {'image MB':>9} {'receivers':>9} {'best MB/s':>10} {'median':>10}   ratio")
    rows = []
    for image_bytes in sizes:
        for num_receivers in receivers:
            for row in await measure(image_bytes, num_receivers, NUM_ROUNDS.get(image_bytes, 3)):
                rows.append(row)
                size = row.image_bytes / 1e6
                numbers = f"{row.transport:>14} {size:9.0f} {row.num_receivers:9} {row.best:10.0f} {row.median:10.0f}"
                lower, upper = row.quartiles
                print(f"{numbers}   {row.ratio:.2f} of {row.baseline} ({lower:.2f} to {upper:.2f})", flush=True)
    return rows


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small image only")
    parser.add_argument("--mebibytes", type=int, help="an image of this size only, 3 rounds, without pauses")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="measure some parts only; the rates of 1 GB take most of the time",
    )
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 3], help="how many receive (1 3)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        asyncio.run(work(Actions()))
        return
    sizes = [100 << 20] if chosen.quick else [100 << 20, 1 << 30]
    if chosen.mebibytes is not None:
        sizes = [chosen.mebibytes << 20]
    rows = asyncio.run(compare(sizes, chosen.receivers)) if "rates" in chosen.parts else []
    for image_bytes in sizes if "patches" in chosen.parts else ():
        asyncio.run(publish_deltas(image_bytes))
    for num_members in GROUP_SIZES if "connections" in chosen.parts and chosen.mebibytes is None else ():
        descriptors, seconds = count_descriptors(num_members)
        each = f"{descriptors / num_members:.0f} for each"
        print(
            f"a gloo group of {num_members:2}: {descriptors} descriptors, {each}; formed in {seconds:.2f} s", flush=True
        )
    has_pauses = "pauses" in chosen.parts and chosen.mebibytes is None
    pauses = asyncio.run(compare_pauses(sizes, NUM_UPDATES)) if has_pauses else []
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(row) for row in [*rows, *pauses]], indent=2) + "\n")


if __name__ == "__main__":
    main()
