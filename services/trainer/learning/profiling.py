"""Records chosen steps operation by operation, on chosen ranks, as Chrome traces."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.telemetry.profiles import PROFILES, trainer_trace, write_trace

log = logging.getLogger(__name__)


@contextmanager
def profiling(learner: Learner, step: int) -> Iterator[None]:
    """Record the block, which trains a step, if the spec chooses it on this rank; nothing where no files are kept.

    A trace that cannot be written is logged, no more.
    """
    config, rank, experiment = learner.spec.tracking.profiler, learner.ranks.rank, learner.sizes.directory
    if experiment is None or step not in config.steps or (config.ranks is not None and rank not in config.ranks):
        yield
        return
    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as recorded, record_function(f"step {step}"):
        yield
    facts = {"step": step, "rank": rank}
    try:
        path = write_trace(experiment / PROFILES, trainer_trace(step, rank), recorded.export_chrome_trace)
    except (OSError, RuntimeError) as error:
        log.warning("a profile could not be written", extra=facts | {"error": repr(error)})
    else:
        log.info("a step was profiled", extra=facts | {"path": str(path)})
