"""`deploy/node.sh` on two machines, which are processes here: services of both register, and all end when told."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.server.ports import lasting_port
from tests.fleet import ROOT, until

SCRIPT = ROOT / "deploy" / "node.sh"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
async def test_services_of_both_machines_register_and_end_when_they_are_told(tmp_path: Path) -> None:
    gateway, redis = lasting_port("127.0.0.1"), lasting_port("127.0.0.1")
    environment = {
        **os.environ,
        "FLOTILLA_TOKEN": "of-the-operator",
        "FLOTILLA_SERVICE_TOKEN": "of-services",
        "REDIS_PASSWORD": "of-the-data-plane",
        "FLEET_PYTHON": sys.executable,
        "FLOTILLA_DATA": str(tmp_path),
        "TRAINER_NODES": "0",
        "GATEWAY_PORT": str(gateway),
        "REDIS_PORT": str(redis),
    }
    logs = [(tmp_path / f"machine-{rank}.log").open("wb") for rank in range(2)]
    machines = [
        subprocess.Popen(["bash", str(SCRIPT), str(rank), "2", "127.0.0.1"], env=environment, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        async with GatewayClient(f"http://127.0.0.1:{gateway}", "of-the-operator") as client:
            kinds: set[str] = set()
            while not kinds >= {"reward", "rollout"}:
                page = await client.call("GET", "/v1/services", deadline_seconds=120)
                kinds = {each["kind"] for each in page["items"]}
                await anyio.sleep(0.2)
        commands = b""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended since
                commands += path.read_bytes()
        assert b"of-the-data-plane" not in commands
    finally:
        for machine in reversed(machines):
            machine.terminate()
        ends = [machine.wait(60) for machine in machines]
        for log in logs:
            log.close()
    assert ends == [0, 0], [path.read_text()[-1500:] for path in tmp_path.glob("machine-*.log")]
    until(lambda: not _is_open(redis) and not _is_open(gateway), 20, "the end of the servers")


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
