"""What a gateway is given at start-up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ValidationError

from flotilla.shared.environment.webhooks import WEBHOOKS, Webhook, WebhookFile
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.locations.allowed import Places
from flotilla.shared.net.authorisation.token_records import Quota
from flotilla.shared.net.server.limits import MAX_HELD_BYTES
from flotilla.shared.schemas.costs import Prices, read_prices
from flotilla.shared.schemas.retention import MAX_DAYS, Retention

RETENTION = "FLOTILLA_RETENTION_"
"""What the variables of how long things are kept begin with."""
STALL_SECONDS = 30.0
SERVICE_SILENCE_SECONDS = 8.0
ROLLOUT_SILENCE_SECONDS = 5.0
TAKEOVER_GRACE_SECONDS = 20.0
"""First leases after a takeover: a call to a gateway that was stopped may hang for fifteen."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Addresses, secrets and time limits of one gateway.

    Attributes:
        token: the operator's token, from which the keys of passes are derived.
        service_token: with which services of any kind register; None: only with the operator's, or one made for it.
        redis_url: the data plane's server.
        data: directory for the database and the experiments.
        database_url: ``postgresql://...`` or ``sqlite:///...``; None for SQLite in ``data``.
        places: where code and data that a spec names may be.
        allow_volatile_redis: accept a Redis server that keeps no append-only file, and loses all work when it ends.
        lease_seconds: how long a service may be silent between two calls (a claim's lease is another one).
        grace_seconds: the first lease of the services that a restarted gateway finds.
        rest_seconds: what remains of a lease when the connection of a waiting call breaks, and how long a rollout may
            be silent between two calls.
        longest_wait_seconds: upper bound of a long poll.
        publication_seconds: what each phase of a publication may take, besides the time of its bytes.
        stall_seconds: time without progress after which a stall is named.
        unfair_seconds: how long the surplus must be shared unfairly before services move.
        notice_seconds: how long a service that gives its experiment up may finish the work it has in progress.
        teardown_seconds: how long services may take to fall idle when an experiment ends.
        heartbeat_seconds: pause after which an event stream sends a comment.
        held_body_bytes: what the bodies of all open requests may have together, those of up to 64 KiB not counted.
        address: of this gateway, told to those who ask a standby; empty: not told.
        has_standbys: whether others wait to take its place: it shuts them out of the data plane, and answers nothing
            while it cannot tell whether it leads.
        on_deposed: called once another gateway has taken its place; it must end the process.
        quota: of tokens that were made without one, and of the operator's.
        answer_seconds: how long the answer to an idempotency key is kept.
        webhooks: who is told of events.
        retention: how long what finished experiments left is kept.
        prices: what an hour of the machines costs; None: that is not told.
        tinker_model: directory of the base model of the Tinker API; None: that is not served.
    """

    token: str
    redis_url: str
    data: Path
    database_url: str | None = None
    places: Places = field(default_factory=Places)
    service_token: str | None = None
    allow_volatile_redis: bool = False
    lease_seconds: float = SERVICE_SILENCE_SECONDS
    grace_seconds: float = 8.0
    rest_seconds: float = ROLLOUT_SILENCE_SECONDS
    longest_wait_seconds: float = 30.0
    publication_seconds: float = 10.0
    stall_seconds: float = STALL_SECONDS
    unfair_seconds: float = 5.0
    notice_seconds: float = 35.0
    teardown_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    held_body_bytes: int = MAX_HELD_BYTES
    answer_seconds: float = 86_400.0
    tinker_model: Path | None = None
    quota: Quota = field(default_factory=Quota)
    retention: Retention = field(default_factory=Retention)
    prices: Prices | None = None
    address: str = ""
    has_standbys: bool = False
    webhooks: tuple[Webhook, ...] = ()
    on_deposed: Callable[[], None] = lambda: None

    @property
    def resolved_database_url(self) -> str:
        """The database that is used."""
        return self.database_url or f"sqlite:///{self.data / 'gateway.sqlite'}"

    @property
    def experiments(self) -> Path:
        """Where experiments keep their files."""
        return self.data.resolve() / "experiments"


def read_quota(values: Mapping[str, str]) -> Quota:
    """Read ``FLOTILLA_QUOTA_EXPERIMENTS``, ``_RUNNING``, ``_SAMPLE_BYTES`` and ``_EPISODES``: numbers, or ``none``.

    Raises:
        InvalidRequest: one is neither.
    """
    found: dict[str, int | None] = {}
    for name in Quota.model_fields:
        variable = f"FLOTILLA_QUOTA_{name.upper()}"
        text = values.get(variable)
        if not text:
            continue
        if text != "none" and not (text.isascii() and text.isdigit()):
            raise InvalidRequest(f"{variable} must be a whole number, or none for no limit, got {text!r}")
        found[name] = None if text == "none" else int(text)
    return Quota(**found)


def read_retention(values: Mapping[str, str]) -> Retention:
    """Read ``FLOTILLA_RETENTION_RUN_DAYS``, ``_CHECKPOINTS_DAYS``, ``_SAMPLES_DAYS``, ``_LOGS_DAYS``, ``_MAX_BYTES``.

    Raises:
        InvalidRequest: one is no number that is allowed.
    """
    found: dict[str, str] = {}
    for name in Retention.model_fields:
        if text := values.get(f"{RETENTION}{name.upper()}"):
            found[name] = text
    try:
        return Retention.model_validate(found)
    except ValidationError as error:
        name = str(error.errors(include_input=False)[0]["loc"][0])
        allowed = "a whole number of bytes" if name == "max_bytes" else f"a number of days from 0 to {MAX_DAYS:g}"
        raise InvalidRequest(f"{RETENTION}{name.upper()} must be {allowed}, got {found[name]!r}") from None


def read_price_list(values: Mapping[str, str]) -> Prices | None:
    """Read the file that ``FLOTILLA_PRICES`` names; None without it.

    Raises:
        InvalidRequest: it cannot be read, or is none.
    """
    return read_prices(Path(name)) if (name := values.get("FLOTILLA_PRICES")) else None


def read_webhooks(values: Mapping[str, str]) -> tuple[Webhook, ...]:
    """Read the file that ``FLOTILLA_WEBHOOKS`` names; none without it.

    Raises:
        InvalidRequest: it cannot be read, or is none; the detail never has a secret.
    """
    name = values.get(WEBHOOKS)
    if not name:
        return ()
    try:
        return WebhookFile.model_validate(yaml.safe_load(Path(name).read_text(encoding="utf-8"))).webhooks
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "webhooks"
        raise InvalidRequest(f"{WEBHOOKS}: {name}: {where}: {first['msg']}") from None
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"{WEBHOOKS}: {name} cannot be read: {error}") from None
    except yaml.YAMLError:
        raise InvalidRequest(f"{WEBHOOKS}: {name} is no YAML") from None
