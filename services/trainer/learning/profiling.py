"""Records chosen steps operation by operation, on chosen ranks, as Chrome traces."""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.telemetry.profiles import PROFILES, trainer_trace, write_trace

log = logging.getLogger(__name__)

Facts = Mapping[str, int]


class TraceWriter:
    """Writes traces beside the steps, one at a time: what waits holds all that was recorded in memory.

    torch's own part of it lets no other thread continue; compression and the disk do. A process that ends waits for it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "profile")
        self._writing: Future[None] | None = None

    def write(self, work: Callable[[], None]) -> None:
        """Have a trace written; waits for the one before."""
        self.wait()
        self._writing = self._thread.submit(work)

    def wait(self) -> None:
        """Wait until all is written."""
        if self._writing is not None:
            self._writing.result()


@contextmanager
def profiling(learner: Learner, traces: TraceWriter, step: int) -> Iterator[None]:
    """Record the block, which trains a step, if the spec chooses it on this rank; nothing where no files are kept.

    An error of the profiler, or of writing its trace, is logged and passed to ``learner.on_profile_failure``: the step
    is trained all the same. The next step that ends without one passes None.
    """
    config, rank, experiment = learner.spec.tracking.profiler, learner.ranks.rank, learner.sizes.directory
    if experiment is None or step not in config.steps or (config.ranks is not None and rank not in config.ranks):
        yield
        learner.on_profile_failure(None)
        return
    facts = {"step": step, "rank": rank}
    recorded = _begun(learner, facts)
    if recorded is None:
        yield
        return
    is_ended = False
    try:
        with record_function(f"step {step}"):
            yield
    finally:
        is_ended = _is_ended(recorded, learner, facts)
    if is_ended:
        traces.write(partial(_write, recorded, experiment / PROFILES, learner, facts))


def _begun(learner: Learner, facts: Facts) -> profile | None:
    """Begin to record; None if the profiler cannot."""
    recorded = None
    try:
        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        recorded = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        recorded.start()
    except Exception as error:
        _tell(learner, facts, "the profiler did not begin", error)
        if recorded is not None:
            # One that is half begun would refuse the next.
            with suppress(Exception):
                recorded.stop()
        return None
    return recorded


def _is_ended(recorded: profile, learner: Learner, facts: Facts) -> bool:
    try:
        recorded.stop()
    except Exception as error:
        _tell(learner, facts, "the profiler did not end", error)
        return False
    return True


def _write(recorded: profile, directory: Path, learner: Learner, facts: Facts) -> None:
    try:
        name = trainer_trace(facts["step"], facts["rank"])
        path = write_trace(directory, name, recorded.export_chrome_trace)
    except Exception as error:
        _tell(learner, facts, "a profile could not be written", error)
    else:
        log.info("a step was profiled", extra={**facts, "path": str(path)})
        learner.on_profile_failure(None)


def _tell(learner: Learner, facts: Facts, what: str, error: Exception) -> None:
    log.warning(what, extra={**facts, "error": repr(error)})
    learner.on_profile_failure(f"step {facts['step']}: {what}: {error!r}"[:500])
