"""The private parts of uvicorn that our connections need: a release that changes one of them fails here.

What is used is read from our own source, so that nothing is used that is not named here, and nothing is named that is
not used.
"""

import ast
import asyncio
import inspect
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from flotilla.shared.net.server import connections, serving
from flotilla.shared.net.server.connections import Connection, HeadWithBody

ROOT = Path(__file__).parents[2]

METHODS = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "eof_received": [],
    "on_message_begin": [],
    "on_url": ["url"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "send_400_response": ["msg"],
    "pause_writing": [],
    "resume_writing": [],
}
"""Overridden, with what each is called with: by asyncio, by httptools, and by uvicorn itself."""

ATTRIBUTES = {"client", "cycle", "flow", "headers", "loop", "scope", "transport"}
"""Of a connection."""

OF_CYCLE = {"disconnected", "message_event", "response_complete", "response_started", "transport"}
"""Of one request and its response; its transport is replaced."""

OF_FLOW = {"read_paused"}

OF_SERVER = {"capture_signals", "serve", "should_exit"}
OF_SERVERS_LOOP = {"on_tick", "should_exit"}
"""Where the loop is that looks whether the server should end."""


def chains(source: str, *path: str) -> set[str]:
    """Find what is read or set of ``a.b`` in a source, given ``a`` and ``b``."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == ".".join(path):
            found.add(node.attr)
    return found


@pytest.fixture
def connection() -> HttpToolsProtocol:
    config = uvicorn.Config(lambda: None, log_config=None, lifespan="off")
    loop = asyncio.new_event_loop()
    loop.close()
    return HttpToolsProtocol(config, ServerState(), {}, loop)


def test_the_version_that_is_asked_for_is_the_one_whose_parts_are_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "uvicorn")

    assert {each.operator for each in asked.specifier} == {">=", "<"}
    assert asked.specifier.contains(version("uvicorn"))


def test_what_is_overridden_is_called_as_before() -> None:
    overridden = {name for name in vars(Connection) if not name.startswith("__") and hasattr(HttpToolsProtocol, name)}
    parameters = {name: list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters)[1:] for name in overridden}

    assert parameters == METHODS


def test_a_connection_has_what_is_read_of_it(connection: HttpToolsProtocol) -> None:
    used = chains(inspect.getsource(Connection), "self") - set(METHODS)

    of_uvicorn = {name for name in used if not hasattr(Connection, name) and name not in Connection.__annotations__}
    assert of_uvicorn == ATTRIBUTES
    assert set(vars(connection)) >= ATTRIBUTES


def test_a_request_and_its_flow_have_what_is_read_of_them() -> None:
    ours, cycle = inspect.getsource(Connection), inspect.getsource(RequestResponseCycle.__init__)

    assert chains(ours, "self", "cycle") == OF_CYCLE <= chains(cycle, "self")
    assert chains(ours, "self", "flow") == OF_FLOW <= set(vars(FlowControl(asyncio.Transport())))


def test_a_response_asks_nothing_else_of_its_transport_than_the_one_in_its_place_has() -> None:
    asked = chains(inspect.getsource(RequestResponseCycle), "self", "transport")

    assert asked == {name for name in vars(HeadWithBody) if not name.startswith("_")}


def test_a_malformed_request_is_logged_in_the_words_that_are_left_out() -> None:
    (told,) = (node.value for node in ast.walk(ast.parse(inspect.getsource(connections._is_told)))
               if isinstance(node, ast.Constant) and str(node.value).endswith("received."))  # fmt: skip

    assert repr(told).strip("'") in inspect.getsource(httptools_impl)


def test_a_server_has_what_is_used_of_it() -> None:
    server = uvicorn.Server(uvicorn.Config(lambda: None, log_config=None, lifespan="off"))

    assert chains(inspect.getsource(serving), "self", "_server") == {*OF_SERVER, "end"}
    assert all(hasattr(server, name) for name in OF_SERVER)
    assert "sockets" in inspect.signature(server.serve).parameters


async def test_the_loop_of_a_server_looks_as_uvicorns_does() -> None:
    ours, theirs = serving._Server, uvicorn.Server
    its_own = set(vars(ours)) | {"_told"}

    assert {name for name in vars(ours) if not name.startswith("_") and hasattr(theirs, name)} == {"main_loop"}
    assert chains(inspect.getsource(ours), "self") - its_own == OF_SERVERS_LOOP
    assert "await self.main_loop()" in inspect.getsource(theirs._serve)
    assert chains(inspect.getsource(theirs.main_loop), "self") == {"on_tick"}
    assert "counter % 10 == 0" in inspect.getsource(theirs.on_tick), "0 renews the date"


async def test_a_server_that_is_told_to_end_does_not_wait_for_its_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOOK_SECONDS", 3600.0)
    server = serving._Server(uvicorn.Config(lambda: None, log_config=None, lifespan="off"))
    running = asyncio.create_task(server.main_loop())
    await asyncio.sleep(0)
    assert server.server_state.default_headers[0][0] == b"date"

    server.end()

    await asyncio.wait_for(running, 30)


async def test_a_server_looks_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOOK_SECONDS", 0.01)
    server = serving._Server(uvicorn.Config(lambda: None, log_config=None, lifespan="off"))
    running = asyncio.create_task(server.main_loop())
    await asyncio.sleep(0)

    server.should_exit = True

    await asyncio.wait_for(running, 30)
