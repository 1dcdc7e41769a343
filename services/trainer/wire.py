"""Messages between the supervisor and its worker: JSON lines on the worker's standard input and output.

Secrets travel here and nowhere else: not in arguments, not in files, not in the environment. The end of the input
ends the worker.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from flotilla.shared.schemas.service import Assignment, DeviceOrder, DeviceReport, Failure, WorkState
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.telemetry.logging import LogFormat

EXIT_PEER_LOST = 4
"""A worker's exit code when another rank is lost: the launcher reports which."""


class Line(Wire):
    """One message."""

    def line(self) -> bytes:
        """Encode as one line, newline included."""
        return self.model_dump_json().encode() + b"\n"


class Launch(Line):
    """Supervisor to worker, once and first: what to train."""

    kind: Literal["launch"] = "launch"
    assignment: Assignment
    service_id: str
    incarnation: int | None
    """Rises with every worker; None lets the data plane number it."""
    gateway_url: str
    redis_url: str
    host: str
    """Address that the weight group binds to, and that rollouts reach it at."""
    log_level: str
    log_format: LogFormat
    """The supervisor's: it passes on what the worker writes."""


class Order(Line):
    """Supervisor to worker: what to do from now on. Draining ends it; idle, too, and no trainer continues then."""

    kind: Literal["order"] = "order"
    state: Literal[WorkState.RUNNING, WorkState.PAUSED, WorkState.DRAINING, WorkState.IDLE]
    device: DeviceOrder | None = None
    """Where the device is shared in turns: whether the worker may hold it."""
    last_change: str | None = None
    """Id of the newest live change of the spec that the gateway knows."""


class Offered(Line):
    """Supervisor to worker: the image of this version can be pulled."""

    kind: Literal["offered"] = "offered"
    version: int


class Status(Line):
    """Worker to supervisor: where it stands."""

    kind: Literal["status"] = "status"
    state: WorkState
    step: int | None
    """Steps done; None until a checkpoint was loaded, or found missing."""
    version: int | None
    """Version published last; None before the first."""
    load: Mapping[str, float] = Field(default_factory=dict)
    failure: Failure | None = None
    """What it could not do and tries again, such as a checkpoint on a full disk."""
    device: DeviceReport | None = None
    """None before the worker follows orders about the device: it is loading."""
    holds_devices: bool | None = None
    """Of a host that does not lead, which follows no orders but the leader's: whether its ranks have their weights on
    their devices. None before they have loaded any."""


class ImageReady(Line):
    """Worker to supervisor: the image of a version may be served. The answer is :class:`Offered`."""

    kind: Literal["image"] = "image"
    version: int
    path: str
    checksum: str
    """Of the snapshot: pullers compare it with what arrives."""


class StoreOpened(Line):
    """First node of a job on several hosts to its supervisor: where the others find the job's store."""

    kind: Literal["store"] = "store"
    port: int


class Failed(Line):
    """Worker to supervisor: why it ends."""

    kind: Literal["failed"] = "failed"
    failure: Failure
    is_permanent: bool
    """Whether starting again would fail the same way."""
    is_passing: bool = False
    """Whether the reason passes by itself, such as a server that did not answer: no death to count."""


TO_WORKER: TypeAdapter[Launch | Order | Offered] = TypeAdapter(
    Annotated[Launch | Order | Offered, Field(discriminator="kind")]
)
FromWorker = Status | ImageReady | StoreOpened | Failed
FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])
