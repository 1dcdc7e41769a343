"""The fleet's own view of the Tinker API, beside the messages that its client reads."""

from flotilla.shared.schemas.wire import TolerantWire


class TinkerLedger(TolerantWire):
    """What became of one token's requests.

    ``accepted = done + failed + waiting``: the last is counted from what waits, the others as it happens.
    """

    owner: str
    """The token's name."""
    accepted: int
    done: int
    failed: int
    waiting: int
    waiting_bytes: int
    """Of the bodies of those that wait."""


class RequestLedger(TolerantWire):
    """What became of the training requests of one model: ``accepted = answered + failed + waiting``."""

    accepted: int
    answered: int
    failed: int
    waiting: int
    """Counted from what waits, the others as it happens."""


class TinkerLedgers(TolerantWire):
    """The caller's own; an operator's call lists all."""

    owners: tuple[TinkerLedger, ...]


class TinkerRun(TolerantWire):
    """Which weights sampled a run of tokens."""

    first_token: int
    """The run's first one; it continues to the next run's."""
    path: str | None
    """Of the saved weights, ``tinker://...``; null: the base model."""
    step: int
    """Updates that those weights had."""


class TinkerSequence(TolerantWire):
    """Which weights sampled the tokens of a sequence."""

    sequence_id: str
    base_model: str
    runs: tuple[TinkerRun, ...]
