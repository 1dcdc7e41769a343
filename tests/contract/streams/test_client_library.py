"""What ``connection`` relies on inside redis-py: a release that changes it fails here, not in a fleet."""

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from flotilla.shared.streams.redis.connection import PACKING, WriterInPieces, _Packing

OVERRIDDEN = {"_connect", "pack_command", "pack_commands"}
"""Methods of its connections; the first is private, and leaves the stream's writer in ``_writer``."""


def test_the_version_is_bounded_and_the_installed_one_is_tried_here() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    (requirement,) = [each for each in project["project"]["dependencies"] if each.startswith("redis")]

    upper = re.search(r"<(\d+)$", requirement)

    assert upper is not None, requirement
    assert int(version("redis").partition(".")[0]) < int(upper[1])


def test_nothing_else_is_overridden() -> None:
    assert {name for name in vars(_Packing) if inspect.isfunction(getattr(_Packing, name))} == OVERRIDDEN


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
