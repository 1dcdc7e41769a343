"""Run as a program by another user: open a sandbox, run the programs given on stdin, print the answers as JSON."""

import asyncio
import json
import subprocess
import sys

from flotilla.services.sandbox.languages import choose
from flotilla.services.sandbox.routes.run_code import make_program, make_response
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import open_state
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import RunCodeRequest


async def main(level: str) -> None:
    settings = SandboxSettings.model_validate({"token": "x" * 32, "level": level, "concurrency": 1})
    victim = subprocess.Popen(["sleep", "600"])  # longer than all programs on a busy machine
    try:
        async with open_state(settings) as state:
            answers = []
            for given in json.load(sys.stdin):
                given["stdin"] = given.get("stdin", "").replace("VICTIM", str(victim.pid))
                request = RunCodeRequest.model_validate(given)
                async with state.pool.taken() as slot:
                    directory = state.executor.isolation.work_directory(slot)
                    program = make_program(request, choose(state.languages, request.language), directory, state)
                    result = await state.executor.run(slot, program)
                answers.append(make_response(result, state.executor.isolation.level).model_dump(mode="json"))
        print(json.dumps({"answers": answers, "victim_lives": victim.poll() is None}))
    except Unavailable as error:
        print(json.dumps({"unavailable": error.detail}))
    finally:
        victim.kill()
        victim.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
