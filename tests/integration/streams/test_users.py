"""The users of docker/users.acl: each kind of service can do its part of the data plane, and nothing besides."""

import asyncio
import shutil
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from flotilla.backup.keys import dump_keys, restore_keys
from flotilla.cli.redis_server import find_server
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.streams.hop import HopName, StreamKeys
from flotilla.shared.streams.redis.connection import check_server, condition_of, connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.contract.streams.conftest import issue
from tests.fleet import ROOT, until
from tests.netns.fleet import shipped_users

KINDS = ("gateway", "rollout", "reward", "trainer", "backup")
ALL = (*KINDS, "operator", "health")
CONFIGURATION = ROOT / "deploy" / "kubernetes" / "base" / "valkey.conf"


@contextmanager
def serving(folder: Path, port: int, program: str | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server with the users that are deployed, on what an earlier one left in its folder."""
    (folder / "users.acl").write_text(shipped_users({kind: f"password-of-{kind}" for kind in ALL}))
    options = ("--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--dir", str(folder))
    for line in CONFIGURATION.read_text().splitlines():
        if line.startswith(("client-query-buffer-limit", "maxmemory-clients")):
            options += (f"--{line.split()[0]}", line.split()[1])
    command = [
        program or str(find_server()),
        *options,
        "--aclfile",
        str(folder / "users.acl"),
        "--lua-time-limit",
        "20",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        until(lambda: _accepts(port), 20, "the server")
        yield server
        server.terminate()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Give the port of such a server."""
    port = lasting_port("127.0.0.1")
    with serving(tmp_path, port):
        yield port


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


class Users:
    """A client and a data plane of one experiment for each user."""

    def __init__(self, port: int) -> None:
        self.urls = {kind: f"redis://{kind}:password-of-{kind}@127.0.0.1:{port}/0" for kind in ALL}
        self.clients = {kind: connect(url) for kind, url in self.urls.items()}
        self.keys = StreamKeys(uuid.uuid4().hex)
        self.planes = {kind: RedisDataPlane(client, self.keys.experiment_id) for kind, client in self.clients.items()}


@pytest.fixture
async def users(port: int) -> AsyncIterator[Users]:
    made = Users(port)
    yield made
    for client in made.clients.values():
        await client.aclose()


async def test_letters_and_backups_need_no_more_than_their_users_have(users: Users, tmp_path: Path) -> None:
    # All else of the data plane is tried under these users by the contract suite.
    await check_server(users.urls["gateway"])
    await issue(users.planes["gateway"], 2)
    await users.planes["reward"].mailbox.expect("letter", seconds=60)
    await users.planes["rollout"].mailbox.accept("letter")
    await users.planes["gateway"].mailbox.deliver("letter", b"answer")
    found = await users.planes["reward"].mailbox.find("letter")
    assert found is not None and found.answer == b"answer"

    await dump_keys(users.urls["backup"], [users.keys.experiment_id], tmp_path)
    await users.planes["gateway"].remove()
    await users.clients["gateway"].unlink(users.keys.letter("letter"))
    await restore_keys(users.urls["backup"], [users.keys.experiment_id], tmp_path)

    assert (await users.planes["gateway"].ledger()).issued == 2


@pytest.mark.parametrize("program", [None, "redis-server"])
async def test_a_server_that_was_killed_reads_all_of_its_log(program: str | None, tmp_path: Path) -> None:
    """Redis from 7.0 on applies the transactions in it by the rights of the user `default`, whom nobody can be."""
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    port = lasting_port("127.0.0.1")
    with serving(tmp_path, port, program) as server:
        users = Users(port)
        await issue(users.planes["gateway"], 3)
        await asyncio.sleep(0.3)  # it is written at the end of a turn of the server's loop
        server.kill()
        server.wait()
    with serving(tmp_path, port, program):
        again = Users(port)
        keys = StreamKeys(users.keys.experiment_id)
        assert (await RedisDataPlane(again.clients["gateway"], keys.experiment_id).ledger()).issued == 3
        for each in (*users.clients.values(), *again.clients.values()):
            await each.aclose()


async def test_no_kind_writes_what_is_anothers(users: Users) -> None:
    keys = users.keys
    of_the_trainer = (keys.state, keys.plans, keys.lineage, keys.consumed)
    for kind in ("rollout", "reward"):
        client = users.clients[kind]
        await client.hget(keys.state, "trainer_incarnation")
        for key in of_the_trainer:
            for command in (("HSET", key, "trainer_owner", "me"), ("DEL", key), ("UNLINK", key)):
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
            with pytest.raises(ResponseError, match=r"(?i)permission|acl"):
                await client.eval("return redis.call('HSET', ARGV[1], 'trainer_owner', 'me')", 0, key)
        with pytest.raises((NoPermissionError, Unavailable)):
            await users.planes[kind].trainer("me").take_over()
    for kind, hop in (("rollout", HopName.SCORED), ("reward", HopName.TASKS), ("trainer", HopName.TASKS)):
        with pytest.raises(NoPermissionError):
            await users.clients[kind].xadd(keys.stream(hop), {"header": b"", "payload": b""})


async def test_nobody_flushes_lists_or_configures_and_who_has_no_password_gets_nothing(users: Users, port: int) -> None:
    for kind, client in users.clients.items():
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST"), ("GET", "other")):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)
        if kind in {"rollout", "reward", "trainer", "health"}:
            for command in (("INFO",), ("SCAN", "0"), ("RANDOMKEY",), ("CLIENT", "LIST")):
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
    assert await users.clients["health"].ping()
    nobody = connect(f"redis://127.0.0.1:{port}/0")
    for command in (("PING",), ("GET", users.keys.state), ("INFO",), ("EVAL", "return 1", "0")):
        with pytest.raises(AuthenticationError):
            await nobody.execute_command(*command)
    await nobody.aclose()


def test_who_says_no_password_fills_no_memory_of_the_server(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(b"*2\r\n$4\r\nPING\r\n$52428800\r\n")
        assert b"unauthenticated bulk length" in stranger.recv(200)
        assert stranger.recv(200) == b"", "it is cut"


async def test_an_operator_ends_a_script_that_does_not_end_and_nobody_else_does(users: Users) -> None:
    operator = users.clients["operator"]
    endless = asyncio.create_task(users.clients["reward"].execute_command("EVAL", "while true do end", 0))
    while await answer_of(operator) != "BUSY":
        await asyncio.sleep(0.02)
    for kind in KINDS:
        with pytest.raises(NoPermissionError):
            await users.clients[kind].execute_command("SCRIPT", "KILL")

    await operator.execute_command("SCRIPT", "KILL")

    with pytest.raises(ResponseError, match="killed"):
        await endless
    assert "reward" in {each["user"] for each in await operator.client_list()}
    assert await users.clients["reward"].ping()


async def answer_of(client: Redis) -> str:
    try:
        await client.ping()
    except ResponseError as error:
        return condition_of(error) or ""
    return "PONG"
