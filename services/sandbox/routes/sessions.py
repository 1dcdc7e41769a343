"""Interpreters that are kept between calls."""

from typing import Annotated

from fastapi import APIRouter, Header

from flotilla.services.sandbox.fork_servers import SandboxFailed
from flotilla.services.sandbox.guard.job import Cell
from flotilla.services.sandbox.routes.dependencies import Caller, Sandbox
from flotilla.services.sandbox.routes.run_code import check_files, check_image, make_response
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.sandbox import CellRequest, CellResponse, RunStatus, SessionRequest, SessionView

router = APIRouter(tags=["sessions"])

Token = Annotated[str, Header(alias="Session-Token", min_length=1, max_length=200)]


@router.post("/sessions", status_code=201)
async def open_session(request: SessionRequest, sandbox: Sandbox, caller: Caller) -> SessionView:
    """Start an interpreter that is kept; the answer's token is the only way to use it.

    Raises:
        InvalidRequest: the files exceed the limits, or the image is not allowed.
        Unavailable: as many as allowed live, and too many calls wait.
        DeadlineExceeded: none of them ended in time.
    """
    check_files(request.files, sandbox.settings.limits)
    check_image(request.image, sandbox)
    try:
        session, token = await sandbox.sessions.open(request, dict(request.files), caller)
    except FlotillaError as error:
        sandbox.metrics.count_refused(error.code)
        raise
    return SessionView(
        id=session.id,
        token=token,
        isolation=sandbox.runner.level,
        cpu_seconds=request.cpu_seconds,
        idle_seconds=request.idle_seconds,
        lifetime_seconds=request.lifetime_seconds,
    )


@router.post("/sessions/{session_id}/run")
async def run_cell(session_id: str, request: CellRequest, token: Token, sandbox: Sandbox) -> CellResponse:
    """Run a piece of code in a session and return what it printed.

    Raises:
        NotFound: there is no session of this id and token.
        InvalidRequest: the files exceed the limits.
        SessionBusy: another cell of it runs.
        SessionEnded: it is over; the detail has the cause.
    """
    session = sandbox.sessions.find(session_id, token)
    level = sandbox.runner.level
    check_files(request.files, sandbox.settings.limits)
    cell = Cell(request.code, request.run_timeout, request.fetch_files, request.files)
    try:
        found = await session.run(cell)
    except SandboxFailed as error:
        answer = CellResponse(status=RunStatus.SANDBOX_ERROR, message=error.detail, isolation=level, is_alive=False)
    else:
        told = make_response(found.result, level)
        answer = CellResponse(
            status=told.status,
            message=told.message,
            run_result=told.run_result,
            files=told.files,
            isolation=level,
            is_alive=found.is_alive,
        )
    sandbox.metrics.count_cell(answer.status)
    return answer


@router.delete("/sessions/{session_id}", status_code=204)
async def close_session(session_id: str, token: Token, sandbox: Sandbox) -> None:
    """End a session and all its processes; nothing happens if it has ended.

    Raises:
        NotFound: there is no session of this id and token.
    """
    await sandbox.sessions.end(sandbox.sessions.find(session_id, token))
