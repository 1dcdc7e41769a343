"""``flotilla page RUN...``: the gateway's page, for looking alone, on what runs have left in their folders."""

import argparse
import asyncio
import secrets
import webbrowser
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from flotilla.cli.demo.unpacking import unpack
from flotilla.cli.output import new_console
from flotilla.cli.run_directory import FLEET
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.recorded import recorded_state
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.left_behind import DATABASE
from flotilla.shared.errors import InvalidRequest, NotFound
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.net.server.serving import address_of, bind, serve_here

SECONDS = 365 * 86_400.0
"""Lifetime of the token, longer than the command runs."""
NAME = "run folders"


async def page(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        InvalidRequest: there is nothing to show.
        NotFound: no gateway has left anything in a folder.
    """
    if not arguments.runs and not arguments.demo:
        raise InvalidRequest("name the folder of a run, or use --demo to see a recorded one")
    with TemporaryDirectory(prefix="flotilla-demo-") as demo:
        folders = list(dict.fromkeys(_data_of(Path(each)) for each in arguments.runs))
        if arguments.demo:
            folders.append(await asyncio.to_thread(unpack, Path(demo)))
        await _show(folders, arguments)
    return 0


async def _show(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    settings = GatewaySettings(token=secrets.token_urlsafe(32), redis_url="", data=folders[0])
    async with recorded_state(settings, folders) as state:
        # The operator's token is never shown, so nothing can be changed.
        token = state.tokens.issue(Principal(Scope.READER, NAME), SECONDS)
        with bind("127.0.0.1", arguments.port) as listening, TemporaryDirectory(prefix="flotilla-page-") as private:
            url = f"{address_of(listening)}/#token={token}"
            new_console().print(f"page       {url}\nCtrl-C ends it", markup=False, soft_wrap=True)
            if not arguments.no_browser:
                open_browser(url, Path(private))
            await serve_here(create_app(settings, open_state=lambda _: _Opened(state)), listening)


def open_browser(url: str, private: Path) -> None:
    """Open a browser at an address that others must not read: it gets a file that leads there.

    Its command line, with all arguments, can be read by every user of the machine.

    Args:
        url: holds a token.
        private: a folder that only this user can read; it must stay until the browser has read the file.
    """
    leading = private / "page.html"
    leading.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">', encoding="utf-8")
    webbrowser.open(leading.as_uri())


def _data_of(named: Path) -> Path:
    """Find the data directory of a run, or of a fleet."""
    for folder in (named, named / FLEET):
        if (folder / DATABASE).is_file():
            return folder
    raise NotFound(f"there are no experiments in {named}: name a run's folder, or a fleet's data directory")


class _Opened(AbstractAsyncContextManager[GatewayState]):
    """What is open already, and closed by its opener."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __aenter__(self) -> GatewayState:
        return self._state

    async def __aexit__(self, *_error: object) -> None:
        """Leave it open."""
