import asyncio
import subprocess
import sys

import pytest

from flotilla import Client
from flotilla.client.blocking import LoopThread
from tests.fleet import ROOT

FORGETFUL = """
from flotilla import Client
client = Client("http://127.0.0.1:9", token="t", deadline_seconds=2)
try:
    client.experiments()
except Exception as error:
    print(type(error).__name__)
"""


def test_a_script_that_does_not_close_its_client_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )

    assert (done.stdout.strip(), done.stderr) == ("Unavailable", "")


def test_a_closed_client_says_so_and_may_be_closed_again() -> None:
    client = Client("http://127.0.0.1:9", token="t")
    client.close()
    client.close()

    with pytest.raises(RuntimeError, match="the client is closed"):
        client.experiments()


def test_a_call_returns_and_raises_what_its_function_does() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def fail() -> None:
        raise ValueError("no")

    thread = LoopThread()
    assert thread.call(answer) == 42
    with pytest.raises(ValueError, match="no"):
        thread.call(fail)
    thread.close()
    assert thread.is_closed


def test_what_still_runs_is_cancelled_at_the_end() -> None:
    ended = []

    async def begin() -> None:
        async def lasting() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        begin.task = asyncio.create_task(lasting())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    thread = LoopThread()
    thread.call(begin)
    thread.close()

    assert ended == [True]
