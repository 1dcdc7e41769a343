"""What the service asks of the guard and what the guard answers: JSON, one message each way.

The job comes after its length; the answer ends with a line.
"""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from flotilla.services.sandbox.limits import Limits

READY = b"ready"
"""The fork server's message when it is warm and has forked nothing yet."""
JOINED = b"joined"
"""Its message when it has read its orders, and joined the control groups whose files came with them."""
DONE = b"done"
"""Its message when all of a run has ended."""

FORKING = b"f"
"""Its message to the guard before it forks; until then no program may run."""
ENDED, GONE = b"e", b"g"
"""Its messages to the guard about a run, both with the wait status: the program has ended; nothing is left of it."""

PHASE_OVER = b" "
"""What the guard writes before the answer for each command that is over and is ended now with all it has left, unless
that has ended by itself within a moment."""
ANSWER_END = b"\n"
"""What it writes after the answer, which has no such byte."""

KILL_NAMESPACE, KILL_UID, KILL_DESCENDANTS = "namespace", "uid", "descendants"

EXITED, TIMED_OUT, NOT_STARTED = "exited", "timed_out", "not_started"
OVER_LIMIT = "over_limit"
STARVED = "starved"
"""The machine did not give a command its time within the longest time by the wall clock: not its fault."""


Made = TypeVar("Made")


def made(kind: type[Made], fields: Mapping[str, Any]) -> Made:
    """Make an object of checked fields, all of them: in a fork every function that runs costs pages of memory."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


@dataclass(frozen=True)
class Confinement:
    """What the guard does to the program before it starts, and how it ends it.

    Attributes:
        kill_scope: ``namespace``: the guard lives in a process namespace of its own; ``uid``: under a uid of its own;
            ``descendants``: neither. In the first two cases one signal reaches all there is, and nothing else.
        uid: the uid of scope ``uid``.
        readable, writable: paths for Landlock; None leaves Landlock out.
        has_seccomp: install the system call filter.
        denies_metadata: the filter also denies changes of mode, owner and times, where the uid is the service's own.
        counts_held: the guard counts what the kernel holds for the program, and files that are deleted but in use:
            there is no control group that does.
    """

    kill_scope: str
    uid: int | None = None
    readable: tuple[str, ...] | None = None
    writable: tuple[str, ...] = ()
    has_seccomp: bool = True
    denies_metadata: bool = False
    counts_held: bool = False

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Confinement":
        """Read what came through JSON."""
        fields = dict(wire)
        for name in ("readable", "writable"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return made(cls, fields)


@dataclass(frozen=True)
class Orders:
    """What all runs of one fork server have in common.

    Attributes:
        directory: where programs work.
        limits: of the service; a program's own may be lower.
    """

    directory: str
    environment: Mapping[str, str]
    confinement: Confinement
    limits: Limits

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Orders":
        """Read what ``to_wire`` made, after its way through JSON."""
        confinement, limits = Confinement.from_wire(wire["confinement"]), Limits.from_wire(wire["limits"])
        return cls(wire["directory"], wire["environment"], confinement, limits)


@dataclass(frozen=True)
class Phase:
    """One command: the compiler or the program.

    Attributes:
        name: ``compile`` or ``run``.
        argv: absolute path of the executable and its arguments.
        stdin: base64.
        timeout_seconds: wall time.
        limits_address_space: see ``apply_rlimits``.
        is_tool: the command is ours and changes its outputs' modes, as linkers do.
    """

    name: str
    argv: tuple[str, ...]
    timeout_seconds: float
    stdin: str = ""
    limits_address_space: bool = True
    is_tool: bool = False


@dataclass(frozen=True)
class Job:
    """One program with its files, to be run once in an empty working directory.

    Attributes:
        is_session: the program is the interpreter of a session, which is given cells until its caller goes away; its
            one phase's time limit is processor time, of all cells together.
    """

    orders: Orders
    files: Mapping[str, str]
    phases: tuple[Phase, ...]
    fetch: tuple[str, ...]
    limits: Limits
    is_session: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of what the orders do not say."""
        return {
            "files": self.files,
            "phases": [vars(phase) for phase in self.phases],
            "fetch": self.fetch,
            "limits": None if self.limits == self.orders.limits else vars(self.limits),
            "is_session": self.is_session,
        }

    @classmethod
    def from_wire(cls, wire: "dict[str, Any]", orders: Orders) -> "Job":
        """Read what ``to_wire`` made, after its way through JSON; changes it."""
        phases = wire["phases"]
        for phase in phases:
            phase["argv"] = tuple(phase["argv"])
        limits = wire["limits"]
        wire["orders"] = orders
        wire["phases"] = tuple([made(Phase, phase) for phase in phases])
        wire["fetch"] = tuple(wire["fetch"])
        wire["limits"] = orders.limits if limits is None else made(Limits, limits)
        return made(cls, wire)

    @property
    def directory(self) -> str:
        """Where it works."""
        return self.orders.directory

    @property
    def environment(self) -> Mapping[str, str]:
        """What its commands find in their environment."""
        return self.orders.environment

    @property
    def confinement(self) -> Confinement:
        """How its commands are confined."""
        return self.orders.confinement


@dataclass(frozen=True)
class PhaseResult:
    """How a command ended.

    Attributes:
        outcome: ``exited``, ``timed_out``, ``over_limit``, ``starved`` or ``not_started``.
        return_code: exit code, or the negative signal number; None if it did not start.
        detail: which limit, or why it did not start.
        seconds: wall time.
    """

    name: str
    outcome: str
    return_code: int | None
    seconds: float
    stdout: str = ""
    stderr: str = ""
    detail: str = ""

    def output(self) -> tuple[str, str]:
        """Decode stdout and stderr; bytes that are not UTF-8 are replaced."""
        stdout, stderr = (base64.b64decode(text).decode("utf-8", "replace") for text in (self.stdout, self.stderr))
        return stdout, stderr


@dataclass(frozen=True)
class JobResult:
    """How a job ended. ``error`` is the guard's own failure, else empty."""

    phases: tuple[PhaseResult, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it."""
        return {**vars(self), "phases": [vars(phase) for phase in self.phases]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "JobResult":
        """Read what ``to_wire`` made, after its way through JSON."""
        phases = tuple(PhaseResult(**phase) for phase in wire["phases"])
        return cls(phases=phases, files=wire["files"], notes=tuple(wire["notes"]), error=wire["error"])


@dataclass(frozen=True)
class Cell:
    """A piece of code for the interpreter of a session; a message with its length before it.

    Attributes:
        fetch: files to return, as of ``Job``.
        files: to be put there before, base64, by path; the service's, which the guard is not told.
    """

    code: str
    timeout_seconds: float
    fetch: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it."""
        return {"code": self.code, "timeout_seconds": self.timeout_seconds, "fetch": self.fetch}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Cell":
        """Read what ``to_wire`` made, after its way through JSON."""
        return cls(wire["code"], wire["timeout_seconds"], tuple(wire["fetch"]))


@dataclass(frozen=True)
class CellResult:
    """How a cell ended; likewise a message. The first one of a session has no phases: the interpreter is up.

    Attributes:
        is_alive: whether the interpreter, and so what it knows, is still there.
    """

    result: JobResult
    is_alive: bool

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it."""
        return {"result": self.result.to_wire(), "is_alive": self.is_alive}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "CellResult":
        """Read what ``to_wire`` made, after its way through JSON."""
        return cls(JobResult.from_wire(wire["result"]), bool(wire["is_alive"]))
