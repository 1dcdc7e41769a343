"""One server, own or external, and whether it lives.

A server that is ours is dead when its process ends. One that lives and does not work is found by its health check;
while it is paused it may be unable to answer that, so it is not asked then. A lost connection alone is no death.

An external server may also be restarted, and then it lives with other weights, which their label shows. It is
checked with its health, and after each lost connection.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.rollout.engines.servers import leftovers
from flotilla.services.rollout.engines.servers.client import LIMITS, Refused, ServerClient, Unreachable
from flotilla.services.rollout.engines.servers.dialect import Body, Dialect, Launch, VersionLost, label_in
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.children.keeper import CANNOT_START
from flotilla.shared.children.processes import Kept
from flotilla.shared.errors import (
    DeadlineExceeded,
    FlotillaError,
    InvalidSpec,
    ServerUnreachable,
    Unavailable,
    WeightsDiverged,
    WorkerDied,
)
from flotilla.shared.net.client.checked_transport import CheckedAddresses, checked_address

LAST_LINES = 20
ERROR_LINES = 200
"""Of the last lines, in how many the error is searched for that ended a server: tracebacks are long."""
MAX_LINE = 400
USAGE_EXIT_CODE = 2
"""Of a program that refuses its arguments."""
ERROR = re.compile(r"\b(?:\w+(?:Error|Exception): |Value error, )(?!.*(?:root cause above|for the root cause\.)).+")
"""In a line; vLLM's front ends with some that only refer to another, pydantic's is told a line after its name."""
MISSING = re.compile(r"No module named '?([\w.]+)")
CHILDREN_SECONDS = 3.0
"""What its children have to tidy up when its first process has ended by itself."""


class ServerProcess:
    """One server process with its children.

    Args:
        python: interpreter that has the server.
        launch: how it is started.
        place: directory for its files, which is the caller's to delete.
        name: of this kind of server, for messages.
        variable: that names the interpreter.

    Attributes:
        was_up: whether it has answered: its end is no refusal of its arguments or of its environment then.
    """

    def __init__(self, python: Path, launch: Launch, place: Path, *, name: str, variable: str) -> None:
        self._python = python
        self._launch = launch
        self._place = place
        self._name = name
        self._variable = variable
        self.was_up = False
        self._kept: Kept | None = None
        self._lines: deque[str] = deque(maxlen=ERROR_LINES)

    @property
    def process_id(self) -> int | None:
        """Of its keeper, while that runs: the server is its first child."""
        return self._kept.pid if self._kept is not None and not self._kept.has_ended else None

    @property
    def last_lines(self) -> str:
        """What it wrote last."""
        return " | ".join(list(self._lines)[-LAST_LINES:]) or "no output"

    async def start(self) -> None:
        """Start it; it is not up yet when this returns."""
        launch = self._launch
        await asyncio.to_thread(write_private, self._place, launch.files)
        self._kept = await Kept.start(
            (str(self._python), *launch.arguments),
            environment=launch.environment,
            directory=self._place,
            on_line=self._hear,
            seconds=CHILDREN_SECONDS,
        )

    async def ended(self) -> WorkerDied | InvalidSpec:
        """Wait until it has ended by itself, and return the cause."""
        assert self._kept is not None
        code = await self._kept.ended()
        last = self.last_lines
        if code == CANNOT_START:
            return WorkerDied(f"{self._variable} {self._python} cannot be started: {last}")
        if not self.was_up and self._lines and (missing := MISSING.search(self._lines[-1])):
            return InvalidSpec(
                f"{self._variable} {self._python} cannot run {self._name}, it has no module {missing[1]}: set it to "
                f"the interpreter of an environment in which {self._name} is installed (docs/engines.md), or set "
                "rollout.engine.url to the address of a server"
            )
        if not self.was_up and code == USAGE_EXIT_CODE:
            why = next((line for line in reversed(self._lines) if "error" in line.lower()), last)
            return InvalidSpec(f"the {self._name} server refuses rollout.engine.options: {why}")
        errors = [found[0] for line in self._lines if " WARNING " not in line and (found := ERROR.search(line))]
        if code >= 0 and errors:
            cause = f"the {self._name} server ended by exit code {code}: {errors[-1]} (more is in the rollout's log)"
            return WorkerDied(cause, exit_code=code)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return WorkerDied(f"the {self._name} server ended by {how}; last lines: {last}", exit_code=code)

    async def note_leftovers(self) -> None:
        """Note what it would leave behind if it were killed, or we; see ``servers.leftovers``."""
        if self._kept is not None:
            # Where the disk is full nothing is noted; the server is watched and ended all the same.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(leftovers.note, self._place, self._kept.pid, self._launch.shared_memory)

    async def close(self, seconds: float) -> None:
        """End it and its children, by force after some seconds, and remove what they left behind."""
        if self._kept is not None:
            await self.note_leftovers()
            await self._kept.close(seconds)
            await asyncio.to_thread(leftovers.remove, self._place)

    def _hear(self, line: str) -> None:
        self._lines.append(line[:MAX_LINE])
        log.info("engine output", extra={"line": line[:MAX_LINE]})


def write_private(place: Path, files: Mapping[str, str]) -> None:
    """Write files that hold a server's secrets, readable by this user only."""
    for name, text in files.items():
        descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write(text)


log = logging.getLogger(__name__)

MAX_FAILED_PROBES = 3
OWN_PROBES = 20
HEALTH_SECONDS = 30.0
"""SGLang itself gives up a probe after 20."""
POLL_SECONDS = 0.5
NO_ANSWER = (Refused, Unreachable, DeadlineExceeded)


class Connection:
    """Calls a server and watches it.

    Args:
        settings: how it runs, or where.
        dialect: what kind of server it is.
        place: directory for files of a server that is ours.
        context_tokens: that a Flotilla server is started with.
        label: of the weights that a Flotilla server is started with.
        on_death: called once when the server is found dead; every later call raises why.
        serving: the label of what the server samples with; None while it is paused or not yet ready.
        transport: another one than sockets, for tests.
    """

    def __init__(
        self,
        settings: ServerSettings,
        dialect: Dialect,
        place: Path,
        context_tokens: int,
        label: str,
        *,
        on_death: Callable[[], None],
        serving: Callable[[], str | None],
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._settings = settings
        self._dialect = dialect
        self._on_death = on_death
        self._serving = serving
        self.server: ServerProcess | None = None
        self._at = f" at {settings.url}" if settings.url is not None else ""
        url, key = settings.url, None
        if url is None:
            assert settings.python is not None
            launch = dialect.launch(settings, place, context_tokens, label)
            self.server = ServerProcess(settings.python, launch, place, name=dialect.name, variable=dialect.variable)
            url, key = launch.url, launch.key
            if transport is None and launch.socket is not None:
                transport = httpx.AsyncHTTPTransport(uds=str(place / launch.socket), limits=LIMITS)
        elif transport is None:
            # A spec's URL makes this service connect somewhere: the operator's policy decides.
            transport = CheckedAddresses(settings.networks, max_answer_bytes=None, limits=LIMITS)
        self._client = ServerClient(url, key, dialect.name, transport)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.death: FlotillaError | None = None

    async def start(self) -> None:
        """Start the server if it is ours, wait until it is up, and watch it from then on.

        Raises:
            InvalidSpec: it refuses its arguments, or is where the operator lets no URL lead.
            WorkerDied: it ended before it was up.
        """
        if self.server is None:
            await self._check_address()
        else:
            await self.server.start()
            ended = self.spawn(self.server.ended(), "server process")
            up = self.spawn(self._until_up(), "server start")
            try:
                await asyncio.wait([ended, up], return_when=asyncio.FIRST_COMPLETED)
            finally:
                up.cancel()
            if ended.done():
                raise ended.result()
            up.result()
            self.server.was_up = True
            ended.add_done_callback(lambda task: None if task.cancelled() else self.die(task.result()))
        self.spawn(self._watch(), "server health")

    async def _check_address(self) -> None:
        url = httpx.URL(self._settings.url or "")
        try:
            await checked_address(url, self._settings.networks)
        except PermissionError as error:
            raise InvalidSpec(f"rollout.engine.url {url}: {error}") from error
        except OSError as error:
            log.info("the engine's host cannot be resolved now", extra={"cause": str(error)})

    async def close(self) -> None:
        """End a server that is ours, and everything that waits for it."""
        if self.server is not None:
            await self.server.close(self._settings.close_seconds)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def generate(self, body: Body) -> Any:
        """Ask for a completion, which takes as long as it takes; errors as of ``post``."""
        try:
            return await self._answered(self._client.post(self._dialect.generate_path, body, seconds=None))
        except Refused:
            # One that was restarted with other arguments refuses what it took before.
            with suppress(*NO_ANSWER):
                await self._check_label()
            self.check()
            raise

    async def post(self, path: str, body: Body | None, *, seconds: float | None = None) -> Any:
        """Call an endpoint within some seconds, by default ``call_seconds``.

        Raises:
            Refused: the server said no.
            DeadlineExceeded: it did not answer in time.
            Unavailable: it dropped the connection, and lives.
            WorkerDied: it is dead.
        """
        return await self._answered(self._client.post(path, body, seconds=seconds or self._settings.call_seconds))

    async def get(self, path: str, *, seconds: float | None = None) -> Any:
        """Read an endpoint; deadline and errors as of ``post``."""
        return await self._answered(self._client.get(path, seconds=seconds or self._settings.call_seconds))

    def death_by(self, cause: str) -> WorkerDied:
        """Make the error of a server that no longer answers: one that is not ours may come back."""
        return WorkerDied(cause) if self.server is not None else ServerUnreachable(cause)

    def has_lost(self, lost: VersionLost) -> None:
        """Give the server up, since its weights are not what it was given last."""
        self.die(
            WorkerDied(
                f"the {self._dialect.name} server{self._at} does not serve the version that it was given, {lost}: it "
                "was restarted, or another client uses it, though each rollout needs a server of its own"
            )
        )

    def die(self, death: FlotillaError) -> None:
        """Mark the server as dead, once: it has ended, or its weights are unknown."""
        if self.death is None:
            self.death = death
            log.error("engine died", extra={"cause": death.detail})
            self._on_death()
            if self.server is not None:
                self.spawn(self.server.close(self._settings.close_seconds), "server end")

    @contextlib.contextmanager
    def loading(self, version: int, *, goes_on_after: type[FlotillaError] | tuple[()] = ()) -> Iterator[None]:
        """Mark the server as dead if the block fails: its weights are unknown, or it is paused for good.

        Args:
            version: that the block has it load.
            goes_on_after: errors that leave it as it was; but for what is found to be other than it was given.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, goes_on_after) and not isinstance(error, WeightsDiverged):
                raise
            why = error.detail if isinstance(error, FlotillaError) else f"the server's reply cannot be used: {error!r}"
            cause = f"version {version} could not be loaded: {why}"
            self.die(self.death_by(cause) if isinstance(error, Unavailable) else WorkerDied(cause))
            if isinstance(error, WeightsDiverged):
                raise
            raise self.death or error from error

    @property
    def last_lines(self) -> str:
        """What a server that is ours wrote last."""
        return self.server.last_lines if self.server is not None else ""

    def check(self) -> None:
        """Raise the server's death, if it is dead."""
        if self.death is not None:
            raise self.death

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run something until it ends or the connection closes."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answered(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except Unreachable as error:
            raise await self._after_lost_connection(error) from error

    async def _after_lost_connection(self, error: Unreachable) -> FlotillaError:
        """Find out whether the server is dead, or dropped a connection only."""
        # The end of an own process is reported with its cause, with some delay on a busy machine.
        for _ in range(MAX_FAILED_PROBES if self.server is None else OWN_PROBES):
            if self.death is not None:
                return self.death
            with suppress(*NO_ANSWER):
                await self._client.get(self._dialect.alive_path, seconds=self._settings.call_seconds)
                await self._check_label()
                return self.death or Unavailable(f"the {self._dialect.name} server dropped a connection: {error}")
            await asyncio.sleep(POLL_SECONDS)
        self.die(self.death_by(f"the {self._dialect.name} server{self._at} cannot be reached: {error}"))
        assert self.death is not None
        return self.death

    async def _until_up(self) -> None:
        while True:
            await self._note_leftovers()
            try:
                await self._client.get(self._dialect.health_path, seconds=HEALTH_SECONDS)
                return
            except NO_ANSWER:
                await asyncio.sleep(POLL_SECONDS)

    async def _note_leftovers(self) -> None:
        if self.server is not None:
            await self.server.note_leftovers()

    async def _watch(self) -> None:
        failed = 0
        while failed < MAX_FAILED_PROBES:
            await asyncio.sleep(self._settings.probe_seconds)
            await self._note_leftovers()
            if self._serving() is None:
                continue
            try:
                await self._client.get(self._dialect.health_path, seconds=HEALTH_SECONDS)
                await self._check_label()
                failed = 0
            except NO_ANSWER as error:
                # A pause may have begun while it was asked.
                failed += self._serving() is not None
                log.warning("the engine does not answer", extra={"error": str(error), "times": failed})
        self.die(self.death_by(f"the {self._dialect.name} server{self._at} failed {failed} health checks in a row"))

    async def _check_label(self) -> None:
        """Give the server up if it does not serve what it was given last; errors as of ``ServerClient.get``."""
        label = self._serving()
        found = label_in(await self._client.get(self._dialect.label_path, seconds=HEALTH_SECONDS))
        # Other weights may have been loaded while it was asked.
        if label is not None and label == self._serving() and found != label:
            self.has_lost(VersionLost(found))
