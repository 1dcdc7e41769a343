"""The same program gives the same answer at every level."""

import base64

import pytest

from flotilla.shared.schemas.sandbox import CommandStatus, RunStatus
from tests.integration.sandbox.running import a_sandbox, run

every_level = pytest.mark.parametrize("level", ["A", "B", "C", "D"])


@every_level
async def test_a_program_reads_writes_and_answers(level: str) -> None:
    code = (
        "import os, sys, tempfile\n"
        "sys.stderr.write(os.environ['HOME'] == os.getcwd() == os.environ['TMPDIR'] and 'home' or 'lost')\n"
        "with tempfile.NamedTemporaryFile() as file: file.write(b'x')\n"
        "open('out/made', 'wb').write(open('in', 'rb').read())\n"
        "print(input())\n"
        "sys.exit(7)"
    )

    async with a_sandbox(level) as state:
        answer = await run(state, code, stdin="given", files={"in": "AP8=", "out/x": ""}, fetch_files=("out/made",))

    assert answer.status is RunStatus.FAILED
    assert answer.isolation == level
    assert answer.run_result is not None
    assert (answer.run_result.stdout, answer.run_result.stderr) == ("given\n", "home")
    assert (answer.run_result.status, answer.run_result.return_code) == (CommandStatus.FINISHED, 7)
    assert base64.b64decode(answer.files["out/made"]) == b"\x00\xff"


@every_level
async def test_ordinary_means_of_a_program_work(level: str) -> None:
    code = (
        "import asyncio, subprocess, sys, threading\n"
        "done = subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True)\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "async def main(): await asyncio.sleep(0); return 'loop'\n"
        "print(done.stdout.strip(), asyncio.run(main()))"
    )

    async with a_sandbox(level) as state:
        answer = await run(state, code)

    assert answer.run_result is not None
    assert (answer.run_result.stdout, answer.run_result.stderr) == ("thread\n1 loop\n", "")


@every_level
async def test_a_limit_that_stops_a_program_is_named(level: str) -> None:
    async with a_sandbox(level, limits={"files": 10}) as state:
        answer = await run(state, "import time\nfor n in range(50): open(str(n), 'w')\ntime.sleep(5)")

    assert answer.status is RunStatus.FAILED
    assert answer.message == "file limit exceeded: more than 10 files"


@every_level
async def test_a_stdin_that_nobody_reads_is_no_failure(level: str) -> None:
    async with a_sandbox(level) as state:
        answer = await run(state, "print(1)", stdin="x" * 1_000_000)

    assert answer.status is RunStatus.SUCCESS
