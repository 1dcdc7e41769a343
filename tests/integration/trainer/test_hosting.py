"""Supervisors of two experiments with one real process for both, a real Redis and gateways on sockets."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from flotilla.services.trainer.hosting.hosts import MODULE as HOST
from flotilla.services.trainer.hosting.hosts import SharedWorkers
from flotilla.services.trainer.supervisor.process import MODULE as WORKER
from flotilla.shared.schemas.service import WorkState
from tests.integration.trainer.fleet import save_tiny_model
from tests.integration.trainer.test_processes import START_SECONDS, a_rig, an_assignment, new_id
from tests.integration.trainer.test_shared_base import DIFFERENT, STEPS, Trained, lora_spec

pytestmark = pytest.mark.slow


def processes(module: str) -> list[psutil.Process]:
    """Find the processes that run a module."""
    found = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in found if module in each.cmdline()]


async def test_each_goes_on_alone_after_the_end_of_their_process(redis_url: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    specs = [lora_spec(model, **fields) for fields in DIFFERENT]
    names, workers = [new_id(), new_id()], SharedWorkers()
    first, second = (a_rig(redis_url, spec, name, workers.start) for spec, name in zip(specs, names, strict=True))
    async with first as one, second as other:
        rigs = [one, other]
        for rig, spec, name in zip(rigs, specs, names, strict=True):
            rig.fleet.ends_before = 4  # none can end before the process is killed
            (tmp_path / name).mkdir()
            await rig.desire(WorkState.RUNNING, an_assignment(spec, name, tmp_path / name))
        for rig in rigs:
            await rig.until(lambda rig=rig: rig.step >= 1)  # type: ignore[misc]
        [process] = processes(HOST)
        process.send_signal(signal.SIGKILL)
        for rig in rigs:
            rig.fleet.ends_before = None
            await rig.until(lambda rig=rig: rig.supervisor.observe().failure is not None)  # type: ignore[misc]
            assert "SIGKILL" in (rig.supervisor.observe().failure or rig).cause  # type: ignore[union-attr]
        for rig in rigs:
            await rig.until(lambda rig=rig: rig.state is WorkState.FINISHED)  # type: ignore[misc]
        assert [rig.step for rig in rigs] == [STEPS, STEPS]
        assert [len(processes(HOST)), len(processes(WORKER))] == [0, 2]
        losses = [[rig.gateway.metrics[step]["loss/total"] for step in range(1, STEPS + 1)] for rig in rigs]
        for rig in rigs:
            await rig.desire(WorkState.IDLE, None)
        async with asyncio.timeout(START_SECONDS):
            while processes(WORKER):
                await asyncio.sleep(0.05)

    alone = [await Trained(spec, tmp_path / f"alone{at}").run() for at, spec in enumerate(specs)]
    assert losses == [each.losses for each in alone]
