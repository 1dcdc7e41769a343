"""What a rollout that joins waits for until it samples, and what that costs the steps of a real trainer.

    python -m benchmarks.joining_trainer [--ways copy map pull] [--rounds 3] [--seconds 600] [--model 250M]
        [--samples 32] [--tokens 64] [--cold] [--json FILE]

The trainer's learner computes steps of a model whose image has 1 GB (random weights in float32), with default settings
and all cores; it has published its weights, and another process serves them as the trainer's service does. In each
round there is a step alone, and one beside each way, the order turned round every second time:

- *copy*: the image's bytes over one connection on loopback into new shared memory, which any transfer must do.
- *map* and *pull*: a rollout joins. Its engine has the initial weights, which nobody samples; it is told of the
  committed version. It maps the trainer's image, as a rollout does that sees the trainer's shared memory, or pulls it,
  as one of another host; checks it, loads it into its engine, and samples its first token under it.

The engine is a new process each time and is started before the step: what it takes to start a rollout on a machine
does not count, nor does a step that is being computed meanwhile. Growth is the step's over the round's step alone. For
*copy* and *pull* it is more than a trainer pays whose rollouts are on other hosts: here both ends are on its own.
``benchmarks.joining`` has the worst case, steps of milliseconds that are compared while a join lasts.

A virtual machine may give memory that is free back to its host, page by page within seconds, and then take it anew at
many times the cost of memory that it has: twenty times was seen, two seconds of processor time per GiB. So as much as
a join takes is held until it begins (``--cold`` leaves that out), as a machine has it whose memory is its own.
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.joining import JoiningActions, send_plainly
from benchmarks.weights import DEADLINE_SECONDS, Worker, serve, work
from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.staged_images import StagedImages
from flotilla.services.rollout.weights.switcher import VersionSwitcher
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.services.trainer.supervisor.process import environment_of
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WorkerDied
from flotilla.shared.net.authorisation.credentials import Credentials
from flotilla.shared.net.client.tls import tls_context
from flotilla.shared.schemas.service import DesiredState, WorkState
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.mapped.locate import ImageLocator
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.server import PublishedImages

if TYPE_CHECKING:
    from flotilla.services.trainer.learning.learner import Learner
    from flotilla.services.trainer.parallel.cores import ComputeCores
    from flotilla.services.trainer.worker.images import ImagePool
    from flotilla.shared.schemas.trajectory import Group

MODULE = "benchmarks.joining_trainer"
WAYS = ("copy", "map", "pull")
ALONE = "alone"
VERSION = 1
MICRO_TOKENS = 4096
BEGIN_SECONDS = 2.0
"""How long a step has been computed when somebody joins."""
HELD_IMAGES = 2
"""How many images' bytes of memory a join takes at most, about: its copy, and what all of them work with."""
PROMPT = (1, 2, 3, 4)
FIRST_TOKEN = SamplingParameters(max_new_tokens=1, ignore_eos=True)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Measured:
    """One way in one round, in seconds.

    Attributes:
        way: one of ``WAYS``, or ``alone``.
        step: that the trainer's step took.
        whole: until the way had done its part; for a rollout, until it had sampled.
        loaded: until the rollout served the version; None of the others.
    """

    way: str
    step: float
    whole: float | None = None
    loaded: float | None = None


class TrainerActions(JoiningActions):
    """What trainer and rollout can do."""

    _learner: "Learner"
    _groups: "list[Group]"
    _cores: "ComputeCores"
    _snapshots: "ImagePool"
    _engine: ProcessEngine

    def __init__(self) -> None:
        super().__init__()
        # OpenMP has a pool of threads for each thread that computes.
        self._compute = ThreadPoolExecutor(1)

    async def open_trainer(self, directory: str, size: str, samples: int, tokens: int) -> None:
        """Write a model with random weights, and make the learner that trains it."""
        await self._computed(lambda: self._open_trainer(Path(directory), size, samples, tokens))

    def _open_trainer(self, directory: Path, size: str, samples: int, tokens: int) -> None:
        from benchmarks.trainer import SIZES, make_batch, write_model
        from benchmarks.trainer_updates import groups_of, our_learner
        from flotilla.services.trainer.parallel.cores import ComputeCores
        from flotilla.services.trainer.worker.images import ImagePool

        vocabulary = SIZES[size]["vocab_size"]
        batch = make_batch("uniform", samples, vocabulary, tokens=tokens, micro_tokens=MICRO_TOKENS)
        self._learner, self._groups = our_learner(write_model(directory, size), batch), groups_of(batch)
        self._cores = ComputeCores(len(os.sched_getaffinity(0)))
        self._cores.follow(self._learner.policy.base)
        self._snapshots = ImagePool(self._learner.weights)

    async def step(self) -> float:
        """Compute a step; gives its seconds."""
        return await self._computed(self._step)

    def _step(self) -> float:
        started = time.perf_counter()
        with self._cores.computing():
            self._learner.train(self._groups, 1)
        return time.perf_counter() - started

    async def publish(self) -> str:
        """Write the present weights into an image; gives its path."""
        return str(await self._computed(self._snapshots.snapshot))

    async def close_trainer(self) -> None:
        """Remove the image."""
        self._snapshots.close()
        self._cores.close()

    async def _computed(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    async def open_engine(self, model: str) -> None:
        """Start an engine with the model's own weights."""
        tls_context()  # made once in a process, when its first client is
        settings = EngineSettings(model, context_tokens=256, slots=8, threads="auto", overlap_load=True)
        self._engine = ProcessEngine(settings)
        await self._engine.start()

    async def take_version(self, url: str, token: str, checksum: str, sees: bool) -> tuple[float, float]:
        """Do what a rollout does that lacks the committed version; gives the seconds until it serves, and samples."""
        gate, images = VersionGate(), StagedImages()

        def end(error: WorkerDied) -> None:
            raise error

        credentials = Credentials(token)
        locate = ImageLocator(credentials) if sees else None
        missed = MissedVersions(WeightPuller(credentials), locate)
        switcher = VersionSwitcher(self._engine, gate, images, missed, OnWeightUpdate.INTERRUPT, lambda: None, end)
        running = asyncio.create_task(switcher.run())
        started = time.perf_counter()
        switcher.take(
            DesiredState(
                tag="joined",
                state=WorkState.RUNNING,
                policy_version=VERSION,
                policy_checksum=checksum,
                weights_url=url,
            )
        )
        await gate.at_least(VERSION, DEADLINE_SECONDS)
        loaded = time.perf_counter() - started
        [completion] = await self._engine.generate(GenerationRequest("first", PROMPT, (0,), FIRST_TOKEN))
        sampled = time.perf_counter() - started
        assert completion.versions == ((0, VERSION),)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await images.close()
        return loaded, sampled

    async def close_engine(self) -> None:
        """End the engine."""
        await self._engine.close()


class Bench:
    """A trainer that computes, what serves its weights, and a process that joins."""

    def __init__(
        self, trainer: Worker, rollout: Worker, model: Path, facts: dict[str, str], port: int, *, cold: bool
    ) -> None:
        self._trainer, self._rollout = trainer, rollout
        self._model, self._facts, self._port, self._cold = model, facts, port, cold

    async def measure(self, way: str, image_bytes: int) -> Measured:
        """Compute a step, alone or beside a way."""
        joins = way in {"map", "pull"}
        if joins:
            await self._rollout.do("open_engine", model=str(self._model))
        held = None if self._cold else await asyncio.to_thread(_held_memory, HELD_IMAGES * image_bytes)
        stepping = asyncio.create_task(self._trainer.do("step"))
        await asyncio.sleep(BEGIN_SECONDS)
        if held is not None:
            held.close()
        if way == ALONE:
            return Measured(way, await stepping)
        started, loaded = time.perf_counter(), None
        if joins:
            loaded, whole = await self._rollout.do("take_version", sees=way == "map", **self._facts)
        else:
            await self._rollout.do("copy_over_loopback", port=self._port, image_bytes=image_bytes)
            whole = time.perf_counter() - started
        if stepping.done():
            raise SystemExit(f"a step ends before the {way}: take more --samples")
        measured = Measured(way, await stepping, whole, loaded)
        if joins:
            await self._rollout.do("close_engine")
        return measured


def _held_memory(count: int) -> mmap.mmap:
    """Take memory, which is free again, and the machine's own for a while, when it is closed."""
    held = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_HUGEPAGE)  # so that closing costs the step nothing
    for start in range(0, count, mmap.PAGESIZE):
        held[start] = 1
    return held


async def measure(options: argparse.Namespace) -> tuple[list[list[Measured]], int]:
    """Measure all rounds, of as many as the time allows; gives the image's bytes as well."""
    end = time.monotonic() + options.seconds
    async with AsyncExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        trainer, rollout = [await Worker.start(MODULE) for _ in range(2)]
        for worker in (trainer, rollout):
            stack.push_async_callback(worker.close)
        facts = {"size": options.model, "samples": options.samples, "tokens": options.tokens}
        await trainer.do("open_trainer", directory=str(model), **facts)
        stack.push_async_callback(trainer.do, "close_trainer")
        warm = await trainer.do("step")
        image = stack.enter_context(WeightImage.attach(Path(await trainer.do("publish"))))
        checksum, token, images = image.checksum(), secrets.token_urlsafe(), PublishedImages()
        images.publish(VERSION, image, checksum)
        url = await serve(stack, images, token)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=send_plainly, args=(listening, image), daemon=True).start()
        print(f"{options.model}: image of {image.image_bytes / 1e6:.0f} MB; first step {warm:.1f} s", flush=True)
        port = listening.getsockname()[1]
        bench = Bench(
            trainer, rollout, model, {"url": url, "token": token, "checksum": checksum}, port, cold=options.cold
        )
        rounds: list[list[Measured]] = []
        longest = 0.0
        while len(rounds) < options.rounds and (not rounds or time.monotonic() + longest < end):
            began = time.monotonic()
            ways = [ALONE, *options.ways]
            found = [await bench.measure(way, image.image_bytes) for way in ways[:: -1 if len(rounds) % 2 else 1]]
            longest = max(longest, time.monotonic() - began)
            rounds.append(found)
            print(json.dumps([vars(each) for each in found]), flush=True)
        return rounds, image.image_bytes


def report(rounds: Sequence[Sequence[Measured]], ways: Sequence[str]) -> list[str]:
    """Sum the rounds up, in a line for each way: medians, and in brackets the least and greatest."""
    by_way = [{each.way: each for each in found} for found in rounds]
    alone = [found[ALONE].step for found in by_way]
    lines = [f"step alone: {statistics.median(alone):.2f} s ({min(alone):.2f} to {max(alone):.2f})"]
    for way in ways:
        whole = [found[way].whole or 0.0 for found in by_way]
        grown = [found[way].step / found[ALONE].step - 1 for found in by_way]
        line = f"{way}: {_spread(whole)} s"
        if way != "copy":
            line += f", serves after {statistics.median(found[way].loaded or 0.0 for found in by_way):.2f} s"
        if way != "copy" and "copy" in ways:
            ratios = [(found[way].whole or 0.0) / (found["copy"].whole or 1.0) for found in by_way]
            line += f", {_spread(ratios)} of the copy's time"
        lines.append(f"{line}; step grew by {_spread(grown, as_share=True)}")
    return lines


def _spread(values: Sequence[float], *, as_share: bool = False) -> str:
    middle, least, most = (f"{each:.1%}" if as_share else f"{each:.2f}" for each in _ends(values))
    return f"{middle} ({least} to {most})"


def _ends(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="beside a step alone (all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often, at most (3)")
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins that would end later (600)")
    parser.add_argument("--model", default="250M", help="one of benchmarks.trainer (250M)")
    parser.add_argument("--samples", type=int, default=32, help="of a step (32)")
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of each (64)")
    parser.add_argument("--cold", action="store_true", help="take memory as the machine has it, the host's perhaps")
    parser.add_argument("--json", type=Path, help="also write the rounds to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work(TrainerActions()))
        return
    os.environ.update(environment_of(os.environ, "auto"))  # as the trainer's worker has it; an engine has its own
    rounds, _ = asyncio.run(measure(options))
    print("\n".join(report(rounds, options.ways)))
    if options.json is not None:
        found = [[vars(each) for each in measured] for measured in rounds]
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
