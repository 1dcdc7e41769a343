"""Fork servers that programs end start again, but not as often as programs like, and at their callers' expense."""

import asyncio
import os
import time
from typing import Any

import pytest

from flotilla.services.sandbox import executor, pool
from flotilla.services.sandbox.executor import FIRST_PAUSE_SECONDS
from flotilla.services.sandbox.fork_servers import ForkServer
from flotilla.services.sandbox.processors import ProcessorGroup
from flotilla.services.sandbox.routes.run_code import make_program
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.schemas.sandbox import RunCodeRequest, RunStatus
from tests.integration.sandbox.running import a_sandbox, run
from tests.integration.sandbox.test_run_code import a_client

KILLS_ALL_OF_ITS_UID = "import os; os.kill(-1, 9)"
"""Where neither Landlock nor a namespace keeps it from that, this ends the guard."""
FILLS_MEMORY_WITH_FILES = """
import os
for directory, number in [(".", 60), ("/dev/shm", 15)]:
    for n in range(number):
        file = os.open(f"{directory}/f{n}", os.O_WRONLY | os.O_CREAT)
        try:
            os.posix_fallocate(file, 0, 1 << 20)
        except OSError as error:
            print("stopped", error)
        os.close(file)
print("filled", flush=True)
"""
EVERY = 3600.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def started_at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When fork servers were started."""
    start, times = ForkServer.start, []

    async def observed(*arguments: Any) -> ForkServer:
        times.append(time.monotonic())
        return await start(*arguments)

    monkeypatch.setattr(ForkServer, "start", observed)
    return times


async def test_pauses_grow_between_starts_of_a_server_that_each_program_ends(started_at: list[float]) -> None:
    async with a_sandbox("D", concurrency=1, sessions=0) as state:
        started_at.clear()
        for _ in range(3):
            await run(state, KILLS_ALL_OF_ITS_UID)
            await run(state, "print('in between')")
        answer = await run(state, "print('fine')")

        assert state.executor.num_servers_ended == 3
    assert answer.status is RunStatus.SUCCESS
    assert len(started_at) == 3
    assert started_at[1] - started_at[0] >= 2 * FIRST_PAUSE_SECONDS
    assert started_at[2] - started_at[1] >= 4 * FIRST_PAUSE_SECONDS


async def test_who_ends_a_server_keeps_its_slot_and_is_charged_with_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charged: list[tuple[str, float]] = []
    monkeypatch.setattr(ProcessorGroup, "charge", lambda _, caller, seconds: charged.append((caller, seconds)))

    async with a_sandbox("D", concurrency=1, sessions=0) as state:
        if any(server.share is None for server in state.executor.servers()):
            pytest.skip("this service may not make groups of the processors")
        await _run_for(state, "who", KILLS_ALL_OF_ITS_UID)
        held, backing_off = state.pool.num_running, state.executor.num_backing_off(state.pool.slots)
        await state.pool.settled()
        await _run_for(state, "another", "print('fine')")

    assert (held, backing_off) == (1, 1)
    assert [caller for caller, _ in charged] == ["who"]
    assert 0.005 < charged[0][1] < 10


async def test_a_stop_does_not_wait_until_a_server_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.sandbox.executor.FIRST_PAUSE_SECONDS", EVERY)
    monkeypatch.setattr("flotilla.services.sandbox.executor.LONGEST_PAUSE_SECONDS", EVERY)

    async with asyncio.timeout(60), a_sandbox("D", concurrency=1, sessions=0) as state:
        await _run_for(state, "who", KILLS_ALL_OF_ITS_UID)
        assert state.pool.num_running == 1


@pytest.mark.parametrize("memory_limit", [16, 40])
async def test_a_program_cannot_end_its_server_by_files_in_memory(memory_limit: int) -> None:
    async with a_sandbox("A", concurrency=1, sessions=0) as state:
        answer = await run(state, FILLS_MEMORY_WITH_FILES, memory_limit_MB=memory_limit)
        after = await run(state, "print('fine')")

        assert answer.status is RunStatus.FAILED, answer
        assert after.status is RunStatus.SUCCESS
        assert (state.executor.num_servers_lost, state.executor.num_servers_ended) == (0, 0)


async def _run_for(state: SandboxState, caller: str, code: str) -> None:
    request = RunCodeRequest(code=code, language="python")
    async with state.pool.taken(caller) as slot:
        directory = state.executor.isolation.work_directory(slot)
        program = make_program(request, state.languages["python"], directory, state, caller)
        await state.executor.run(slot, program)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives programs a uid of their own")
async def test_readiness_and_metrics_tell_slots_that_are_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(uid: int, python: str) -> None:
        raise TimeoutError(f"processes of {uid} live")

    async def is_not_empty(self: ForkServer) -> bool:
        return False

    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.05)
    program = {"code": "print(1)", "language": "python"}
    async with a_client(level="C", concurrency=2, spare=0, sessions=0) as client, asyncio.timeout(60):
        await asyncio.gather(*[client.post("/run_code", json=program) for _ in range(2)])
        while "flotilla_sandbox_running 0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        usable = (await client.get("/readyz")).json()
        with monkeypatch.context() as patched:
            patched.setattr(executor, "sweep", fail)
            patched.setattr(ForkServer, "is_empty", is_not_empty)
            found = []
            for number in (1, 2):
                answer = await client.post("/run_code", json=program)
                while f"flotilla_sandbox_slots_out_of_use {number}" not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.01)
                found.append((answer.json()["status"], await client.get("/readyz")))
        # Nobody calls, as nobody would whom readiness keeps away: the slots are tried all the same.
        while (again := await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.01)
        while (whole := (await client.get("/readyz")).json()["programs"]) != usable["programs"]:
            await asyncio.sleep(0.01)
        after = await client.post("/run_code", json=program)
        metrics = (await client.get("/metrics")).text

    assert usable["programs"] == whole == {"total": 2, "out_of_use": 0, "backing_off": 0}
    assert [status for status, _ in found] == ["Success", "Success"]  # what is known of a program stays true
    one, none = (reply for _, reply in found)
    assert (one.status_code, one.json()["programs"]) == (200, {"total": 2, "out_of_use": 1, "backing_off": 0})
    assert (none.status_code, none.json()["code"]) == (503, "unavailable")
    assert "no slot for programs can be used: in 2 of 2 lives what could not be ended" in none.json()["detail"]
    assert again.status_code == 200
    assert after.json()["status"] == "Success"
    assert "flotilla_sandbox_slots_spoiled_total 2" in metrics
    assert "flotilla_sandbox_fork_servers_ended_total 2" in metrics


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives programs a uid of their own")
async def test_readiness_tells_slots_of_sessions_that_are_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(uid: int, python: str) -> None:
        raise TimeoutError(f"processes of {uid} live")

    async with a_client(level="C", concurrency=1, spare=0, sessions=1) as client, asyncio.timeout(60):
        with monkeypatch.context() as patched:
            patched.setattr(executor, "sweep", fail)
            patched.setattr(ForkServer, "is_empty", lambda _: asyncio.sleep(0, False))
            session = (await client.post("/sessions", json={"language": "python"})).json()
            await client.delete(f"/sessions/{session['id']}", headers={"Session-Token": session["token"]})
            while (reply := await client.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
            metrics = (await client.get("/metrics")).text
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.01)

    assert "no slot for sessions can be used: in 1 of 1 lives what could not be ended" in reply.json()["detail"]
    assert "flotilla_sandbox_slots_out_of_use 1" in metrics
