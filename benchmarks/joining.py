"""How fast a rollout that joins gets its weights, and what that costs the trainer's steps.

    python -m benchmarks.joining [--mebibytes 1024] [--rounds 3] [--json FILE]

Several ways take turns within each round, over loopback, in processes of their own: a plain copy (one connection, from
the image in shared memory into a new file there: what any transfer must do); a pull from the trainer, from the trainer
and a rollout at once, from the trainer and a directory; and the mapping that a rollout on the trainer's own host makes
instead. Each counts until the image is whole, checked, and read once, as an engine loads it. Meanwhile another process
computes steps on one core; how much they grow is against the second just before. Without steps, a pull over one
connection and the plain copy are held against a memory copy between private buffers.
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
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from benchmarks.weights import COPY_BYTES, DEADLINE_SECONDS, Actions, Worker, an_image, serve, work
from services.rollout.weights.staged_images import StagedImages
from shared.credentials import Credentials
from shared.weights import pull_client
from shared.weights.image import WeightImage
from shared.weights.kept_images import KeptImages
from shared.weights.locate import ImageLocator
from shared.weights.loopback import RECEIVE_BUFFER_BYTES, send_on_loopback
from shared.weights.pull import PublishedImages
from shared.weights.pull_client import WeightPuller
from shared.weights.sender import InlineSender

STEP_ELEMENTS = 1024
"""Side of the matrices of a step, which takes some 20 ms on one core."""
IDLE_SECONDS = 2.0
MODULE = "benchmarks.joining"

Figures = dict[str, float]
"""Seconds by way; those of ``growth of`` a way are by which factor steps grew meanwhile."""


class JoiningActions(Actions):
    """What the processes can do."""

    async def steps(self, until_file: str) -> list[tuple[float, float]]:
        """Compute until a file is gone; gives when each step ended and how long it took."""
        return await asyncio.to_thread(_steps, Path(until_file))

    async def copy_over_loopback(self, port: int, image_bytes: int) -> None:
        await asyncio.to_thread(_receive, port, image_bytes)

    async def join(
        self,
        url: str,
        token: str,
        checksum: str,
        peers: list[str],
        kept_in: str | None = None,
        connections: int = pull_client.CONNECTIONS,
    ) -> None:
        pull_client.CONNECTIONS = connections
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


def _steps(until_file: Path) -> list[tuple[float, float]]:
    rng = np.random.default_rng(0)
    left, right = (rng.random((STEP_ELEMENTS, STEP_ELEMENTS), dtype=np.float32) for _ in range(2))
    found = []
    while until_file.exists():
        started = time.perf_counter()
        left @ right
        ended = time.perf_counter()
        found.append((ended, ended - started))
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


def _send_plainly(listening: socket.socket, image: WeightImage) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, image.view as view:
            connection.recv(1)
            send_on_loopback(connection, view)


async def measure(image_bytes: int, num_rounds: int) -> list[Figures]:
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
        threading.Thread(target=_send_plainly, args=(listening, source), daemon=True).start()
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        KeptImages(Path(kept), InlineSender()).write(1, checksum, source)
        await joiner.do("prepare_copy")
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
            "copy, alone": lambda: joiner.do("copy_over_loopback", **copy),
            "pull over one connection, alone": lambda: joiner.do("join", peers=[], connections=1, **pull),
            "pull, alone": lambda: joiner.do("join", peers=[], **pull),
        }
        rounds = []
        for number in range(num_rounds + 1):
            found: Figures = {}
            for name, way in alone.items():
                started = time.perf_counter()
                await way()
                found[name] = time.perf_counter() - started
            for name, way in beside.items():
                found[name], found[f"growth of {name}"] = await beside_steps(trainer, way)
            if number:
                rounds.append(found)
                print(json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
        return rounds


async def beside_steps(trainer: Worker, way: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Have a process act while another computes; gives the seconds, and by which factor its steps grew."""
    flag = Path(tempfile.gettempdir()) / f"flotilla-joining-{secrets.token_hex(4)}"
    await asyncio.to_thread(flag.touch)
    computing = asyncio.create_task(trainer.do("steps", until_file=str(flag)))
    try:
        await asyncio.sleep(IDLE_SECONDS)
        started = time.perf_counter()
        await way()
        ended = time.perf_counter()
    finally:
        await asyncio.to_thread(flag.unlink)
    steps = await computing
    before = [seconds for end, seconds in steps if started - IDLE_SECONDS / 2 < end <= started]
    during = [seconds for end, seconds in steps if started < end <= ended]
    return ended - started, statistics.mean(during) / statistics.mean(before)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the image (1024)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (3)")
    parser.add_argument("--json", type=Path, help="also write the rounds to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        asyncio.run(work(JoiningActions()))
        return
    # Of the processes that are started: a step computes on one core.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    rounds = asyncio.run(measure(chosen.mebibytes << 20, chosen.rounds))
    _report(rounds, (chosen.mebibytes << 20) / 1e6)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rounds, indent=2) + "\n")


def _report(rounds: list[Figures], megabytes: float) -> None:
    for name in (each for each in rounds[0] if not each.startswith("growth of")):
        seconds = statistics.median(each[name] for each in rounds)
        told = f"{name:>32}: {seconds:.2f} s, {megabytes / seconds:.0f} MB/s"
        if f"growth of {name}" in rounds[0]:
            ratio = statistics.median(each[name] / each["copy"] for each in rounds)
            grown = statistics.median(each[f"growth of {name}"] for each in rounds) - 1
            told += f", {ratio:.2f} of the copy's time, steps grew by {grown:.1%}"
        else:
            ratio = statistics.median(each["memory copy"] / each[name] for each in rounds)
            told += f", {ratio:.2f} of the memory copy's rate"
        print(told)


if __name__ == "__main__":
    main()
