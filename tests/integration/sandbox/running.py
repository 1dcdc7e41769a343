"""A sandbox for tests: opened at one level, or a skip that says why not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flotilla.services.sandbox.languages import choose
from flotilla.services.sandbox.routes.run_code import make_program, make_response
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import SandboxState, open_state
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import IsolationLevel, RunCodeRequest, RunCodeResponse

TOKEN = "a token that is long enough"


def settings_for(level: str, **fields: Any) -> SandboxSettings:
    unsafe = level == "D"
    usual = {"token": TOKEN, "level": level, "unsafe_sandbox": unsafe, "concurrency": 2, "sessions": 2, "spare": 0}
    # Here the sandbox is what the machine is for.
    return SandboxSettings.model_validate(usual | {"processor_shares": 262_144, "busy_part": 1.0} | fields)


@asynccontextmanager
async def a_sandbox(level: str, **fields: Any) -> AsyncIterator[SandboxState]:
    opening = open_state(settings_for(level, **fields))
    try:
        state = await opening.__aenter__()
    except Unavailable as error:
        # Landlock and seccomp are in every kernel that this project supports: C must not be skipped in silence. Nor may
        # a level that is there and does not hold.
        if "not contained" in error.detail:
            raise
        if IsolationLevel(level) is IsolationLevel.C and "no Landlock" not in error.detail:
            raise
        pytest.skip(f"level {level} is not available: {error.detail}")
    try:
        yield state
    finally:
        await opening.__aexit__(None, None, None)


async def run(state: SandboxState, code: str, language: str = "python", **fields: Any) -> RunCodeResponse:
    request = RunCodeRequest(code=code, language=language, **fields)
    async with state.pool.taken() as slot:
        directory = state.executor.isolation.work_directory(slot)
        program = make_program(request, choose(state.languages, language), directory, state)
        answer = make_response(await state.executor.run(slot, program), state.executor.isolation.level)
    await state.pool.settled()
    return answer
