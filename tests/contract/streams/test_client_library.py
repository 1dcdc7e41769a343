"""What ``connection`` relies on inside redis-py: a release that changes it fails here, not in a fleet."""

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)

from flotilla.shared.streams.redis.connection import PACKING, PlainPool, PlainRedis, WriterInPieces, _Packing

OVERRIDDEN = {"_connect", "pack_command", "pack_commands"}
"""Methods of its connections; the first is private, and leaves the stream's writer in ``_writer``."""


def test_the_version_is_bounded_and_the_installed_one_is_tried_here() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    (requirement,) = [each for each in project["project"]["dependencies"] if each.startswith("redis")]

    upper = re.search(r"<(\d+)$", requirement)

    assert upper is not None, requirement
    assert int(version("redis").partition(".")[0]) < int(upper[1])


@pytest.mark.parametrize(
    ("ours", "overridden"),
    [(_Packing, OVERRIDDEN), (PlainPool, {"get_connection", "release"}), (PlainRedis, {"execute_command"})],
)
def test_nothing_else_is_overridden(ours: type, overridden: set[str]) -> None:
    own = {name for name, value in vars(ours).items() if inspect.isfunction(value)}

    assert {name for name in own if not name.startswith("__")} == overridden


def test_its_pool_keeps_connections_where_ours_does() -> None:
    taking, giving = (
        inspect.getsource(each) for each in (ConnectionPool.get_available_connection, ConnectionPool.release)
    )

    assert "self._available_connections.pop()" in taking and "self._in_use_connections.add(connection)" in taking
    assert "self._in_use_connections.remove(connection)" in giving
    assert "self._available_connections.append(connection)" in giving
    assert not inspect.iscoroutinefunction(ConnectionPool.get_available_connection)


def test_a_connection_closes_itself_where_a_command_breaks_off() -> None:
    for method in (AbstractConnection.send_packed_command, AbstractConnection.read_response):
        assert "except BaseException:" in inspect.getsource(method)
        assert inspect.getsource(method).count("self.disconnect(nowait=True)") >= 3


def test_a_command_is_sent_and_its_answer_read_by_what_its_client_calls() -> None:
    source = inspect.getsource(Redis._send_command_parse_response)

    assert "await conn.send_command(*args)" in source
    assert "return await self.parse_response(conn, command_name, **options)" in source


@pytest.mark.parametrize("kind", [Connection, SSLConnection, UnixDomainSocketConnection])
def test_its_connections_have_what_is_overridden(kind: type[AbstractConnection]) -> None:
    ours = PACKING[kind]

    assert issubclass(ours, kind)
    assert inspect.iscoroutinefunction(kind._connect)
    assert not inspect.signature(kind._connect).parameters.keys() - {"self"}
    assert "self._writer = " in inspect.getsource(kind._connect)
    for name in ("pack_command", "pack_commands"):
        assert callable(getattr(kind, name))


def test_a_message_is_given_to_the_writer_as_a_list_and_then_drained() -> None:
    source = inspect.getsource(AbstractConnection.send_packed_command)

    assert source.index("writelines(") < source.index("drain()")
    assert {"writelines", "drain"} <= vars(WriterInPieces).keys()
