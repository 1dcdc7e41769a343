"""An engine takes cores while it samples, looks how many there are now and then, and leaves them while it waits."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.engines.embedded.outcomes import Outcome
from flotilla.services.rollout.engines.process import driver as driver_module
from flotilla.services.rollout.engines.process.commands import Close, TakeLoad
from flotilla.services.rollout.engines.process.driver import EngineDriver
from flotilla.shared.host.cores import CoreSeat


class Sampling:
    """An engine that has work for some steps; another process begins to compute in between."""

    version = 0

    def __init__(self, steps: int, other: CoreSeat) -> None:
        self.steps, self._other = steps, other
        self.driver: EngineDriver | None = None
        self.seen: list[int] = []

    @property
    def is_idle(self) -> bool:
        if self.steps == 0 and self.driver is not None:
            self.driver.post(Close())
        return self.steps == 0

    def step(self) -> list[Outcome]:
        self.steps = max(0, self.steps - 1)
        if self.steps == 1:
            self._other.begin()
        return []

    def load(self, adapter: str | None) -> dict[str, float]:
        return {}

    def abort_all(self) -> None:
        self.seen.append(self._other.threads())


def test_an_engine_shares_cores_while_it_samples_and_leaves_them_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (CoreSeat(tmp_path, cores=lambda: frozenset(range(8)), now=lambda: 0.0) for _ in range(2))
    used: list[int] = []
    monkeypatch.setattr(driver_module, "use_threads", used.append)
    monkeypatch.setattr(driver_module, "THREADS_SECONDS", 0.0)
    engine: Any = Sampling(3, other)
    driver = engine.driver = EngineDriver(engine, lambda _call, _result: None, mine)
    driver.post(TakeLoad(1))

    driver.run()

    assert used[:3] == [8, 8, 4], "the other began after the second step"
    assert engine.seen == [8], "the other has them all while this one waits"
    mine.close()
    other.close()
