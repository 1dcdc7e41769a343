"""Whether the service lives, works, and how well it isolates."""

from collections.abc import Iterator
from itertools import chain
from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.core import CounterMetricFamily, Metric
from pydantic import BaseModel

from flotilla.services.sandbox.pool import SlotPool
from flotilla.services.sandbox.routes.dependencies import Sandbox
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import SandboxHealth
from flotilla.shared.telemetry.prometheus import gauge, response_of

router = APIRouter(tags=["health"])


class Slots(BaseModel):
    """The places of one kind that programs, or sessions, take turns in."""

    total: int
    out_of_use: int
    """In which something lives that could not be ended; they are tried again until it has."""
    backing_off: int
    """Whose fork server was ended by what it ran, and is started again after a pause."""

    @property
    def has_any(self) -> bool:
        """Whether there is a usable one, or none is expected."""
        return self.total == 0 or self.out_of_use + self.backing_off < self.total


class Ready(BaseModel):
    """The answer of ``GET /readyz``."""

    status: Literal["ready"] = "ready"
    programs: Slots
    sessions: Slots


@router.get("/healthz")
async def healthz(sandbox: Sandbox) -> SandboxHealth:
    """Return the isolation that programs run under, why none better is used, and what can be run."""
    return SandboxHealth(
        isolation=sandbox.runner.level,
        provider=sandbox.runner.provider,
        unavailable=sandbox.unavailable,
        languages={name: language.tool for name, language in sandbox.languages.items()},
        concurrency=sandbox.settings.concurrency,
        sessions=sandbox.settings.sessions,
    )


@router.get("/readyz")
async def readyz(sandbox: Sandbox) -> Ready:
    """Return whether a call would get a turn, and how many slots are out of use.

    Raises:
        Unavailable: the queue is full, or no slot can be used.
    """
    found = Ready(programs=_slots(sandbox, sandbox.pool), sessions=_slots(sandbox, sandbox.sessions.pool))
    for name, slots in (("programs", found.programs), ("sessions", found.sessions)):
        if not slots.has_any:
            raise Unavailable(
                f"no slot for {name} can be used: in {slots.out_of_use} of {slots.total} lives what could not be "
                f"ended, and {slots.backing_off} are started again after a pause, for what they ran has ended them"
            )
    if sandbox.pool.is_full:
        raise Unavailable(f"{sandbox.pool.num_waiting} programs wait for their turn")
    return found


def _slots(sandbox: SandboxState, pool: SlotPool) -> Slots:
    backing_off = sandbox.runner.num_backing_off(pool.usable)
    return Slots(total=len(pool.slots), out_of_use=pool.num_out_of_use, backing_off=backing_off)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(sandbox: Sandbox) -> Response:
    """Return the counters in Prometheus' text format."""
    return await response_of(families_of(sandbox))


def families_of(sandbox: SandboxState) -> Iterator[Metric]:
    """Make all metrics of the service."""
    return chain(sandbox.metrics.families(), _families(sandbox), sandbox.runner.families())


def _families(sandbox: SandboxState) -> Iterator[Metric]:
    """Make the metrics of the slots, the fork servers and the sessions as they are now."""
    runner, programs, sessions = sandbox.runner, sandbox.pool, sandbox.sessions
    for name, meaning, value in (
        ("slots_spoiled", "Times that something was left behind in a slot", runner.num_spoiled),
        ("fork_servers_lost", "Fork servers that ended by themselves", runner.num_servers_lost),
        ("fork_servers_ended", "Fork servers that were replaced because of what they ran", runner.num_servers_ended),
    ):
        yield CounterMetricFamily(f"flotilla_sandbox_{name}", meaning, value=value)
    out_of_use = programs.num_out_of_use + sessions.pool.num_out_of_use
    backing_off = runner.num_backing_off((*programs.usable, *sessions.pool.usable))
    for name, meaning, value in (
        ("sandbox_slots_out_of_use", "Slots whose last program could not be ended", out_of_use),
        ("sandbox_slots_backing_off", "Slots whose fork server is started again after a pause", backing_off),
        ("sandbox_running", "Programs that run", programs.num_running),
        ("sandbox_waiting", "Programs that wait for their turn", programs.num_waiting),
        ("sandbox_sessions", "Sessions that live", sessions.num_living),
    ):
        family = gauge(name, meaning)
        family.add_metric((), value)
        yield family
    isolation = gauge("sandbox_isolation", "1 for the isolation, or the provider, that programs run under", "level")
    isolation.add_metric((runner.level or runner.provider,), 1)
    yield isolation
