"""Records the engine's first steps under chosen policy versions operation by operation, as Chrome traces."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flotilla.shared.telemetry.profiles import engine_trace, write_trace

log = logging.getLogger(__name__)

MOST_PAUSE_SECONDS: Final = 0.5
"""In which torch ends the recording of a window, and the engine samples nothing."""


class EngineProfiler:
    """Records a window of steps of each chosen version, once; used by the thread that computes alone.

    Traces are written one after the other on another thread, while the engine continues. What torch does to end a
    recording lets no other thread continue, nor does its part of the writing, for as long as there are operations: so a
    step is recorded and thrown away first, and of a window so many steps are kept as end within ``MOST_PAUSE_SECONDS``.
    """

    def __init__(self) -> None:
        self._directory, self._service_id = Path(), ""
        self._versions: frozenset[int] = frozenset()
        self._num_steps = 0
        self._done: set[int] = set()
        self._recorded: profile | None = None
        self._version, self._left, self._asked = 0, 0, 0
        self._is_trial = False
        self._step_seconds: float | None = None
        """What ending the recording of a step takes of the processor."""
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
            was_trial = self._is_trial
            self.finish()
            if was_trial and self._step_seconds is not None:
                self._begin(version)

    def _begin(self, version: int) -> None:
        self._is_trial = self._step_seconds is None and self._num_steps > 1
        self._version, self._asked = version, 1 if self._is_trial else self._bounded_steps()
        self._left = self._asked
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

    def _bounded_steps(self) -> int:
        if self._step_seconds is None:
            return self._num_steps
        return max(1, min(self._num_steps, int(MOST_PAUSE_SECONDS / max(self._step_seconds, 1e-6))))

    def finish(self) -> None:
        """End what is recorded, if something is, and have it written; an error of the profiler is logged, no more."""
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        steps = self._asked - max(0, self._left)
        facts = {"version": self._version, "steps": steps, "asked": self._num_steps}
        began = time.thread_time()
        try:
            recorded.stop()
        except Exception as error:
            log.warning("a profile could not be written", extra=facts | {"error": repr(error)})
        else:
            if not steps:
                # The version changed, or its step failed: its next one, should there be one, begins again.
                self._done.discard(self._version)
                return
            self._step_seconds = (time.thread_time() - began) / steps
            if self._is_trial:
                return
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
