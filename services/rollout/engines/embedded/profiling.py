"""Records the engine's first steps under chosen policy versions operation by operation, as Chrome traces."""

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flotilla.shared.telemetry.profiles import engine_trace, write_trace

log = logging.getLogger(__name__)


class EngineProfiler:
    """Records a window of steps of each chosen version, once; used by the thread that computes alone.

    Traces are written one after the other on another thread, while the engine goes on.
    """

    def __init__(self) -> None:
        self._directory, self._service_id = Path(), ""
        self._versions: frozenset[int] = frozenset()
        self._num_steps = 0
        self._done: set[int] = set()
        self._recorded: profile | None = None
        self._version, self._left = 0, 0
        self._writer = ThreadPoolExecutor(1, "profile")

    def choose(self, directory: Path, versions: frozenset[int], num_steps: int, service_id: str) -> None:
        """Record so many steps of each of these versions from now on; one that was recorded is not again."""
        self._directory, self._versions, self._num_steps = directory, versions, num_steps
        self._service_id = service_id

    @contextmanager
    def step(self, version: int) -> Iterator[None]:
        """Record a step of the engine, which begins under this version, if it is chosen."""
        if self._recorded is not None and version != self._version:
            self.finish()
        if self._recorded is None and version in self._versions and version not in self._done:
            self._begin(version)
        if self._recorded is None:
            yield
            return
        with record_function(f"engine step, version {version}"):
            yield
        self._left -= 1
        if self._left <= 0:
            self.finish()

    def _begin(self, version: int) -> None:
        self._version, self._left = version, self._num_steps
        # Before it is tried: what cannot be recorded once is not tried at each step.
        self._done.add(version)
        recorded = None
        try:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            recorded = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            recorded.start()
        except Exception as error:
            log.warning("the profiler did not begin", extra={"version": version, "error": repr(error)})
            if recorded is not None:
                # One that is half begun would refuse the next.
                with suppress(Exception):
                    recorded.stop()
            return
        self._recorded = recorded

    def finish(self) -> None:
        """End what is recorded, if something is, and have it written; an error of the profiler is logged, no more."""
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        facts = {"version": self._version, "steps": self._num_steps - max(0, self._left)}
        try:
            recorded.stop()
        except Exception as error:
            log.warning("a profile could not be written", extra=facts | {"error": repr(error)})
        else:
            name = engine_trace(self._version, os.getpid(), self._service_id)
            self._writer.submit(_write, recorded, self._directory, name, facts)

    def close(self) -> None:
        """End what is recorded, and wait until all is written; nothing is recorded after."""
        self.finish()
        self._writer.shutdown()


def _write(recorded: profile, directory: Path, name: str, facts: Mapping[str, Any]) -> None:
    try:
        path = write_trace(directory, name, recorded.export_chrome_trace)
    except Exception as error:
        log.warning("a profile could not be written", extra={**facts, "error": repr(error)})
    else:
        log.info("the engine was profiled", extra={**facts, "path": str(path)})
