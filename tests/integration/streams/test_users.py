"""The users of docs/security.md: each kind of service can do its part of the data plane, and nothing besides."""

import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from flotilla.cli.redis_server import find_server
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.redis.connection import check_server, connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group
from tests.contract.streams.conftest import issue
from tests.fleet import ROOT, until

DOCUMENT = ROOT / "docs/security.md"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server with the documented users."""
    rules = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("user ")]
    (tmp_path / "users.acl").write_text("\n".join(rules) + "\n")
    port = lasting_port("127.0.0.1")
    options = ("--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--dir", str(tmp_path))
    command = [str(find_server()), *options, "--aclfile", str(tmp_path / "users.acl")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        until(lambda: _accepts(port), 20, "the server")
        yield port
        server.terminate()


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


async def test_each_kind_does_its_part_and_nothing_besides(port: int) -> None:
    urls = {
        kind: f"redis://{kind}:PASSWORD{number}@127.0.0.1:{port}/0"
        for number, kind in enumerate(("gateway", "rollout", "reward", "trainer"), start=1)
    }
    clients = {kind: connect(url) for kind, url in urls.items()}
    experiment_id = uuid.uuid4().hex
    planes = {kind: RedisDataPlane(client, experiment_id) for kind, client in clients.items()}
    try:
        await check_server(urls["gateway"])
        await issue(planes["gateway"], 1)
        tasks = planes["rollout"].hop(HopName.TASKS, "rollout")
        (claim,) = await tasks.claim(wait_seconds=0)
        assert await tasks.renew([claim]) == []
        assert await tasks.forward(claim, a_group(claim.task()))
        generated = planes["reward"].hop(HopName.GENERATED, "reward")
        (claim,) = await generated.claim(wait_seconds=0)
        assert await generated.hand_back(claim)
        ledger = await planes["trainer"].ledger()
        assert (ledger.issued, ledger.waiting.generated) == (1, 1)
        await planes["gateway"].remove()

        for kind, client in clients.items():
            for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST"), ("GET", "other")):
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
            if kind != "gateway":
                with pytest.raises(NoPermissionError):
                    await client.info()
    finally:
        for client in clients.values():
            await client.aclose()
