"""Whether the service lives, works, and how well it isolates."""

from itertools import chain
from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from flotilla.services.sandbox.pool import SlotPool
from flotilla.services.sandbox.routes.dependencies import Sandbox
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import SandboxHealth
from flotilla.shared.telemetry.prometheus import response_of

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
        """Whether there is one that can be used now, or that nobody expects."""
        return self.total == 0 or self.out_of_use + self.backing_off < self.total


class Ready(BaseModel):
    """The answer of ``GET /readyz``."""

    status: Literal["ready"] = "ready"
    programs: Slots
    sessions: Slots


@router.get("/healthz")
async def healthz(sandbox: Sandbox) -> SandboxHealth:
    """Tell the isolation that programs run under, why none better is used, and what can be run."""
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
    families = sandbox.metrics.families(
        sandbox.runner.level or sandbox.runner.provider,
        num_running=sandbox.pool.num_running,
        num_waiting=sandbox.pool.num_waiting,
        num_out_of_use=sandbox.pool.num_out_of_use + sandbox.sessions.pool.num_out_of_use,
        num_backing_off=sandbox.runner.num_backing_off((*sandbox.pool.usable, *sandbox.sessions.pool.usable)),
        num_spoiled=sandbox.runner.num_spoiled,
        num_servers_lost=sandbox.runner.num_servers_lost,
        num_servers_ended=sandbox.runner.num_servers_ended,
        num_sessions=sandbox.sessions.num_living,
    )
    return await response_of(chain(families, sandbox.runner.families()))
