"""How fast a rollout that joins gets its weights, and what that costs the trainer's steps.

    python -m benchmarks.joining [--mebibytes 1024] [--rounds 5] [--json FILE]

Three ways take turns within each round, over loopback, in processes of their own: a plain copy (one connection, from
the image in shared memory into a new file there: what any transfer must do), a pull from the trainer, and a pull from
the trainer and a rollout at once. A pull counts until the image is whole, checked, and read once, as an engine loads
it. Meanwhile another process computes steps on one core; how much they grow is against the second just before. A memory
copy between private buffers is measured beside them.
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
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.weights import COPY_BYTES, DEADLINE_SECONDS, Actions, Worker, an_image, serve, work
from shared.credentials import Credentials
from shared.weights.image import WeightImage
from shared.weights.loopback import RECEIVE_BUFFER_BYTES, send_on_loopback
from shared.weights.pull import PublishedImages
from shared.weights.pull_client import WeightPuller

STEP_ELEMENTS = 1024
"""Side of the matrices of a step, which takes some 20 ms on one core."""
IDLE_SECONDS = 2.0
MODULE = "benchmarks.joining"


@dataclass(frozen=True)
class Round:
    """Seconds of one round, and by which factor steps grew meanwhile."""

    memory_copy: float
    copy: float
    pull: float
    pull_of_two: float
    copy_growth: float
    pull_growth: float
    pull_of_two_growth: float


class JoiningActions(Actions):
    """What the processes can do."""

    async def steps(self, until_file: str) -> list[tuple[float, float]]:
        """Compute until a file is gone; gives when each step ended and how long it took."""
        return await asyncio.to_thread(_steps, Path(until_file))

    async def copy_over_loopback(self, port: int, image_bytes: int) -> None:
        await asyncio.to_thread(_receive, port, image_bytes)

    async def join(self, url: str, token: str, checksum: str, peers: list[str]) -> None:
        pull = WeightPuller(Credentials(token))
        path = await pull(url, 1, None, DEADLINE_SECONDS, checksum=checksum, peers=peers)
        await asyncio.to_thread(_read, path)

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


def _read(path: Path) -> None:
    """Copy an image out of shared memory, as an engine reads it, and remove it."""
    try:
        with WeightImage.attach(path) as image, image.view as view:
            target = np.empty(min(COPY_BYTES, len(view)), np.uint8)
            for start in range(0, len(view), len(target)):
                piece = np.frombuffer(view[start : start + len(target)], np.uint8)
                np.copyto(target[: len(piece)], piece)
                del piece
    finally:
        path.unlink()


def _send_plainly(listening: socket.socket, image: WeightImage) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, image.view as view:
            connection.recv(1)
            send_on_loopback(connection, view)


async def measure(image_bytes: int, num_rounds: int) -> list[Round]:
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
        await joiner.do("prepare_copy")
        pull = {"url": url, "token": token, "checksum": checksum}
        copy = {"port": listening.getsockname()[1], "image_bytes": layout.image_bytes}
        rounds = []
        for number in range(num_rounds + 1):
            started = time.perf_counter()
            await joiner.do("copy", num_bytes=layout.image_bytes)
            memory_copy = time.perf_counter() - started
            found = [
                await beside_steps(trainer, joiner, "copy_over_loopback", **copy),
                await beside_steps(trainer, joiner, "join", peers=[], **pull),
                await beside_steps(trainer, joiner, "join", peers=[peer], **pull),
            ]
            if number:
                rounds.append(Round(memory_copy, *(each[0] for each in found), *(each[1] for each in found)))
                print(json.dumps(asdict(rounds[-1])), flush=True)
        return rounds


async def beside_steps(trainer: Worker, joiner: Worker, action: str, **facts: object) -> tuple[float, float]:
    """Have a process act while another computes; gives the seconds, and by which factor its steps grew."""
    flag = Path(tempfile.gettempdir()) / f"flotilla-joining-{secrets.token_hex(4)}"
    await asyncio.to_thread(flag.touch)
    computing = asyncio.create_task(trainer.do("steps", until_file=str(flag)))
    try:
        await asyncio.sleep(IDLE_SECONDS)
        started = time.perf_counter()
        await joiner.do(action, **facts)
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
    parser.add_argument("--rounds", type=int, default=5, help="how often (5)")
    parser.add_argument("--json", type=Path, help="also write the rounds to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        asyncio.run(work(JoiningActions()))
        return
    # Of the processes that are started: a step computes on one core.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    rounds = asyncio.run(measure(chosen.mebibytes << 20, chosen.rounds))
    megabytes = (chosen.mebibytes << 20) / 1e6
    for name in ("memory_copy", "copy", "pull", "pull_of_two"):
        seconds = statistics.median(getattr(each, name) for each in rounds)
        beside = statistics.median(getattr(each, name) / each.copy for each in rounds)
        growth = [getattr(each, f"{name}_growth") for each in rounds] if name != "memory_copy" else []
        grown = f", steps grew by {statistics.median(growth) - 1:.1%}" if growth else ""
        print(f"{name:>12}: {seconds:.2f} s, {megabytes / seconds:.0f} MB/s, {beside:.2f} of the copy{grown}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(each) for each in rounds], indent=2) + "\n")


if __name__ == "__main__":
    main()
