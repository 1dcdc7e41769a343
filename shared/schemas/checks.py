"""What a fleet's own examination is made of: what services are asked to try, and what each of them found.

An examination has two phases: each service checks its host and listens, then tries to reach others.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from flotilla.shared.schemas.later_values import known_alone
from flotilla.shared.schemas.wire import TolerantWire

MOST_TARGETS: Final = 48
"""Services that one is asked to reach."""
MOST_FILES: Final = 256
"""Files of the shared folder that one is asked to look for."""
MOST_ORPHANS: Final = 32
LONGEST_USE: Final = 32
LOOK, REACH = 1, 2
"""Phases."""
REACHED: Final = "reached"
SILENT: Final = "silent"
REFUSED: Final = "refused"
NO_ROUTE: Final = "no_route"
NOT_BELIEVED: Final = "not_believed"
ANOTHER: Final = "another"
FAILED: Final = "failed"
"""Outcomes of an attempt: no answer in time; no listener; no route; its certificate is not that
of a known authority; something else answers; anything else. A later release may know more."""


Epoch = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]
"""Seconds since the epoch; any clock that runs is far below the bound."""
Bytes = Annotated[int, Field(ge=0, le=1 << 80)]
"""More than any file system says, and few enough to compute with."""


class PortUse(StrEnum):
    """What a service listens for, besides HTTP."""

    DATA = "data"
    COLLECTIVE = "collective"


class CheckTarget(TolerantWire):
    """A service that another one should reach."""

    service_id: str
    url: str
    """Base URL of its HTTP interface."""
    ports: Mapping[str, int] = {}
    """Where it listens for this examination alone, by what such ports are for: ``data``, ``collective``."""
    is_elsewhere: bool = False
    """It is on another machine: a name that leads to the caller's own machine is not its own."""


class CheckOrder(TolerantWire):
    """What a service should try."""

    check_id: str = Field(min_length=1, max_length=64, pattern="^[0-9a-f]+$")
    """What listeners answer, and what files of the shared folder contain."""
    phase: int
    sent_at: float
    """Seconds since the epoch, by the gateway's clock."""
    folder: str | None = None
    """A folder of the gateway's data directory, as the gateway names it."""
    targets: tuple[CheckTarget, ...] = ()
    files: tuple[str, ...] = ()
    """What others have written in the folder."""


class Orphan(TolerantWire):
    """A process that holds devices or memory, and that no service owns."""

    pid: int
    command: str = Field("", max_length=200)
    """What it runs; empty where this container cannot see it."""
    devices: tuple[str, ...] = Field((), max_length=64)
    memory_bytes: Bytes = 0
    """Of the devices."""


class HostFacts(TolerantWire):
    """What a process found out about its host and itself."""

    release: str = Field(max_length=64)
    spec_revision: int
    code: str = Field(max_length=64)
    """Short digest of the sources on its disk."""
    schemas: str = Field(max_length=64)
    """The same of those of what goes over the wire alone."""
    is_changed: bool = False
    """Whether sources were written after the process began: it runs what was there before."""
    ports: Annotated[Mapping[PortUse, Annotated[int, Field(ge=1, le=65535)]], known_alone(PortUse)] = {}
    """Where it listens now, by what such ports are for."""
    port_problem: str | None = Field(None, max_length=400)
    port_range: str | None = Field(None, max_length=32)
    free_ports: int | None = None
    """Of the range that is set."""
    redis_seconds: float | None = None
    """How long Redis took to answer; None: it did not, or is not needed."""
    redis_problem: str | None = Field(None, max_length=400)
    folder_problem: str | None = Field(None, max_length=400)
    """Why it could not write into the gateway's folder."""
    temporary: str = Field("", max_length=400)
    temporary_free_bytes: Bytes = 0
    """Of the directory for temporary files."""
    shared_memory_free_bytes: Bytes | None = None
    shared_memory_bytes: Bytes | None = None
    orphans: tuple[Orphan, ...] = Field((), max_length=MOST_ORPHANS)


class Attempt(TolerantWire):
    """How one port of another service was reached."""

    service_id: str = Field(max_length=64)
    port: int
    use: str = Field(max_length=LONGEST_USE)
    """``http``, ``data`` or ``collective``."""
    outcome: str = Field(max_length=32)
    detail: str = Field("", max_length=200)
    seconds: float = 0.0


class CheckReport(TolerantWire):
    """What a service found in one phase."""

    check_id: str = Field(max_length=64)
    phase: int
    received_at: Epoch
    """When the order came, in seconds since the epoch by the service's own clock."""
    sent_at: Epoch
    """When this was sent."""
    facts: HostFacts | None = None
    attempts: tuple[Attempt, ...] = Field((), max_length=4 * MOST_TARGETS)
    unseen: tuple[str, ...] = Field((), max_length=MOST_FILES)
    """Files of the shared folder that it did not find."""


class FleetFinding(TolerantWire):
    """Something that is wrong with a fleet, or may become so."""

    verdict: Literal["failed", "warning"]
    topic: str
    """reachability, gateway, redis, clock, release, folder, ports, devices, disk, shared_memory, address or silence."""
    host: str
    service_id: str | None = None
    tried: str
    found: str
    advice: str


class FleetExamination(TolerantWire):
    """What was tried in a fleet, and what is wrong with it."""

    is_well: bool
    """Whether nothing failed; there may be warnings."""
    findings: tuple[FleetFinding, ...]
    """What failed first."""
    num_more_findings: int = 0
    num_hosts: int
    num_services: int
    num_asked: int
    """Services that were asked: one of each kind on each host."""
    num_pairs: int
    """Pairs of hosts of which one needs the other."""
    num_pairs_tried: int
    largest_skew_seconds: float | None = None
    """Of the clocks of those that were asked, against the gateway's; None without an answer."""
    seconds: float
