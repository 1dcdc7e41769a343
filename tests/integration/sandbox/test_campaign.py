"""Programs of every class of attack, at every level that this machine offers: none gets anything."""

import asyncio

import pytest

from flotilla.shared.schemas.sandbox import RunStatus
from tests.integration.sandbox.attacks import SIMPLE
from tests.integration.sandbox.campaign import PROGRAMS, SLOW
from tests.integration.sandbox.poison import POISONS
from tests.integration.sandbox.running import a_sandbox, run

levels = pytest.mark.parametrize("level", ["A", "B", "C"])
AT_A_TIME = 4


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) + len(POISONS) + len(SIMPLE) >= 80


@levels
async def test_no_program_succeeds(level: str) -> None:
    assert await _successes(level, sorted(PROGRAMS.keys() - SLOW)) == {}


@levels
@pytest.mark.long
async def test_no_program_takes_more_than_its_share(level: str) -> None:
    assert await _successes(level, sorted(SLOW)) == {}


async def _successes(level: str, names: list[str]) -> dict[str, str]:
    """Run programs, some at a time; returns what those said that got something, or were not run as they should."""
    found = {}
    async with a_sandbox(level, concurrency=AT_A_TIME) as state:
        turns = asyncio.Semaphore(AT_A_TIME)

        async def attack(name: str) -> None:
            async with turns:
                answer = await run(state, PROGRAMS[name], run_timeout=8)
            stdout, stderr = (answer.run_result.stdout, answer.run_result.stderr) if answer.run_result else ("", "")
            is_attack = bool(stdout or answer.message) and "Traceback" not in (stderr or "")
            if answer.status is RunStatus.SANDBOX_ERROR or "BREACH" in (stdout or "") or not is_attack:
                found[name] = answer.model_dump_json()

        async with asyncio.TaskGroup() as attacks:
            for name in names:
                attacks.create_task(attack(name))
        after = await run(state, "print('fine')")
        if after.status is not RunStatus.SUCCESS or state.executor.num_servers_lost or state.executor.num_spoiled:
            found["afterwards"] = after.model_dump_json()
    return found
