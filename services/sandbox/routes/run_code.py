"""Run one program."""

import base64
from collections.abc import Mapping
from fnmatch import fnmatchcase

from fastapi import APIRouter

from flotilla.services.sandbox.executor import LOCAL, Program
from flotilla.services.sandbox.fork_servers import SandboxFailed
from flotilla.services.sandbox.guard.job import EXITED, NOT_STARTED, STARVED, TIMED_OUT, JobResult, PhaseResult
from flotilla.services.sandbox.languages import Language, choose
from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.services.sandbox.routes.dependencies import Caller, IsGone, Sandbox
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.errors import FlotillaError, InvalidRequest
from flotilla.shared.schemas.sandbox import (
    CommandResult,
    CommandStatus,
    IsolationLevel,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
)

router = APIRouter(tags=["sandbox"])


@router.post("/run_code")
async def run_code(request: RunCodeRequest, sandbox: Sandbox, caller: Caller, is_gone: IsGone) -> RunCodeResponse:
    """Run a program in isolation and return what it printed.

    Raises:
        InvalidRequest: the language or the image is not available, or the files exceed the limits.
        Unavailable: too many calls wait.
        DeadlineExceeded: the call waited too long for its turn.
    """
    level = sandbox.runner.level
    check_image(request.image, sandbox)
    language = choose(sandbox.languages, request.language)
    try:
        async with sandbox.pool.taken(caller, is_gone) as slot:
            directory = sandbox.runner.directory(slot)
            program = make_program(request, language, directory, sandbox, caller)
            try:
                answer = make_response(await sandbox.runner.run(slot, program), level)
            except SandboxFailed as error:
                answer = RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=error.detail, isolation=level)
    except FlotillaError as error:
        sandbox.metrics.count_refused(error.code)
        raise
    seconds = (answer.run_result.execution_time or 0.0) if answer.run_result else 0.0
    sandbox.metrics.count_run(language.name, answer.status, seconds)
    return answer


def make_program(
    request: RunCodeRequest, language: Language, directory: str, sandbox: SandboxState, caller: str = ""
) -> Program:
    """Make what the executor runs of a request.

    Raises:
        InvalidRequest: the files have another one in their way, or are more or larger than allowed.
    """
    limits = sandbox.settings.limits
    if request.memory_limit_MB > 0:
        limits = limits.with_memory(request.memory_limit_MB * MEBIBYTE)
    files = {path: content for path, content in request.files.items() if content is not None}
    if language.source in files:
        raise InvalidRequest(f"a file may not be called {language.source!r}: the program itself is")
    files[language.source] = base64.b64encode(request.code.encode()).decode()
    check_files(files, limits)
    stdin = base64.b64encode((request.stdin or "").encode()).decode()
    phases = language.phases(directory, stdin, request.compile_timeout, request.run_timeout)
    return Program(files, phases, request.fetch_files, limits, caller, request.image)


def check_image(image: str | None, sandbox: SandboxState) -> None:
    """Check that a call may name an image.

    Raises:
        InvalidRequest: programs run on this machine, or the operator has not allowed the image.
    """
    settings = sandbox.settings
    if image is None or (image == settings.image and settings.provider != LOCAL):
        return
    if settings.provider == LOCAL:
        raise InvalidRequest(
            f"image {image!r} cannot be had: this sandbox runs programs on its own machine; images need a provider "
            "(FLOTILLA_SANDBOX_PROVIDER)",
            errors=[{"field": "image", "value": image[:100], "allowed": "null"}],
        )
    if not any(fnmatchcase(image, pattern) for pattern in settings.images):
        allowed = ", ".join((settings.image, *settings.images))
        raise InvalidRequest(
            f"image {image!r} is not allowed here; allowed: {allowed} (FLOTILLA_SANDBOX_IMAGES)",
            errors=[{"field": "image", "value": image[:100], "allowed": allowed[:500]}],
        )


def check_files(files: Mapping[str, str], limits: Limits) -> None:
    """Check files, base64 by path, against what the working directory may hold.

    Raises:
        InvalidRequest: they are more or larger than allowed.
    """
    num_bytes = sum(len(content) * 3 // 4 for content in files.values())
    if len(files) > limits.files or num_bytes > limits.disk_bytes:
        raise InvalidRequest(f"{len(files)} files with {num_bytes} bytes exceed the working directory's limits")


def make_response(result: JobResult, level: IsolationLevel | None) -> RunCodeResponse:
    """Make the answer of a result: Success only if every command ended by itself with exit code 0."""
    by_name = {phase.name: phase for phase in result.phases}
    last = result.phases[-1]
    if last.outcome in (NOT_STARTED, STARVED):
        status = RunStatus.SANDBOX_ERROR
    elif last.outcome == EXITED and last.return_code == 0:
        status = RunStatus.SUCCESS
    else:
        status = RunStatus.FAILED
    return RunCodeResponse(
        status=status,
        message="; ".join([note for note in (last.detail, *result.notes) if note]),
        compile_result=_command(by_name["compile"]) if "compile" in by_name else None,
        run_result=_command(by_name["run"]) if "run" in by_name else None,
        files=dict(result.files),
        isolation=level,
    )


def _command(phase: PhaseResult) -> CommandResult:
    stdout, stderr = phase.output()
    status = {
        TIMED_OUT: CommandStatus.TIME_LIMIT_EXCEEDED,
        NOT_STARTED: CommandStatus.ERROR,
        STARVED: CommandStatus.ERROR,
    }
    return CommandResult(
        status=status.get(phase.outcome, CommandStatus.FINISHED),
        execution_time=phase.seconds,
        return_code=None if phase.outcome == TIMED_OUT else phase.return_code,
        stdout=stdout,
        stderr=stderr,
    )
