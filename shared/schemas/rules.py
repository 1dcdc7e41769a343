"""Rules of a spec as the control plane shows them."""

from flotilla.shared.schemas.wire import TolerantWire


class RuleFired(TolerantWire):
    """A rule that acted."""

    rule: str
    at: str
    step: int
    """Of the point that met its condition."""
    version: int
    """Policy version of that point."""
    value: float
    """Of that point."""
    best: float | None = None
    """The best value before, where the condition is a plateau."""
    did: str
    """What it did; or why it could not, which counts as well."""
    changes: tuple[str, ...] = ()
    """Ids of the live changes that it made."""


class RuleView(TolerantWire):
    """A rule and where it stands."""

    name: str
    metric: str
    times: int
    """How often it acts at most."""
    num_fired: int
    """How often it has acted, actions included that only a checkpoint remembers."""
    num_points: int
    """Points of its series since it acted last, or since the run began."""
    num_met: int
    """The newest of them in a row that meet its condition: as many as its patience make it act."""
    patience: int
    fired: tuple[RuleFired, ...]
    """Oldest first."""
