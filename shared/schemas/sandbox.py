"""The wire schema of the sandbox's ``POST /run_code``, in the shape that clients of SandboxFusion know.

Source: SandboxFusion's REST interface. ``isolation`` in the answer is ours; ``args`` must be empty, for there is no
pytest runner here.
"""

import base64
import binascii
import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from flotilla.shared.schemas.wire import Described

MAX_TIMEOUT_SECONDS = 300.0
EXPERIMENT_HEADER = "Flotilla-Experiment"
"""The experiment of a call: those of one wait behind each other, not before another's."""
MAX_EXPERIMENT_LENGTH = 96


class IsolationLevel(StrEnum):
    """How well a program is shut in; A is the best.

    A: bwrap, rlimits, control group. B: bwrap and rlimits. C: own uid or signal scope, Landlock, seccomp, rlimits.
    D: rlimits only, which is no isolation.
    """

    A = "A"
    B = "B"
    C = "C"
    D = "D"


class RunStatus(StrEnum):
    """How the whole call ended."""

    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandStatus(StrEnum):
    """How one command, the compiler or the program, ended."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


def check_relative_path(path: str) -> str:
    """Accept a path that stays inside the working directory.

    Raises:
        ValueError: it is empty, absolute, climbs with ``..``, or holds a NUL.
    """
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in path or len(path) > 1024:
        raise ValueError(f"{path[:100]!r} is not a relative path inside the working directory")
    return path


def _check_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the content is not base64: {error}") from error
    return text


RelativePath = Annotated[str, AfterValidator(check_relative_path)]
Base64 = Annotated[str, AfterValidator(_check_base64)]
MAX_IMAGE = 500
Image = Annotated[str, Field(min_length=1, max_length=MAX_IMAGE, pattern=r"^[!-~]+$")]
"""One word: a provider may make a line of a file of it."""


def is_image(text: str) -> bool:
    """Return whether a text may name an image: one word of ASCII that is not too long."""
    return len(text) <= MAX_IMAGE and re.fullmatch(r"[!-~]+", text) is not None


class RunCodeRequest(Described):
    """A program to be run once."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    code: str
    """Source text."""
    language: str
    """One of the languages that ``GET /healthz`` lists."""
    stdin: str | None = None
    """Given to the program as its input; null is empty."""
    compile_timeout: float = Field(10.0, gt=0, le=MAX_TIMEOUT_SECONDS)
    """Seconds for the compiler, in languages that have one."""
    run_timeout: float = Field(10.0, gt=0, le=MAX_TIMEOUT_SECONDS)
    """Seconds for the program."""
    memory_limit_MB: int = Field(-1, ge=-1)  # noqa: N815  the name is SandboxFusion's
    """Megabytes for the program; -1, and anything above it, is the service's own limit."""
    files: dict[RelativePath, Base64 | None] = Field(default_factory=dict)
    """Files to put beside the program, base64, by relative path; one with a null content is left out."""
    fetch_files: tuple[RelativePath, ...] = ()
    """Files to return; one that does not exist is left out of the answer."""
    image: Image | None = None
    """What the program's box is made of, where the sandbox has a provider; null: what the sandbox has set."""
    args: tuple[str, ...] = Field((), max_length=0)
    """Present for clients that send it; must be empty."""


class SessionRequest(Described):
    """An interpreter that is kept: what its cells define or write is available to the next ones, from any caller."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    language: Literal["python", "shell"] = "python"
    """What cells are: Python of one interpreter, or commands, each of a shell of its own (bash, else sh)."""
    image: Image | None = None
    """What the session's box is made of, where the sandbox has a provider; null: what the sandbox has set."""
    files: dict[RelativePath, Base64] = Field(default_factory=dict)
    """Files to put into its working directory, base64, by relative path."""
    memory_limit_MB: int = Field(-1, ge=-1)  # noqa: N815  as of a program
    """Megabytes for all its processes; -1, and anything above it, is the service's own limit."""
    cpu_seconds: float = Field(300.0, gt=0, le=3600)
    """Processor time of all cells together."""
    idle_seconds: float = Field(300.0, gt=0, le=86400)
    """It ends when no cell was sent for so long."""
    lifetime_seconds: float = Field(3600.0, gt=0, le=86400)
    """It ends so long after its start, when the cell that runs then has ended."""


class SessionView(BaseModel):
    """A session that was started."""

    id: str
    token: str
    """The header ``Session-Token`` of every call of this session."""
    isolation: IsolationLevel | None
    """Under which level it runs; null: in a provider's box."""
    cpu_seconds: float
    idle_seconds: float
    lifetime_seconds: float


class CellRequest(Described):
    """A piece of code for a session."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    code: str
    """Source text. The value of its last expression is printed, as by an interactive interpreter."""
    run_timeout: float = Field(10.0, gt=0, le=MAX_TIMEOUT_SECONDS)
    """Seconds. A cell that takes longer is interrupted; one that continues after that costs the session."""
    files: dict[RelativePath, Base64] = Field(default_factory=dict)
    """Files to put into its working directory first, base64, by relative path: such as tests of what was made."""
    fetch_files: tuple[RelativePath, ...] = ()
    """Files to return; one that does not exist is left out of the answer."""


class CommandResult(BaseModel):
    """What one command did."""

    status: CommandStatus
    execution_time: float | None = None
    """Seconds of wall time."""
    return_code: int | None = None
    """Exit code; the negative signal number if a signal ended it; null if it was stopped for its time."""
    stdout: str | None = None
    """Output, undecodable bytes replaced, cut at the service's limit with a note at the end."""
    stderr: str | None = None
    """Error output, likewise."""


class RunCodeResponse(BaseModel):
    """The answer. ``SandboxError`` is not the program's fault."""

    status: RunStatus
    message: str = ""
    """Which limit stopped the program, or what failed in the sandbox."""
    compile_result: CommandResult | None = None
    """Null if the language has no compiler."""
    run_result: CommandResult | None = None
    """Null if compiling failed."""
    files: dict[str, str] = Field(default_factory=dict)
    """The fetched files, base64."""
    isolation: IsolationLevel | None = None
    """Under which level the program ran; null: in a provider's box, or by a server that is not ours."""


class CellResponse(BaseModel):
    """What a cell did. ``SandboxError`` is not the code's fault."""

    status: RunStatus
    message: str = ""
    """Which limit stopped it, how the interpreter ended, or what failed in the sandbox."""
    run_result: CommandResult | None = None
    """Its return code is 1 after an exception. Null if the sandbox failed."""
    files: dict[str, str] = Field(default_factory=dict)
    """The fetched files, base64."""
    isolation: IsolationLevel | None
    is_alive: bool
    """Whether the session continues; if not, what it knew is lost."""


class SandboxHealth(BaseModel):
    """The answer of ``GET /healthz``."""

    status: Literal["ok"] = "ok"
    isolation: IsolationLevel | None
    """The level that programs run under; null: a provider isolates them."""
    provider: str = "local"
    """Where programs run: on this machine, or at a provider."""
    unavailable: dict[IsolationLevel, str]
    """Why each better level is not used."""
    languages: dict[str, str]
    """What can be run, with the program that runs or compiles it."""
    concurrency: int
    """How many programs run at a time."""
    sessions: int = 0
    """How many sessions live at a time."""
