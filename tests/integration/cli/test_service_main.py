"""A service by itself: it refuses in one sentence, and ends with its owner only if it was told of one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
SERVICE = (sys.executable, "-m", "flotilla.services.reward")
ADDRESSES = {"FLOTILLA_GATEWAY_URL": "http://127.0.0.1:1", "FLOTILLA_REDIS_URL": "redis://127.0.0.1:1/0"}


def environment(**own: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOTILLA_")}
    return {**kept, **ADDRESSES, "PYTHONPATH": str(ROOT), **own}


@pytest.mark.parametrize("service", ["rollout", "reward", "trainer", "sandbox"])
def test_a_service_without_a_token_refuses_in_one_sentence(service: str) -> None:
    command = [sys.executable, "-m", f"flotilla.services.{service}"]

    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)

    assert result.returncode == 2
    assert result.stderr.startswith(f"{service}: FLOTILLA_TOKEN")
    assert "Traceback" not in result.stderr


def test_a_service_that_cannot_open_what_it_needs_refuses_in_one_sentence() -> None:
    command = [sys.executable, "-m", "flotilla.services.sandbox"]
    own = environment(FLOTILLA_TOKEN="a-token-of-this-test", FLOTILLA_SANDBOX_LEVEL="D")

    result = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    *_, sentence = result.stderr.splitlines()
    assert sentence.startswith("sandbox: ")
    assert "FLOTILLA_UNSAFE_SANDBOX=1" in sentence


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_service_that_would_register_where_nobody_reaches_it_refuses_in_one_sentence(host: str) -> None:
    own = environment(FLOTILLA_TOKEN="a-token-of-this-test", FLOTILLA_HOST=host)

    result = subprocess.run(SERVICE, env=own, capture_output=True, text=True, timeout=60)

    assert result.returncode == 2
    assert result.stderr.startswith(f"reward: FLOTILLA_HOST={host} stands for all addresses of this machine")


def test_a_service_ends_with_the_fleet_that_it_joined() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as fleet:
        own = environment(FLOTILLA_TOKEN="a-token-of-this-test", FLOTILLA_FLEET_PID=str(fleet.pid))
        with subprocess.Popen(SERVICE, env=own, stderr=subprocess.PIPE, text=True) as service:
            try:
                assert service.stderr is not None
                service.stderr.readline()
                time.sleep(1.5)
                assert service.poll() is None, "its fleet lives"

                fleet.kill()
                fleet.wait()

                assert service.wait(30) == 0
                assert "the fleet has ended, and so does this process" in service.stderr.read()
            finally:
                service.kill()


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_service_ends_with_its_owner_only_if_it_has_one(is_owned: bool) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "own = {'FLOTILLA_PARENT_PID': str(os.getpid())} if sys.argv[1] == 'True' else {}\n"
        "environment = {**os.environ, **own}\n"
        "child = subprocess.Popen(sys.argv[2:], env=environment, start_new_session=True, stderr=subprocess.PIPE)\n"
        "child.stderr.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(is_owned), *SERVICE],
        env=environment(FLOTILLA_TOKEN="a-token-of-this-test"),
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    with owner.stdout:
        service = psutil.Process(int(owner.stdout.readline()))
    try:
        owner.kill()
        owner.wait()
        time.sleep(0 if is_owned else 1.5)
        has_ended = _ends(service, seconds=20 if is_owned else 0)
    finally:
        if service.is_running():
            service.kill()

    assert has_ended is is_owned


def _ends(process: psutil.Process, *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True
