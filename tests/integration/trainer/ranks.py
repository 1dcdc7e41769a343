"""A job of a few processes on this machine, each of which calls one function; what they return comes back."""

import multiprocessing
import os
import queue
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import nn
from torch.distributed import TCPStore
from transformers import AutoConfig

from flotilla.services.trainer.models.loading import LoadedModel, without_weights
from flotilla.services.trainer.parallel.ranks import MeshShape, Ranks, joined
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.weights.parts import write_parts
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters, StreamedParameters
from flotilla.shared.weights.image.image import WeightImage

Work = Callable[[Ranks, Any], Any]
DEADLINE_SECONDS = 800.0
TWO_RANKS = MeshShape(2)


def run_ranks(
    work: Work, argument: Any, shape: MeshShape = TWO_RANKS, hosts: Sequence[str | None] | None = None
) -> list[Any]:
    """Call ``work(ranks, argument)`` in every rank; the first that fails fails the test with its traceback.

    Args:
        hosts: name of each rank's host; None where they are on one.
    """
    hosts = hosts or [None] * shape.size
    context = multiprocessing.get_context("forkserver")
    # Imported once, by a process that runs nothing of it: each rank of each test is a fork.
    context.set_forkserver_preload([work.__module__])
    results: Any = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(rank, shape, port, work, argument, results, hosts[rank]))
        for rank in range(shape.size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < shape.size:
            rank, value, failure = results.get(timeout=DEADLINE_SECONDS)
            assert failure is None, f"rank {rank}: {failure}"
            found[rank] = value
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(set(range(shape.size)) - set(found))} do not end") from None
    finally:
        for process in processes:
            process.join(timeout=10 if len(found) == shape.size else 0)
            process.kill()
            process.join()
    return [found[rank] for rank in range(shape.size)]


@contextmanager
def stored(model: nn.Module | None, ranks: Ranks, *, scores: bool = False) -> Iterator[LoadedModel | None]:
    """Put a model into files, from which ranks read what they keep while this lasts; every rank does it at once."""
    if model is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as own:
        if ranks.is_leader:
            model.save_pretrained(own)  # type: ignore[operator]
        yield in_parts(Path(ranks.gather(own.encode())[0].decode()), scores=scores)
        ranks.gather(b"")  # the files are the first rank's


def in_parts(directory: Path, *, scores: bool = False) -> LoadedModel:
    """Make a model that is to be read in parts."""
    config = AutoConfig.from_pretrained(directory)
    if scores:
        config.num_labels = 1
    loaded = without_weights(directory, config, torch.float32, scores=scores)
    assert loaded is not None
    return loaded


def image_of_one(weights: Any) -> dict[str, torch.Tensor]:
    """Read what one rank publishes."""
    assert isinstance(weights, FlatParameters | StreamedParameters)
    with WeightImage.create(weights.layout.image_bytes, directory=Path(tempfile.gettempdir())) as image:
        weights.snapshot_into(image)
        return load(bytes(image.view))


def image_of_ranks(weights: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Read what several ranks publish, each its own part; every rank does it at once."""
    assert isinstance(weights, ShardedParameters)
    with WeightImage.create(weights.layout.image_bytes, directory=Path(tempfile.gettempdir())) as image:
        image.view[: len(weights.layout.header)] = weights.layout.header
        with torch.no_grad():
            write_parts(image.mapped, weights.layout, weights.image_parts())
        written = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in ranks.gather(bytes(image.view))]
    # What a rank does not write stays 0.
    return load(torch.stack(written).amax(0).numpy().tobytes())


def _rank(rank: int, shape: MeshShape, port: int, work: Work, argument: Any, results: Any, host: str | None) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = TCPStore("127.0.0.1", port, shape.size, is_master=rank == 0, wait_for_workers=False)
        with joined(shape, rank, torch.device("cpu"), store, timeout_seconds=60, host=host) as ranks:
            results.put((rank, work(ranks, argument), None))
            ranks.gather(b"")  # the store is the first rank's
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
