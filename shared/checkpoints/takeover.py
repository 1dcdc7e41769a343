"""Messages between trainer and gateway at a takeover: what the trainer has, and the agreed state."""

from collections.abc import Sequence

from pydantic import Field

from flotilla.shared.checkpoints.lineage import PlannedStep, Published, Standing, Takeover
from flotilla.shared.schemas.live_changes import LiveChange
from flotilla.shared.schemas.wire import Wire


class StandingPlan(Wire):
    """A step whose groups the data plane still has."""

    step: int = Field(ge=1)
    version: int = Field(ge=0)
    parent: str = ""
    made: str = ""


class StandingPoint(Wire):
    """A policy version and the optimiser steps that it contains."""

    version: int = Field(ge=0)
    step: int = Field(ge=0)


class TakeoverRequest(Wire):
    """What a trainer has."""

    step: int = Field(ge=0)
    """Of the checkpoint that it continues from; 0 without one."""
    published: StandingPoint
    """The version that was newest when that was written."""
    plans: tuple[StandingPlan, ...] = ()
    """Those that continue the checkpoint."""
    newest_version: int = Field(0, ge=0)
    """Highest number that the data plane knows of."""
    lineage: str = ""
    groups_waiting: int = Field(0, ge=0)
    """Groups of abandoned plans: they wait again."""
    groups_lost: int = Field(0, ge=0)
    """Groups that do not count as trained any more."""
    changes: tuple[LiveChange, ...] = ()
    """Live changes of the spec that the checkpoint was trained with."""

    def standing(self) -> Standing:
        """What is decided from."""
        plans = tuple(PlannedStep(**plan.model_dump()) for plan in self.plans)
        published = Published(self.published.version, self.published.step)
        return Standing(self.step, published, plans, self.newest_version, self.lineage)


class TakeoverAnswer(Wire):
    """What is true from now on."""

    points: tuple[StandingPoint, ...]
    """The versions of the lineage, oldest first."""
    end_step: int
    """Last step that is replayed from its plan."""
    lost: int | None = None
    """Highest number of a version that the lineage does not lead to."""
    changes: tuple[LiveChange, ...] = ()
    """All live changes of the spec, oldest first."""

    @classmethod
    def of(cls, takeover: Takeover, changes: Sequence[LiveChange] = ()) -> "TakeoverAnswer":
        """Put a decision on the wire."""
        points = tuple(StandingPoint(version=point.version, step=point.step) for point in takeover.points)
        return cls(points=points, end_step=takeover.end_step, lost=takeover.lost, changes=tuple(changes))

    def published(self) -> list[Published]:
        """List the versions of the lineage."""
        return [Published(point.version, point.step) for point in self.points]


class RefusedIncarnation(Wire):
    """The data plane knows a later trainer than the one that the gateway has appointed."""

    recorded: int = Field(ge=1)
    """Incarnation of the trainer that the data plane knows."""
