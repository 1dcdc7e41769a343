"""What a service reads from its environment; only ``__main__`` modules call this."""

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from urllib.parse import urlsplit

from flotilla.shared.environment.tls import Tls, tls_from
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.host.start_patience import patience_from
from flotilla.shared.schemas.service import NoticeSource, notices_from, pool_from
from flotilla.shared.telemetry.logging import FORMATS

NOTICE_SECONDS = 25.0
"""So that everything has ended within the 30 seconds that most schedulers wait before they kill."""
IPNetwork = IPv4Network | IPv6Network
GRADER_NETWORKS = "FLOTILLA_GRADER_NETWORKS"
PUBLIC_URL = "FLOTILLA_PUBLIC_URL"
LOOPBACK: tuple[IPNetwork, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
"""A grader on the reward service's own host: what a fleet on a laptop has."""
EXPERIMENTS, MOST_EXPERIMENTS = "FLOTILLA_EXPERIMENTS", 64
VOLATILE_REDIS = "FLOTILLA_ALLOW_VOLATILE_REDIS"
ENGINE_PYTHONS: Mapping[str, str] = {"sglang": "FLOTILLA_SGLANG_PYTHON", "vllm": "FLOTILLA_VLLM_PYTHON"}
"""Variables that name the interpreters of engines in environments of their own, by ``rollout.engine.kind``."""
DEFAULT_GATEWAY = "http://127.0.0.1:8470"
OF_LIBRARIES = ("HF_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Secrets that libraries read from the environment by themselves."""
PORTS = "FLOTILLA_PORTS"
HIGHEST_PORT = 65_535
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Addresses and secrets of one service.

    Attributes:
        gateway_url: where to register; of several gateways on one database all, with commas between them.
        token: bearer token of the fleet.
        tls: certificates of its listener and of its calls.
        public_url: the gateway as graders outside reach it; None: as this service does.
        redis_url: the data plane's server; empty for a service that has nothing to do with it.
        host, port: where its own HTTP interface listens; port 0 takes a free one.
        data: directory for files that outlive the process.
        log_level: least severe level that is logged.
        log_format: how: ``json``, ``plain``, or ``auto``, which is plain on a terminal and JSON elsewhere.
        lease_seconds: how long claims in the data plane live; the same for all services of a fleet.
        parent_pid: end when this process ends; None to stay.
        fleet_pid: end when this process ends, whose child this one is not; None to stay.
        notice_seconds: how long a rollout may take to leave after SIGTERM.
        pool: of machines, which it is in; None: it names none.
        notices: the metadata service that announces preemption of this machine; None: none.
        grader_networks: networks that are not public and that a spec's graders may be in.
        engine_pythons: interpreters that have SGLang or vLLM, for rollouts, by ``rollout.engine.kind``.
        experiments: that a trainer's, rollout's or reward's process serves at a time, as a service for each.
    """

    gateway_url: str
    token: str
    redis_url: str
    host: str = "127.0.0.1"
    port: int = 0
    data: Path = Path(".flotilla")
    log_level: str = "INFO"
    log_format: str = "auto"
    lease_seconds: float = 60.0
    parent_pid: int | None = None
    fleet_pid: int | None = None
    notice_seconds: float = NOTICE_SECONDS
    pool: str | None = None
    notices: NoticeSource | None = None
    engine_pythons: Mapping[str, Path] = field(default_factory=dict)
    grader_networks: tuple[IPNetwork, ...] = LOOPBACK
    public_url: str | None = None
    tls: Tls = field(default_factory=Tls)
    experiments: int = 1


def read_settings(
    environment: Mapping[str, str] | None = None, *, default_port: int = 0, needs_redis: bool = True
) -> ServiceSettings:
    """Read ``FLOTILLA_*``.

    Args:
        environment: what to read; None for that of this process.
        default_port: the port, if none is set.
        needs_redis: whether the service talks to the data plane; one that does not is not asked for its address.

    Raises:
        InvalidRequest: a variable is missing or malformed; the detail names it.
    """
    values = os.environ if environment is None else environment
    token = token_from(values)
    if not token:
        raise InvalidRequest("FLOTILLA_TOKEN or FLOTILLA_TOKEN_FILE must be set: no service runs without a token")
    redis_url = secret_from(values, "FLOTILLA_REDIS_URL") if needs_redis else ""
    if needs_redis and not redis_url:
        raise InvalidRequest(
            "FLOTILLA_REDIS_URL or FLOTILLA_REDIS_URL_FILE must be set, such as redis://127.0.0.1:6379/0"
        )
    ports_from(values)  # read where something listens, as the next where something starts
    patience_from(values)  # read where something is started; a wrong one is said here
    port = values.get("FLOTILLA_PORT", str(default_port))
    if not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"FLOTILLA_PORT must be a number from 0 to 65535, got {port!r}")
    gateway_url = values.get("FLOTILLA_GATEWAY_URL") or DEFAULT_GATEWAY
    check_gateway_url(gateway_url)
    return ServiceSettings(
        gateway_url=gateway_url,
        token=token,
        redis_url=redis_url,
        host=values.get("FLOTILLA_HOST") or "127.0.0.1",
        port=int(port),
        data=Path(values.get("FLOTILLA_DATA", ".flotilla")),
        log_level=_one_of(LEVELS, "FLOTILLA_LOG_LEVEL", values.get("FLOTILLA_LOG_LEVEL", "").upper() or "INFO"),
        log_format=_one_of(FORMATS, "FLOTILLA_LOG_FORMAT", values.get("FLOTILLA_LOG_FORMAT") or "auto"),
        lease_seconds=seconds_from(values, "FLOTILLA_LEASE_SECONDS", 60.0),
        parent_pid=_pid_from(values, "FLOTILLA_PARENT_PID"),
        fleet_pid=_pid_from(values, "FLOTILLA_FLEET_PID"),
        notice_seconds=seconds_from(values, "FLOTILLA_NOTICE_SECONDS", NOTICE_SECONDS, may_be_zero=True),
        pool=pool_from(values),
        notices=notices_from(values),
        engine_pythons=engine_pythons_from(values),
        grader_networks=networks_from(values, GRADER_NETWORKS, LOOPBACK),
        public_url=values.get(PUBLIC_URL) or None,
        tls=tls_from(values),
        experiments=experiments_from(values),
    )


def _one_of(known: Sequence[str], name: str, value: str) -> str:
    if value not in known:
        raise InvalidRequest(f"{name} must be {' or '.join(known)}, got {value!r}")
    return value


def _pid_from(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "")
    return int(text) if text.isdigit() else None


def gateway_urls(text: str) -> list[str]:
    """Part the addresses of several gateways, of which one leads: ``http://10.0.0.1:8470,http://10.0.0.2:8470``."""
    return [each.strip().rstrip("/") for each in text.split(",")]


def check_gateway_url(text: str) -> None:
    """Check that the addresses of gateways are such; what is none would be waited for.

    Raises:
        InvalidRequest: one is not.
    """
    for each in gateway_urls(text):
        _check_gateway_url(each)


def _check_gateway_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not url.isprintable() or " " in url:
        raise InvalidRequest(f"{url!r} is no address of a gateway: it is written http://HOST:PORT or https://HOST:PORT")


def token_from(values: Mapping[str, str], name: str = "FLOTILLA_TOKEN") -> str:
    """Read a token: the variable, else the file that ``NAME_FILE`` names; empty where neither is set.

    Raises:
        InvalidRequest: the file cannot be read, or what is there is no token; the detail does not repeat it.
    """
    token = secret_from(values, name)
    if not (token.isascii() and token.isprintable()) or " " in token:
        source = name if values.get(name, "").strip() else f"{values.get(f'{name}_FILE')} ({name}_FILE)"
        raise InvalidRequest(f"{source} holds no token: a token is one word of ASCII characters")
    return token


def secret_from(values: Mapping[str, str], name: str) -> str:
    """Read a secret: the variable, else the file that ``NAME_FILE`` names; empty where neither is set.

    Raises:
        InvalidRequest: the file cannot be read, is no text, or is empty; the detail does not repeat what it holds.
    """
    secret, path = values.get(name, "").strip(), values.get(f"{name}_FILE")
    if secret or not path:
        return secret
    source = f"{path} ({name}_FILE)"
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{source} cannot be read: it is no text") from None
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be read: {error.strerror}") from None
    if not secret:
        raise InvalidRequest(f"{source} is empty: it must hold what {name} would")
    return secret


def read_for_libraries(values: MutableMapping[str, str]) -> None:
    """Set the variables that libraries read, where a file holds one.

    Raises:
        InvalidRequest: as of ``secret_from``.
    """
    for name in OF_LIBRARIES:
        if values.get(f"{name}_FILE") and (text := secret_from(values, name)):
            values[name] = text


class Secrets(Mapping[str, str]):
    """Secrets that a spec names, such as by ``secret_env``: read when they are asked for, from variable or file."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> str:
        text = secret_from(self._values, name)
        if not text:
            raise KeyError(name)
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def scheme_from(values: Mapping[str, str]) -> str:
    """Return of which scheme the URLs of this host's services are: ``https`` where they have a certificate.

    Raises:
        InvalidRequest: ``FLOTILLA_TLS_*`` are wrong.
    """
    return tls_from(values).scheme


def ports_from(values: Mapping[str, str]) -> range | None:
    """Read ``FLOTILLA_PORTS``, such as ``20000-20099``: of listeners without a port of their own; None: any port.

    Raises:
        InvalidRequest: it is no such range.
    """
    text = values.get(PORTS)
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        first = last = "0"
    if not 0 < int(first) <= int(last) <= HIGHEST_PORT:
        raise InvalidRequest(f"{PORTS} must be a range of ports, such as 20000-20099, got {text!r}")
    return range(int(first), int(last) + 1)


def networks_from(values: Mapping[str, str], name: str, default: tuple[IPNetwork, ...]) -> tuple[IPNetwork, ...]:
    """Read a variable that lists networks, such as ``127.0.0.0/8, 10.3.0.0/16``, or is ``none``.

    Raises:
        InvalidRequest: it is not such a list.
    """
    text = values.get(name, "").strip()
    if not text:
        return default
    if text.lower() == "none":
        return ()
    try:
        return tuple(ip_network(each.strip()) for each in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"{name} must be networks, such as 127.0.0.0/8,10.3.0.0/16, or none: {error}") from None


def engine_pythons_from(values: Mapping[str, str]) -> dict[str, Path]:
    """Read which interpreters have an engine, by its kind; what is not named is not there.

    Raises:
        InvalidRequest: one is not the absolute path of a program.
    """
    found = {}
    for kind, variable in ENGINE_PYTHONS.items():
        text = values.get(variable, "")
        if not text:
            continue
        path = Path(text)
        if not (path.is_absolute() and path.is_file() and os.access(path, os.X_OK)):
            raise InvalidRequest(f"{variable} must be the absolute path of a Python interpreter, got {text!r}")
        found[kind] = path
    return found


def experiments_from(values: Mapping[str, str]) -> int:
    """Read ``FLOTILLA_EXPERIMENTS``: how many experiments a process of trainer, rollout or reward serves.

    Raises:
        InvalidRequest: it is no number from 1 to ``MOST_EXPERIMENTS``.
    """
    text = values.get(EXPERIMENTS) or "1"
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_EXPERIMENTS):
        raise InvalidRequest(f"{EXPERIMENTS} must be a number from 1 to {MOST_EXPERIMENTS}, got {text!r}")
    return int(text)


def allows_volatile_redis(values: Mapping[str, str]) -> bool:
    """Read whether a Redis server without an append-only file is accepted.

    Raises:
        InvalidRequest: it is neither 0 nor 1.
    """
    text = values.get(VOLATILE_REDIS) or "0"
    if text not in {"0", "1"}:
        raise InvalidRequest(f"{VOLATILE_REDIS} must be 0 or 1, got {text!r}")
    return text == "1"


def seconds_from(values: Mapping[str, str], name: str, default: float, *, may_be_zero: bool = False) -> float:
    """Read a variable that is a number of seconds.

    Raises:
        InvalidRequest: it is not one, or is 0 where that makes no sense.
    """
    text = values.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or (seconds == 0 and not may_be_zero):
        raise InvalidRequest(f"{name} must be a number of seconds{'' if may_be_zero else ' above 0'}, got {text!r}")
    return seconds
