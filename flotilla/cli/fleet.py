"""A local fleet: the same services as anywhere, as processes of this one, with a data directory of their own.

<data>/fleet.json      its owner and addresses (mode 0600)
<data>/token           the fleet's bearer token (mode 0600)
<data>/gateway.sqlite  the control plane's state, unless FLOTILLA_DATABASE_URL names another database
<data>/redis/          the data plane's log, if the fleet runs its own server
<data>/logs/           one file per process
<data>/experiments/    checkpoints
"""

import argparse
import asyncio
import errno
import fcntl
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flotilla.cli.device_division import Wishes, divide
from flotilla.cli.processes import MEBIBYTE, LogBounds, OwnedProcess, ProcessSpec, check_alive
from flotilla.cli.redis_server import LocalRedis, RedisKeeper
from flotilla.client.asynchronous import AsyncClient
from flotilla.connection import FLEET_FILE, FleetInfo, typed
from flotilla.shared.children.processes import birth_of, end_family, python_module
from flotilla.shared.environment.settings import EXPERIMENTS, allows_volatile_redis, scheme_from
from flotilla.shared.errors import Conflict, FlotillaError, InvalidRequest, Unavailable, WorkerDied
from flotilla.shared.host.start_patience import VARIABLE, StartDeadline, cpu_seconds, patience_from
from flotilla.shared.net.authorisation.access import PassKey, Principal, Scope
from flotilla.shared.net.authorisation.tokens import TINKER_PREFIX, new_token, write_secret
from flotilla.shared.net.server.ports import check_can_be_told, lasting_port
from flotilla.shared.schemas.service import LENT, POOL, ServiceKind
from flotilla.shared.service.devices import given_to, machine_devices, own_devices
from flotilla.shared.streams.redis.connection import check_server
from flotilla.shared.weights.image.files import sweep

START_SECONDS = 90.0
TELL_SECONDS = 5.0
"""After so long the awaited services are printed again."""
GATEWAY = "gateway"
TINKER = {
    "tinker-trainer": "flotilla.services.trainer.tinker",
    "tinker-sampler": "flotilla.services.rollout.tinker",
}
"""What serves the Tinker API beside the gateway; it registers nowhere, and takes requests from Redis."""
SERVING_SEVERAL = frozenset({"trainer", "rollout", "reward"})
"""Kinds whose processes may serve several experiments at a time."""
LEASE_SECONDS = "15"
"""Lease of claims, unless the environment sets another."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What a local fleet consists of.

    Attributes:
        data: its directory.
        num_rollouts, num_trainers, num_rewards: services of each kind; a trainer serves one experiment at a time
            unless ``num_experiments`` is larger.
        num_sandboxes: sandbox services; 0 starts none.
        lends: whether one more rollout computes on the first trainer's devices, while these are lent.
        num_experiments: that each process of trainer, rollout and reward serves at a time, as a service for each.
        host, port: where the gateway listens; port 0 takes a free one.
        redis_url: a server to use; None starts one.
        log_level: of every service.
        log_bounds: of each process's log.
        devices: how the machine's GPUs are divided among trainers and rollouts.
        tinker_model: directory of the base model of the Tinker API; None: that is not served.
        tinker_models: its models that are in memory at a time; None: the usual number.
        tinker_disk_gb: what one key's models may take of the disk, in 10^9 bytes; None: half of the disk.
    """

    data: Path
    num_rollouts: int = 1
    num_trainers: int = 1
    num_rewards: int = 1
    num_sandboxes: int = 1
    lends: bool = False
    num_experiments: int = 1
    host: str = "127.0.0.1"
    port: int = 8470
    redis_url: str | None = None
    log_level: str = "INFO"
    log_bounds: LogBounds = field(default_factory=LogBounds)
    devices: Wishes = field(default_factory=Wishes)
    tinker_model: Path | None = None
    tinker_models: int | None = None
    tinker_disk_gb: int | None = None


def log_bounds_of(arguments: argparse.Namespace) -> LogBounds:
    """Read the bounds of logs of a command that starts a fleet."""
    return LogBounds(arguments.log_size * MEBIBYTE, arguments.log_files)


def service_environment(gateway_url: str, token: str, redis_url: str, data: Path) -> dict[str, str]:
    """Make the environment of a service of a local fleet, owned by this process."""
    return {
        **os.environ,
        "FLOTILLA_GATEWAY_URL": gateway_url,
        "FLOTILLA_TOKEN": token,
        "FLOTILLA_REDIS_URL": redis_url,
        "FLOTILLA_DATA": str(data.resolve()),
        "FLOTILLA_PORT": "0",
        "FLOTILLA_PARENT_PID": str(os.getpid()),
        "FLOTILLA_LEASE_SECONDS": os.environ.get("FLOTILLA_LEASE_SECONDS", LEASE_SECONDS),
        # A fleet ends at once: the work its rollouts have in progress is handed over, and waits in the data directory.
        "FLOTILLA_NOTICE_SECONDS": os.environ.get("FLOTILLA_NOTICE_SECONDS", "0"),
        # Contending thread pools on few cores are several times slower than one passive thread each.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def tinker_key(token: str) -> str:
    """Make the key that the Tinker API's client shows, from the fleet's token; it holds as long as that does."""
    return TINKER_PREFIX + PassKey(token).sign(Principal(Scope.TINKER, Scope.TINKER.value), None)


def check_port(host: str, port: int) -> None:
    """Check that a port can be taken, before anything is started; 0 checks the host alone.

    Raises:
        InvalidRequest: the host is no address of this machine, or a wildcard for all of them.
        Unavailable: the port cannot be taken.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise InvalidRequest(f"--host {host} is no address of this machine: {error.strerror}") from None
            raise Unavailable(
                f"port {port} on {host} cannot be used ({error.strerror}): choose another --port"
            ) from None
        check_can_be_told(probe, f"--host {host}")


def url_of(host: str, port: int) -> str:
    """Write where a server of this machine is found."""
    scheme = scheme_from(os.environ)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class LocalFleet:
    """Starts and ends the processes of a fleet; use it as an async context manager.

    Args:
        options: what it consists of.
        say: gets one line for each thing that happens.
    """

    def __init__(self, options: FleetOptions, say: Callable[[str], None]) -> None:
        self.options = options
        self._say = say
        self._lock: IO[str] | None = None
        self._redis: LocalRedis | None = None
        self._redis_keeper: RedisKeeper | None = None
        self._keeping_redis: asyncio.Task[None] | None = None
        self._processes: list[OwnedProcess] = []
        self._token = ""
        self._redis_url = ""
        self.gateway_url = ""

    @property
    def info(self) -> FleetInfo:
        """Where it is found."""
        servers = self.gateway_url, self._token, self.options.data, self._redis_url
        return FleetInfo(os.getpid(), *servers, birth_of(os.getpid()))

    def check(self) -> None:
        """Check that every process lives or is being restarted.

        Raises:
            WorkerDied: one failed for good.
        """
        check_alive(self._processes)
        if self._redis_keeper is not None and self._redis_keeper.gave_up is not None:
            raise WorkerDied(self._redis_keeper.gave_up)

    async def __aenter__(self) -> "LocalFleet":
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        """End everything in order; cancelling that, such as by a second Ctrl-C, ends everything at once."""
        stopping = asyncio.create_task(self._stop(), name="stop the fleet")
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self._say("everything is ended at once")
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            if self._keeping_redis is not None:
                self._keeping_redis.cancel()
            for process in self._processes:
                process.let_go()
            await asyncio.to_thread(end_family)
            await asyncio.to_thread(sweep)
            self._close()
            raise

    async def _start(self) -> None:
        data = self.options.data
        # It holds what specs say, passwords in URLs of graders included.
        try:
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InvalidRequest(f"{data} cannot become a directory: a file is in its place") from None
        self._take_lock(data)
        check_port(self.options.host, self.options.port)
        port = self.options.port or lasting_port(self.options.host)
        self._token = new_token()
        write_secret(data / "token", self._token)
        self._redis_url = await self._start_redis(data)
        self.gateway_url = url_of(self.options.host, port)
        environment = service_environment(self.gateway_url, self._token, self._redis_url, data)
        environment |= {"FLOTILLA_HOST": self.options.host, "FLOTILLA_LOG_LEVEL": self.options.log_level}
        if self.options.tinker_model is not None:
            environment["FLOTILLA_TINKER_MODEL"] = str(self.options.tinker_model)
        self._add(GATEWAY, "flotilla.services.gateway", {**environment, "FLOTILLA_PORT": str(port)})
        if self.options.tinker_model is not None:
            # They speak with Redis alone, and know no token that the gateway lets in.
            own = environment | {"FLOTILLA_TOKEN": new_token()}
            if self.options.tinker_models is not None:
                own |= {"FLOTILLA_TINKER_MODELS": str(self.options.tinker_models)}
            if self.options.tinker_disk_gb is not None:
                own |= {"FLOTILLA_TINKER_DISK_GB": str(self.options.tinker_disk_gb)}
            for name, module in TINKER.items():
                self._add(name, module, own)
        self._add_services(environment, await self._divide_devices())
        for process in self._processes:
            await process.start()
            self._say(f"{process.spec.name:<10} pid {process.pid}")
        await self._wait_until_ready()
        self._write_fleet_file(data)

    def _add_services(self, environment: dict[str, str], given: Mapping[str, Sequence[dict[str, str]]]) -> None:
        """Add what registers with the gateway.

        Args:
            environment: of all of them.
            given: variables for the devices of each service, by kind.
        """
        # Importing torch takes the longest, so those start first.
        for kind, count in (
            ("trainer", self.options.num_trainers),
            ("rollout", self.options.num_rollouts),
            ("reward", self.options.num_rewards),
            ("sandbox", self.options.num_sandboxes),
        ):
            # Each knows no more of the fleet than it needs to register as what it is.
            own = environment | {"FLOTILLA_TOKEN": PassKey(self._token).joining(ServiceKind(kind))}
            if kind in SERVING_SEVERAL:
                own |= {EXPERIMENTS: str(self.options.num_experiments)}
            for number in range(count):
                name = kind if count == 1 and kind != "rollout" else f"{kind}-{number}"
                is_optional, may_leave = kind == "sandbox", kind == "rollout"
                own_devices = given[kind][number] if kind in given else {}
                module = f"flotilla.services.{kind}"
                self._add(name, module, own | own_devices, is_optional=is_optional, may_leave=may_leave)
            if kind == "rollout" and self.options.lends:
                lent = given["trainer"][0] if "trainer" in given else {}
                self._add(f"{kind}-{LENT}", f"flotilla.services.{kind}", own | lent | {POOL: LENT}, may_leave=True)

    async def _divide_devices(self) -> dict[str, list[dict[str, str]]]:
        """Divide the GPUs of this machine, and print it; return variables for its services, by kind."""
        machine = await asyncio.to_thread(machine_devices)
        labels = tuple(each.label for each in own_devices(machine, os.environ))
        counts = {"num_trainers": self.options.num_trainers, "num_rollouts": self.options.num_rollouts}
        division = divide(labels, self.options.devices, **counts)
        if division.sentence:
            self._say(f"devices    {division.sentence}")
        parts = {"trainer": division.trainers, "rollout": division.rollouts}
        return {kind: [given_to(part) for part in dealt] for kind, dealt in parts.items() if dealt is not None}

    def _take_lock(self, data: Path) -> None:
        lock = (data / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise Conflict(
                f"another fleet runs with the data directory {data}: end it with `{typed('down', data)}`"
            ) from None
        self._lock = lock

    async def _start_redis(self, data: Path) -> str:
        if self.options.redis_url:
            may_be_volatile = allows_volatile_redis(os.environ)
            found = await check_server(self.options.redis_url, may_be_volatile=may_be_volatile)
            self._say(f"redis      {found}, as the environment says")
            return self.options.redis_url
        self._redis = LocalRedis(data / "redis")
        # On this thread, and quickly: the server ends with the thread that starts it.
        url = self._redis.start()
        self._say(f"redis      pid {self._redis.pid} (of this fleet's own, in {data / 'redis'})")
        self._redis_keeper = RedisKeeper(self._redis, self._say)
        self._keeping_redis = asyncio.create_task(self._redis_keeper.run(), name="keep redis")
        return url

    def _add(
        self, name: str, module: str, environment: dict[str, str], *, is_optional: bool = False, may_leave: bool = False
    ) -> None:
        command = tuple(python_module(module))
        spec = ProcessSpec(name, command, environment, is_optional=is_optional, may_leave=may_leave)
        log_path = self.options.data / "logs" / f"{name}.log"
        self._processes.append(OwnedProcess(spec, log_path, self._say, self.options.log_bounds))

    async def _wait_until_ready(self) -> None:
        began = told = time.monotonic()
        waiting: list[str] = []

        def computed() -> float:
            late = [each for each in self._processes if each.spec.name in waiting]
            return cpu_seconds(each.pid for each in late if each.pid is not None)

        deadline = StartDeadline(START_SECONDS, computed, patience=patience_from(os.environ))
        async with AsyncClient(self.gateway_url, self._token, deadline_seconds=2.0) as client:
            while waiting := await self._missing(client):
                now, missing = time.monotonic(), ", ".join(waiting)
                if await asyncio.to_thread(deadline.left) <= 0:
                    late = f"the fleet did not come up within {now - began:.0f} s"
                    raise Unavailable(
                        f"{late}: {missing} did not register; see {self.options.data / 'logs'} (on a busy machine "
                        f"{VARIABLE}=3 waits three times as long)"
                    )
                if now - told > TELL_SECONDS:
                    told = now
                    self._say(f"waiting    for {missing} ({now - began:.0f} s)")
                await asyncio.sleep(0.2)

    async def _missing(self, client: AsyncClient) -> list[str]:
        """Name the processes that have not registered yet; without an answer of the gateway's, that is meant."""
        self.check()
        try:
            await client.with_deadline(1.0).check_ready()
            services = await client.services()
        except FlotillaError:
            return [GATEWAY]
        # By process: services of an earlier fleet on this directory do not count.
        registered = Counter(service.pid for service in services)
        unregistered = {GATEWAY, *TINKER}
        wanted = [each for each in self._processes if each.gave_up is None and each.spec.name not in unregistered]
        return [each.spec.name for each in wanted if registered[each.pid or 0] < self._num_services(each.spec.name)]

    def _num_services(self, process: str) -> int:
        return self.options.num_experiments if process.partition("-")[0] in SERVING_SEVERAL else 1

    def _write_fleet_file(self, data: Path) -> None:
        content = {"pid": os.getpid(), "birth": birth_of(os.getpid()), "gateway_url": self.gateway_url}
        content |= {"token": self._token, "redis_url": self._redis_url}
        write_secret(data / FLEET_FILE, json.dumps(content))

    async def _stop(self) -> None:
        # Trainer and rollouts first, while gateway and data plane still take their last words.
        order = [each for each in self._processes if each.spec.name != "gateway"]
        await asyncio.gather(*(process.stop() for process in order))
        for process in self._processes:
            if process.spec.name == "gateway":
                await process.stop()
        if self._keeping_redis is not None:
            self._keeping_redis.cancel()
        if self._redis is not None:
            self._redis.stop()
        self._close()

    def _close(self) -> None:
        # Without the lock, the note in the directory is another fleet's.
        if self._lock is not None:
            (self.options.data / FLEET_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
