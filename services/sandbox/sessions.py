"""Sessions: interpreters that are kept between the calls of their owner, each in a slot of its own.

A session is one task, which owns the slot and the interpreter, and ends by itself: when it was not used for some time,
at the end of its life, with its interpreter, or with the service. Only holders of its token can use it.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from flotilla.services.sandbox.conversation import Talk
from flotilla.services.sandbox.executor import Program
from flotilla.services.sandbox.fork_servers import SandboxFailed
from flotilla.services.sandbox.guard.job import Cell, CellResult, Phase
from flotilla.services.sandbox.languages import python_command
from flotilla.services.sandbox.limits import MEBIBYTE
from flotilla.services.sandbox.metrics import SandboxMetrics
from flotilla.services.sandbox.pool import SlotPool
from flotilla.services.sandbox.running import Runner
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.shared.errors import Conflict, FlotillaError, NotFound, Unavailable
from flotilla.shared.net.authorisation.tokens import digest_of, is_same_secret, new_token
from flotilla.shared.schemas.sandbox import SessionRequest

log = logging.getLogger(__name__)

KEPT_ENDS = 1024
"""Of so many sessions that have ended it is remembered why."""


class SessionBusy(Conflict):
    """Another cell of the session runs."""

    code, title = "session_busy", "The session runs another cell"


class SessionEnded(FlotillaError):
    """The session is over; the detail has the cause."""

    code, title, status = "session_ended", "The session has ended", 410


@dataclass(frozen=True)
class _End:
    """Why a session has ended: in a word, and in a sentence."""

    cause: str
    detail: str


CLOSED = _End("closed", "it was closed by its owner")
STOPPED = _End("stopped", "the service stopped")


@dataclass
class _Call:
    """A cell whose caller waits."""

    cell: Cell
    answer: "asyncio.Future[CellResult]"


@dataclass
class Session:
    """One interpreter and its owner's claim to it."""

    id: str
    token_digest: str
    request: SessionRequest
    caller: str = ""
    end: _End | None = None
    task: "asyncio.Task[None] | None" = None
    call: _Call | None = None
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, cell: Cell) -> CellResult:
        """Run a cell.

        Raises:
            SessionBusy: another one runs.
            SessionEnded: it is over.
            SandboxFailed: the sandbox failed, and the session is over.
        """
        if self.end is not None:
            raise SessionEnded(self.end.detail)
        if self.call is not None:
            raise SessionBusy("send its next cell when this one has been answered")
        self.call = _Call(cell, asyncio.get_running_loop().create_future())
        self.called.set()
        return await self.call.answer

    async def serve(self, conversation: Talk, now: Callable[[], float]) -> _End:
        """Run cells as they come until the session is to end; returns why."""
        dies_at = now() + self.request.lifetime_seconds
        while True:
            left = dies_at - now()
            try:
                async with asyncio.timeout(min(left, self.request.idle_seconds)):
                    await self.called.wait()
            except TimeoutError:
                if left <= self.request.idle_seconds:
                    return _End("lifetime", f"its life of {self.request.lifetime_seconds:g} s was over")
                return _End("idle", f"it was not used for {self.request.idle_seconds:g} s")
            if self.end is not None:
                return self.end
            assert self.call is not None
            result = await conversation.run(self.call.cell)
            self._answer(result)
            if not result.is_alive:
                return _End("interpreter", result.result.phases[-1].detail or "the interpreter ended")

    def fail(self, error: FlotillaError) -> None:
        """Answer the cell that runs, if any, with an error."""
        if self.call is not None and not self.call.answer.done():
            self.call.answer.set_exception(error)

    def _answer(self, result: CellResult) -> None:
        assert self.call is not None
        call, self.call = self.call, None
        self.called.clear()
        if not call.answer.done():  # its caller may have gone
            call.answer.set_result(result)


class Sessions:
    """All sessions of a service.

    Args:
        runner: starts interpreters.
        pool: slots for sessions alone.
        settings: limits of one.
        python: the interpreter.
        metrics: counts them.
    """

    def __init__(
        self, runner: Runner, pool: SlotPool, settings: SandboxSettings, python: str, metrics: SandboxMetrics
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._settings = settings
        self._python = python
        self._metrics = metrics
        self._living: dict[str, Session] = {}
        self._ended: OrderedDict[str, Session] = OrderedDict()

    @property
    def pool(self) -> SlotPool:
        """Slots for sessions alone."""
        return self._pool

    @property
    def num_living(self) -> int:
        """Count the sessions that have not ended."""
        return len(self._living)

    async def open(self, request: SessionRequest, files: dict[str, str], caller: str = "") -> tuple[Session, str]:
        """Start a session; returns it and its token.

        Raises:
            Unavailable: this service has none, as many as allowed live and too many wait, or it could not be started.
            DeadlineExceeded: none of them ended in time.
        """
        if self._settings.sessions == 0:
            raise Unavailable("this sandbox offers no sessions: FLOTILLA_SANDBOX_SESSIONS is 0")
        token = new_token()
        session = Session(f"ses-{secrets.token_hex(8)}", digest_of(token), request, caller)
        up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._living[session.id] = session
        session.task = asyncio.create_task(self._live(session, files, up), name=session.id)
        try:
            await up
        except asyncio.CancelledError:
            session.task.cancel()
            raise
        return session, token

    def find(self, session_id: str, token: str) -> Session:
        """Find a session of a token, also one that has ended.

        Raises:
            NotFound: there is none, or the token is another's.
        """
        session = self._living.get(session_id) or self._ended.get(session_id)
        if session is None or not is_same_secret(digest_of(token), session.token_digest):
            raise NotFound("there is no session of this id and token")
        return session

    async def end(self, session: Session, why: _End = CLOSED) -> None:
        """End a session and all its processes; nothing happens if it has ended."""
        if session.task is None or session.task.done():
            return
        session.end = session.end or why
        if session.call is None and why is not STOPPED:
            session.called.set()  # its fork server is kept for the next one
        else:
            session.task.cancel()
        await asyncio.wait([session.task])

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*[self.end(session, STOPPED) for session in list(self._living.values())])

    async def _live(self, session: Session, files: dict[str, str], up: "asyncio.Future[None]") -> None:
        """Be a session: from the wait for its slot until nothing of it is left."""
        end = _End("failed", "the sandbox failed")
        try:
            program = self._program(session, files)
            async with self._pool.taken(session.caller) as slot, self._runner.session(slot, program) as talk:
                if not up.done():
                    up.set_result(None)
                end = await session.serve(talk, asyncio.get_running_loop().time)
                session.end = session.end or end
        except FlotillaError as error:
            end = _End("failed", f"the sandbox failed: {error.detail}")
            if not up.done():
                up.set_exception(Unavailable(error.detail) if isinstance(error, SandboxFailed) else error)
            session.fail(error)
        except Exception:
            log.exception("a session failed", extra={"session": session.id})
        finally:
            session.end = session.end or end
            session.fail(SessionEnded(session.end.detail))
            if not up.done():
                up.set_exception(Unavailable(f"the session did not start: {session.end.detail}"))
                up.exception()  # its caller may have gone
            self._remember(session)

    def _remember(self, session: Session) -> None:
        del self._living[session.id]
        assert session.end is not None
        self._metrics.count_session_end(session.end.cause)
        self._ended[session.id] = session
        while len(self._ended) > KEPT_ENDS:
            self._ended.popitem(last=False)

    def _program(self, session: Session, files: dict[str, str]) -> Program:
        limits = self._settings.limits
        if session.request.memory_limit_MB > 0:
            limits = limits.with_memory(session.request.memory_limit_MB * MEBIBYTE)
        phase = Phase("run", tuple(python_command(self._python)), session.request.cpu_seconds)
        request = session.request
        return Program(files, (phase,), (), limits, session.caller, request.image, request)
