"""The sandbox service's settings."""

from collections.abc import Mapping
from typing import Final, Literal, Self

from pydantic import Field, SecretStr, model_validator

from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.shared.config.base.model import Config
from flotilla.shared.schemas.sandbox import IsolationLevel

KEY: Final = "FLOTILLA_SANDBOX_KEY"
"""The variable of a provider's key."""

HAVE_NO_EFFECT: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("level", "python", "readable_paths", "busy_part", "uid_base"): ("docker", "e2b", "daytona", "kubernetes", "modal"),
    ("url", "image", "images", "warm", "box_network", "box_start_seconds", "box_lifetime_seconds"): ("local",),
    ("key",): ("local", "docker"),
    ("runtime",): ("local", "e2b", "daytona", "modal"),
    ("namespace",): ("local", "docker", "e2b", "daytona", "modal"),
}
"""Settings, and the providers for which they have no effect."""


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
    provider: Literal["local", "docker", "e2b", "daytona", "kubernetes", "modal"] = "local"
    """Where programs run: in this machine's own isolation, or each in a box of a provider."""
    url: str | None = Field(None, pattern=r"^(unix|tcp|http|https)://")
    """The provider's API. Null: docker's socket, the hosted service, or the cluster that this is in."""
    key: SecretStr | None = None
    """Of the provider's account; Modal: ``ID:SECRET`` of a token. Docker has none; null for Kubernetes: the token of
    this pod's service account."""
    image: str = Field("python:3.12-slim", min_length=1, max_length=500)
    """What boxes are made of for calls that name no image; E2B: a template, Daytona: an image or ``snapshot:NAME``,
    Modal: an image, or the ``im-...`` of one that is built."""
    images: tuple[str, ...] = ()
    """Patterns of images that a call may name beside that one, such as ``swebench/*``; ``*`` allows all."""
    warm: int = Field(1, ge=0, le=256)
    """How many boxes are kept ready; they cost as others do."""
    box_network: bool = False
    """Let boxes reach the network: what runs in them may then send what it reads anywhere."""
    box_start_seconds: float = Field(120.0, gt=0, le=3600)
    """Longest wait for a box. One that comes later, for an image that is pulled first, is there for the next call."""
    box_lifetime_seconds: float = Field(6000.0, ge=600, le=86_400)
    """Life of a box that is kept warm; it ends by itself then. It is kept for half an hour, so by default it serves a
    session of an hour. An account may allow less."""
    runtime: str | None = None
    """Of containers: docker's runtime, or the RuntimeClass of pods, such as one with a kernel of its own."""
    namespace: str = Field("default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Of pods."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        given = self.model_fields_set
        where = f"FLOTILLA_SANDBOX_PROVIDER is {self.provider}"
        for names, provider in HAVE_NO_EFFECT.items():
            if self.provider in provider and (without := sorted(set(names) & given)):
                variables = ", ".join(f"FLOTILLA_SANDBOX_{name.upper()}" for name in without)
                raise ValueError(f"{variables} has no effect where {where}: leave it out, or choose another provider")
        if self.provider != "local" and self.unsafe_sandbox:
            raise ValueError(f"FLOTILLA_UNSAFE_SANDBOX has no effect where {where}: leave it out")
        return self
