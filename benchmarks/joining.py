"""How fast a rollout that joins gets its weights, and what that costs the trainer's steps.

    python -m benchmarks.joining [--mebibytes 1024] [--rounds 3] [--parts alone beside] [--json FILE]

Several ways take turns within each round, over loopback, in processes of their own: a plain copy (one connection, from
the image in shared memory into a new file there: what any transfer must do); a pull from the trainer, from the trainer
and a rollout at once, from the trainer and a directory; and the mapping that a rollout on the trainer's own host makes
instead. Each counts until the image is whole, checked, and read once, as an engine loads it.

Meanwhile another process, the trainer, computes steps on one core; how much they grow is against the second just
before. They are computed one right after the other, or each is followed by a wait as long, as a trainer has whose GPU
computes or whose turn it is not. The trainer's host is the joining one as well here: it pays for both ends.

Without steps, a pull until its image is whole and checked, and the plain copy, are held against two memory copies of as
many bytes by one thread: between private buffers that were used before, which is the fastest that the machine knows,
and into new shared memory, which a rollout's first pulls need. From its third on a pull goes into memory that an
earlier one has filled: *again*. The joining process has two cores there, so bytes come over one connection at a time.

These steps are the worst case, since they are compared only while a join lasts: ``benchmarks.joining_trainer`` has the
steps of a real trainer, and counts until the rollout samples.
"""

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from benchmarks.weights import COPY_BYTES, DEADLINE_SECONDS, Actions, Worker, an_image, serve, work
from flotilla.services.rollout.weights.staged_images import StagedImages
from flotilla.shared.net.authorisation.credentials import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.loopback import RECEIVE_BUFFER_BYTES, send_on_loopback
from flotilla.shared.weights.image.off_loop import attach_image
from flotilla.shared.weights.mapped.locate import ImageLocator
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.kept_images import KeptImages
from flotilla.shared.weights.pull.sender import InlineSender
from flotilla.shared.weights.pull.server import PublishedImages
from flotilla.shared.weights.pull.source import Reuse

STEP_ELEMENTS = 1024
"""Side of the matrices of a step, which takes some 20 ms on one core."""
IDLE_SECONDS = 2.0
NUM_CALIBRATING = 10
SITUATIONS = {"steps without a pause": False, "steps that wait half their time": True}
MODULE = "benchmarks.joining"
PARTS = ("alone", "beside")

Figures = dict[str, float]
"""Seconds by way; those of ``growth of`` a way are by which share steps grew meanwhile."""


class JoiningActions(Actions):
    """What the processes can do."""

    def __init__(self) -> None:
        super().__init__()
        self._free: WeightImage | None = None

    async def steps(self, until_file: str, waits: bool) -> list[tuple[float, float]]:
        """Compute until a file is gone; gives when each step ended and how long it took."""
        return await asyncio.to_thread(_steps, Path(until_file), waits)

    async def copy_into_new(self, image_bytes: int) -> float:
        """Copy so many bytes of a private buffer into new shared memory; gives the seconds, without the removal."""
        started = time.perf_counter()
        with WeightImage.create(image_bytes, is_reserved=False) as image, image.view as view:
            for start in range(0, image_bytes, COPY_BYTES):
                piece = np.frombuffer(view[start : start + COPY_BYTES], np.uint8)
                np.copyto(piece, self._buffers[0][: len(piece)])
                del piece
            return time.perf_counter() - started

    async def pull_alone(self, url: str, token: str, checksum: str) -> float:
        """Pull until the image is whole and checked; gives the seconds of that, without the removal."""
        seconds, path = await self._timed_pull(url, token, checksum)
        path.unlink()
        return seconds

    async def pull_again(self, url: str, token: str, checksum: str) -> float:
        """Pull into the image that an earlier pull was for, as every rollout does from its third version on."""
        if self._free is None:
            _, path = await self._timed_pull(url, token, checksum)
            self._free = await adopted(path)
        seconds, _ = await self._timed_pull(url, token, checksum, self._take)
        self._free.own_again()
        return seconds

    async def close(self) -> None:
        """Remove the image that is kept for the next pull."""
        if self._free is not None:
            self._free.close()

    def _take(self, image_bytes: int) -> WeightImage:
        assert self._free is not None and self._free.image_bytes == image_bytes
        self._free.take_back()
        return self._free

    async def _timed_pull(self, url: str, token: str, checksum: str, reuse: Reuse | None = None) -> tuple[float, Path]:
        pull, cores = WeightPuller(Credentials(token)), os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(cores)[-2:])  # of which a pull takes one
        try:
            started = time.perf_counter()
            path = await pull(url, 1, None, DEADLINE_SECONDS, checksum=checksum, reuse=reuse)
            return time.perf_counter() - started, path
        finally:
            os.sched_setaffinity(0, cores)

    async def copy_over_loopback(self, port: int, image_bytes: int) -> None:
        await asyncio.to_thread(_receive, port, image_bytes)

    async def join(
        self,
        url: str,
        token: str,
        checksum: str,
        peers: list[str],
        kept_in: str | None = None,
    ) -> None:
        pull, kept = WeightPuller(Credentials(token)), None if kept_in is None else Path(kept_in)
        path = await pull(url, 1, None, DEADLINE_SECONDS, checksum=checksum, peers=peers, kept_in=kept)
        try:
            with await asyncio.to_thread(WeightImage.attach, path) as image:
                await asyncio.to_thread(_read, image)
        finally:
            path.unlink()

    async def map_located(self, url: str, token: str, checksum: str) -> None:
        """Find the image on this host, and do with it what a rollout does."""
        located, images = await ImageLocator(Credentials(token))(url, checksum), StagedImages()
        assert located is not None
        async with images.mapped(located.path, located.image_bytes) as image:
            assert await asyncio.to_thread(image.checksum) == checksum
            await asyncio.to_thread(_read, image)
        await images.close()

    async def offer(self, path: str, checksum: str, token: str) -> str:
        """Serve an image as a rollout does; gives the URL."""
        self._stack = AsyncExitStack()
        images = PublishedImages()
        images.publish(1, WeightImage.attach(Path(path)), checksum)
        return await serve(self._stack, images, token)


async def adopted(path: Path) -> WeightImage:
    """Keep an image that was pulled, as a rollout does."""
    image = await attach_image(path, is_read_whole=False)
    image.is_owner = True
    return image


def _steps(until_file: Path, waits: bool) -> list[tuple[float, float]]:
    rng = np.random.default_rng(0)
    left, right = (rng.random((STEP_ELEMENTS, STEP_ELEMENTS), dtype=np.float32) for _ in range(2))
    found: list[tuple[float, float]] = []
    wait_seconds = 0.0
    while until_file.exists():
        started = time.perf_counter()
        left @ right
        if wait_seconds:
            time.sleep(wait_seconds)
        ended = time.perf_counter()
        found.append((ended, ended - started))
        if waits and len(found) == NUM_CALIBRATING:
            # Fixed from here on: a device takes as long whatever the host's cores are slowed by.
            wait_seconds = statistics.median(seconds for _, seconds in found)
    return found


def _receive(port: int, image_bytes: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection, WeightImage.create(image_bytes) as image:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.sendall(b"!")
        with image.view as target:
            num = 0
            while num < image_bytes:
                num += connection.recv_into(target[num:])


def _read(image: WeightImage) -> None:
    """Copy an image out of shared memory, as an engine reads it."""
    with image.view as view:
        target = np.empty(min(COPY_BYTES, len(view)), np.uint8)
        for start in range(0, len(view), len(target)):
            piece = np.frombuffer(view[start : start + len(target)], np.uint8)
            np.copyto(target[: len(piece)], piece)
            del piece


def send_plainly(listening: socket.socket, image: WeightImage) -> None:
    """Send an image to everybody who asks, until nobody listens any more."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, image.view as view:
            connection.recv(1)
            send_on_loopback(connection, view)


async def measure(image_bytes: int, num_rounds: int, parts: Sequence[str]) -> list[Figures]:
    """Measure all rounds, after one that is not counted."""
    async with AsyncExitStack() as stack:
        source, layout = an_image(stack, image_bytes)
        checksum, token = source.checksum(), secrets.token_urlsafe()
        workers = [await Worker.start(MODULE) for _ in range(3)]
        for worker in workers:
            stack.push_async_callback(worker.close)
        trainer, joiner, rollout = workers
        images = PublishedImages()
        images.publish(1, source, checksum)
        url = await serve(stack, images, token)
        peer = await rollout.do("offer", path=str(source.path), checksum=checksum, token=token)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=send_plainly, args=(listening, source), daemon=True).start()
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        KeptImages(Path(kept), InlineSender()).write(1, checksum, source)
        await joiner.do("prepare_copy")
        stack.push_async_callback(joiner.do, "close")
        pull = {"url": url, "token": token, "checksum": checksum}
        copy = {"port": listening.getsockname()[1], "image_bytes": layout.image_bytes}
        beside = {
            "copy": lambda: joiner.do("copy_over_loopback", **copy),
            "pull": lambda: joiner.do("join", peers=[], **pull),
            "pull, with a rollout": lambda: joiner.do("join", peers=[peer], **pull),
            "pull, with a directory": lambda: joiner.do("join", peers=[], kept_in=kept, **pull),
            "map": lambda: joiner.do("map_located", **pull),
        }
        alone = {
            "memory copy": lambda: joiner.do("copy", num_bytes=layout.image_bytes),
            "memory copy into new shared memory": lambda: joiner.do("copy_into_new", image_bytes=layout.image_bytes),
            "copy, alone": lambda: joiner.do("copy_over_loopback", **copy),
            "pull, alone": lambda: joiner.do("pull_alone", **pull),
            "pull again, alone": lambda: joiner.do("pull_again", **pull),
        }
        rounds = []
        for number in range(num_rounds + 1):
            found: Figures = {}
            for name, way in (alone if "alone" in parts else {}).items():
                started = time.perf_counter()
                seconds = await way()
                found[name] = seconds or time.perf_counter() - started
            for situation, waits in (SITUATIONS if "beside" in parts else {}).items():
                for name, way in beside.items():
                    key = f"{name}, beside {situation}"
                    found[key], found[f"growth of {key}"] = await beside_steps(trainer, way, waits=waits)
            if number:
                rounds.append(found)
                print(json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
        return rounds


async def beside_steps(trainer: Worker, way: Callable[[], Awaitable[None]], *, waits: bool) -> tuple[float, float]:
    """Have a process act while another computes; gives the seconds, and by which share its steps grew."""
    flag = Path(tempfile.gettempdir()) / f"flotilla-joining-{secrets.token_hex(4)}"
    await asyncio.to_thread(flag.touch)
    computing = asyncio.create_task(trainer.do("steps", until_file=str(flag), waits=waits))
    try:
        await asyncio.sleep(IDLE_SECONDS)
        started = time.perf_counter()
        await way()
        ended = time.perf_counter()
    finally:
        await asyncio.to_thread(flag.unlink)
    steps = await computing
    before = [seconds for end, seconds in steps if started - IDLE_SECONDS / 2 < end <= started]
    # Those at its edges as well: the shortest way may end within one step.
    during = [seconds for end, seconds in steps if end > started and end - seconds < ended]
    return ended - started, statistics.mean(during) / statistics.mean(before) - 1


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the image (1024)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (3)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="without steps, or beside them (both)")
    parser.add_argument("--json", type=Path, help="also write the rounds to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        asyncio.run(work(JoiningActions()))
        return
    # Of the processes that are started: a step computes on one core.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    rounds = asyncio.run(measure(chosen.mebibytes << 20, chosen.rounds, chosen.parts))
    _report(rounds, (chosen.mebibytes << 20) / 1e6)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rounds, indent=2) + "\n")


def _report(rounds: list[Figures], megabytes: float) -> None:
    def median_ratio(of: str, to: str) -> float:
        return statistics.median(each[of] / each[to] for each in rounds)

    for name in (each for each in rounds[0] if not each.startswith("growth of")):
        seconds = statistics.median(each[name] for each in rounds)
        told = f"{name}: {seconds:.2f} s, {megabytes / seconds:.0f} MB/s"
        _, beside, situation = name.partition(", beside ")
        if beside:
            grown = [each[f"growth of {name}"] for each in rounds]
            told += f", {median_ratio(name, f'copy, beside {situation}'):.2f} of the copy's time"
            told += f", steps grew by {statistics.median(grown):.1%} ({min(grown):.1%} to {max(grown):.1%})"
        else:
            told += f", {median_ratio('memory copy', name):.2f} of the memory copy's rate"
            told += f", {median_ratio('memory copy into new shared memory', name):.2f} of that into new memory"
        print(told)


if __name__ == "__main__":
    main()
