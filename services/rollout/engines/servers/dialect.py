"""What differs between the servers that sample for us: how they are started, asked, paused and given weights.

Everything else is the same for all of them and is in ``servers.engine``: the order of requests and updates, the check
of images, supervision, deadlines.

How policy versions are named at a server.

A server that was restarted by its owner has its first weights, and one that another client uses has that one's: none of
these may be taken for a published version. So each engine's labels have a unique mark.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flotilla.services.rollout.engines.base import GenerationRequest, Prefix, PromptImage
from flotilla.services.rollout.engines.servers.completions import Sampled
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.vision.processor import ImageProcessor

MARK_BYTES = 4


class VersionLost(Exception):
    """The server's weights are not those that this engine gave it.

    Attributes:
        label: that they have.
    """

    def __init__(self, label: object) -> None:
        super().__init__(f"its weights are labelled {label!r}")
        self.label = label


class VersionLabels:
    """The labels of one engine."""

    def __init__(self) -> None:
        self._mark = f"-{secrets.token_hex(MARK_BYTES)}"

    def of(self, version: int) -> str:
        """Make the label of a version."""
        return f"{version}{self._mark}"

    def version(self, label: object) -> int:
        """Read a label.

        Raises:
            VersionLost: it is none of Flotilla's.
        """
        number = label.removesuffix(self._mark) if isinstance(label, str) else ""
        if not (number.isascii() and number.isdecimal()) or label != self.of(int(number)):
            raise VersionLost(label)
        return int(number)


def label_in(reply: object) -> object:
    """Read the label in a server's answer; None if there is none."""
    return reply.get("weight_version") if isinstance(reply, dict) else None


Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Launch:
    """How an own server is started, and where it listens then.

    Attributes:
        arguments: behind the interpreter.
        environment: all of it.
        url: that requests go to.
        key: that it requires; None if every client may call it.
        socket: file in the server's directory that it listens on instead of a port.
        files: text files in its directory, readable by this user only, by name.
        shared_memory: how names of files in shared memory begin that it makes, and leaves when it is killed.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    key: str | None = None
    socket: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    shared_memory: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedHere:
    """A running server's description of itself.

    Attributes:
        model_path: directory of its model, as it names it.
        context_tokens: prompt and completion together; None if it does not say.
        context_flag: argument that sets this.
    """

    model_path: Path
    context_tokens: int | None
    context_flag: str


@dataclass(frozen=True, slots=True)
class Known:
    """What this side knows of its requests when it asks a server for its load.

    Attributes:
        prompt_tokens: of the requests at the server.
        generated_tokens: of completions that have ended.
    """

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class ShownImages:
    """The images of a prompt that a completion is asked for.

    Attributes:
        images: in order; not none.
        processor: of the model, which has counted their tokens.
        serving: the version that serves now: what a tower computed under another one is not to be used again.
    """

    images: Sequence[PromptImage]
    processor: ImageProcessor
    serving: int


class Caller(Protocol):
    """Calls the server; see ``servers.connection.Connection``."""

    async def post(self, path: str, body: Body | None, *, seconds: float | None = None) -> Any:
        """Call an endpoint."""

    async def get(self, path: str, *, seconds: float | None = None) -> Any:
        """Read an endpoint."""


class Sleeper(Protocol):
    """How one kind of server lends the memory of its device. It is not called otherwise meanwhile.

    It can where it was started with ``ServerSettings.sleeps``, or by its owner with that option.
    """

    async def sleep(self, caller: Caller, *, seconds: float) -> None:
        """Free weights and KV cache of a server that samples nothing; returns when they are gone."""

    async def wake(self, caller: Caller, source: Path, label: str, *, load_seconds: float) -> None:
        """Take the memory again and load a directory that fits the model. After a failure its weights are unknown."""


class Prover(Protocol):
    """How one kind of server proves what it has in memory."""

    signs_zeros: bool
    """Whether a zero in what is hashed has its sign; false: all are positive."""
    asks_others: bool
    """Whether it can ask an external server."""

    async def hashes(self, caller: Caller, *, seconds: float) -> Mapping[str, str]:
        """Ask for SHA-256 of each of its tensors by its own names, in hexadecimal; the first 16 digits or more.

        Raises:
            Refused: it does not tell, or has several ranks, each with a part of the tensors.
            LookupError, TypeError, ValueError, AttributeError: it answers something else.
        """


class Adapting(Protocol):
    """How one kind of server samples with adapters that it adds to its weights itself.

    It can where it was started with ``ServerSettings.adapters``.
    """

    async def load(self, caller: Caller, name: str, directory: Path, *, seconds: float) -> None:
        """Load a folder of peft's under a new name, while it samples; what it has stays.

        Raises:
            Refused: it does not take it, and continues as before.
        """

    async def unload(self, caller: Caller, name: str) -> None:
        """Forget an adapter that no request has.

        Raises:
            Refused: it has none of the name.
        """

    async def relabel(self, caller: Caller, label: str) -> None:
        """Label what it samples from now on; it samples nothing meanwhile.

        Raises:
            Unavailable: it was restarted.
        """

    def asked_with(self, body: Body, name: str) -> Body:
        """Have the body for a completion ask for an adapter."""

    def sampled_with(self, reply: Body) -> object:
        """Read which adapter a completion was sampled with; None if it does not say."""

    async def hashes(self, caller: Caller, rank: int, *, seconds: float) -> Mapping[str, str]:
        """Ask for SHA-256 of A and scaled B in float32 of the adapter that was loaded last, one behind the other.

        Args:
            caller: of the server.
            rank: of all adapters.
            seconds: that it may take.

        Returns:
            By the name of the server's layer and the number of the part, ``model.layers.0.self_attn.qkv_proj.1``; the
            first 16 digits or more. Parts to which nothing is added are left out.

        Raises:
            Refused: it does not tell.
            LookupError, TypeError, ValueError, AttributeError: it answers something else.
        """


Check = Callable[[], Awaitable[None]]
"""Fails unless a server has in memory what it was given."""


class Dialect(Protocol):
    """One kind of server; an instance belongs to one engine."""

    name: str
    """As people write it."""
    variable: str
    """Environment variable that names its interpreter."""
    capabilities: frozenset[EngineCapability]
    margin_tokens: int
    """Positions of its context that it keeps for itself."""
    generate_path: str
    alive_path: str
    """Answered at once while it lives, paused or not."""
    health_path: str
    """Answered while it works; not asked while it is paused."""
    label_path: str
    """Its answer has the label of the weights that it serves, as ``weight_version``."""
    asks_when_idle: bool
    """Whether ``load`` wants to be called while nothing is sampled as well."""
    places_images: bool
    """Whether images' tokens are given by position; else every token of their kind is, a sampled one, too."""
    prover: Prover | None
    """How it proves what it has in memory; None if it cannot."""
    adapters: Adapting | None
    """How it samples with adapters; None if it cannot."""
    sleeper: Sleeper | None
    """How it lends its memory; None if it cannot. ``SLEEP`` is among its capabilities if it can."""

    def launch(self, settings: ServerSettings, place: Path, context_tokens: int, label: str) -> Launch:
        """Return how it is started.

        Args:
            settings: of the engine.
            place: directory of its own, in which it is started.
            context_tokens: prompt and completion together, at most what the model can.
            label: of its first weights, if it can be set before it runs; see ``greet``.

        Raises:
            InvalidSpec: it cannot be started so.
        """

    async def describe(self, caller: Caller, settings: ServerSettings) -> ServedHere:
        """Ask a server that runs already what it serves.

        Raises:
            ModelError: it was not started as the fleet needs it.
            Refused: it refuses, for another reason.
            LookupError, TypeError, ValueError, AttributeError: it is something else.
        """

    async def greet(self, caller: Caller, label: str) -> None:
        """Prepare a server that has just started, or was just found: its weights have this label from now on."""

    def body(
        self, request: GenerationRequest, index: int, prefix: Prefix | None, request_id: str, serving: int
    ) -> Body:
        """Make the body that asks for one completion.

        Args:
            request: what is asked of the engine.
            index: of the completion in it.
            prefix: tokens that it has already and keeps.
            request_id: of this completion.
            serving: the version that serves now; completions begun under different ones share no KV cache.
        """

    def with_images(self, body: Body, shown: ShownImages) -> Body:
        """Have the body for a completion, as ``body`` made it, show the images of its prompt; takes a while.

        Raises:
            CannotBeShown: the server cannot be given the positions of images' tokens.
        """

    def sampled(self, reply: Body) -> Sampled:
        """Read the reply to such a body.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: it lacks something, or is something else.
        """

    async def abort(self, caller: Caller, request_id: str) -> None:
        """End a completion; its call returns what it has."""

    async def switch(
        self, caller: Caller, source: Path, label: str, mode: OnWeightUpdate, *, load_seconds: float, check: Check
    ) -> None:
        """Pause, load a directory that fits under a label, check, continue. After a failure the weights are unknown."""

    async def load(self, caller: Caller, known: Known) -> tuple[int, int]:
        """Ask how many completions run, and how many tokens those have that have not ended."""
