"""The users of docker/users.acl: each kind of service can do its part of the data plane, and nothing besides."""

import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from flotilla.backup.keys import dump_keys, restore_keys
from flotilla.cli.redis_server import find_server
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.streams.hop import HopName, StreamKeys
from flotilla.shared.streams.redis.connection import check_server, connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.contract.streams.conftest import issue
from tests.fleet import until
from tests.netns.fleet import shipped_users

KINDS = ("gateway", "rollout", "reward", "trainer", "backup")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server with the users that are deployed."""
    (tmp_path / "users.acl").write_text(shipped_users({kind: f"password-of-{kind}" for kind in KINDS}))
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


class Users:
    """A client and a data plane of one experiment for each user."""

    def __init__(self, port: int) -> None:
        self.urls = {kind: f"redis://{kind}:password-of-{kind}@127.0.0.1:{port}/0" for kind in KINDS}
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
        if kind in {"rollout", "reward", "trainer"}:
            for command in (("INFO",), ("SCAN", "0"), ("RANDOMKEY",), ("CLIENT", "LIST")):
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
    nobody = connect(f"redis://127.0.0.1:{port}/0")
    assert await nobody.ping()
    for command in (("GET", users.keys.state), ("INFO",), ("EVAL", "return 1", "0")):
        with pytest.raises(NoPermissionError):
            await nobody.execute_command(*command)
    await nobody.aclose()
