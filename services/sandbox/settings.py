"""What the sandbox service is told at its start."""

from pydantic import Field, SecretStr

from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.shared.config.base.model import Config
from flotilla.shared.schemas.sandbox import IsolationLevel


class SandboxSettings(Config):
    """Access, isolation and limits of one sandbox service."""

    token: SecretStr = Field(min_length=16)
    """Bearer token that ``POST /run_code`` demands."""
    level: IsolationLevel | None = None
    """Isolation to use; the service does not start where it is not available. Null: the best there is."""
    unsafe_sandbox: bool = False
    """Allow level D, which is no isolation: programs can read what the service can, and reach the network."""
    concurrency: int = Field(4, ge=1, le=128)
    """Programs of one caller that run at a time."""
    sessions: int = Field(16, ge=0, le=128)
    """Sessions of one caller that live at a time, each with limits of its own; 0 offers none."""
    spare: int = Field(4, ge=0, le=128)
    """So many programs and so many sessions more, for callers beside one that has all of the above; 0: none."""
    max_queued: int = Field(256, ge=0)
    """Calls of one caller that may wait for their turn, and of all twice as many; a further one is answered 503."""
    queue_seconds: float = Field(30.0, gt=0)
    """Longest wait for a turn; a call that waits longer is answered 504."""
    max_request_bytes: int = Field(8 * MEBIBYTE, ge=1024)
    """Largest body of a call; a larger one is answered 413."""
    processor_shares: int = Field(64, ge=2, le=262_144)
    """Weight of a slot where others want the processors too; an ordinary process has 1024. A program that has just
    begun has eight times the weight if its caller has used little lately, one that takes long a quarter of it."""
    processors: float = Field(2.0, gt=0)
    """How many processors one slot may use at a time."""
    busy_part: float = Field(0.05, gt=0, le=1)
    """Part of the machine's processors that programs of callers who have used much get, all together, while others use
    40 % of the machine or more; at least 0.15 of a processor. 1: only their weight is low."""
    limits: Limits = Limits()
    """What one program may use."""
    uid_base: int = Field(61000, ge=1000)
    """A service that runs as root gives each program a uid of its own, the first free ones from here on."""
    python: str | None = Field(None, pattern=r"^/")
    """Interpreter for Python programs. Null: the system's ``python3``, else the service's own."""
    readable_paths: tuple[str, ...] = ()
    """Further paths that programs may read, such as an environment with packages for them."""
