"""Children, databases and processes that do not answer are waited for within a deadline."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from flotilla.services.gateway.datasets import lengths
from flotilla.services.gateway.datasets.lengths import LengthProcess
from flotilla.services.gateway.store import transaction
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import PutRecord
from flotilla.shared.children.calls import CallProcess, running
from flotilla.shared.children.processes import reap
from flotilla.shared.errors import DeadlineExceeded, Unavailable
from tests.unit.gateway.builders import a_record


async def test_a_database_that_hangs_is_unavailable_and_what_was_late_is_stored_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'gateway.sqlite'}")
    answers, followed = threading.Event(), list[str]()
    hanging = asyncio.create_task(store._in_thread(answers.wait))
    await asyncio.sleep(0)
    with monkeypatch.context() as patched:
        patched.setattr(transaction, "ANSWER_SECONDS", 0.1)

        with pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"):
            async with store.transaction() as change:
                change.write(PutRecord(a_record("late-1")))
                change.then(lambda: followed.append("late-1"))

    assert followed == []
    answers.set()
    await hanging
    async with store.transaction():
        assert followed == ["late-1"], "whoever comes next waits for the outcome"
    assert [record.id for record in await store.experiments()] == ["late-1"]
    await store.close()


def test_a_process_that_counts_tokens_and_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "ANSWER_SECONDS", 0.2)
    program = 'import time; print(\'"serving"\\n{"ready": true}\', flush=True); time.sleep(60)'
    process = CallProcess([sys.executable, "-c", program], None, "what counts prompts' tokens")
    with running(process) as calls, pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.2 s"):
        LengthProcess(process, calls).ask({"prompts": []})

    assert process.child is None


async def test_nobody_waits_without_end_for_a_killed_process_that_stays() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    assert await reap(process, seconds=0.05) is None

    process.kill()

    assert await reap(process) == -9
