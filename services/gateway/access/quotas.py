"""How much one token, or all of one owner, may have at a time: pure checks, which name what is used and allowed."""

from collections.abc import Iterable, Mapping

from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.errors import QuotaExceeded
from flotilla.shared.net.authorisation.token_records import Quota
from flotilla.shared.schemas.experiment import ExperimentState

ACTIVE = frozenset({ExperimentState.STARTING, ExperimentState.RUNNING, ExperimentState.PAUSED})
UNLIMITED = Quota(experiments=None, running=None, sample_bytes=None, episodes=None)


def check_new(new: ExperimentRecord, known: Iterable[ExperimentRecord], quota: Quota) -> None:
    """Check that a token may have one more experiment, and the samples that its spec lets it keep.

    Args:
        new: with the token that makes it.
        known: all experiments.
        quota: of that token.

    Raises:
        QuotaExceeded: it has as many as it may.
    """
    own = [each for each in known if holder_of(each) == holder_of(new)]
    _check("experiments", len(own), 1, quota.experiments, holder_of(new), "delete some of them")
    kept = sum(map(_sample_bytes, own))
    advice = "delete experiments, or lower samples.max_bytes of the spec"
    _check("sample_bytes", kept, _sample_bytes(new), quota.sample_bytes, holder_of(new), advice)


def check_running(record: ExperimentRecord, known: Iterable[ExperimentRecord], quota: Quota) -> None:
    """Check that one more experiment of the token that made it may be at work.

    Raises:
        QuotaExceeded: as many as may be are.
    """
    is_others = (each for each in known if holder_of(each) == holder_of(record) and each.id != record.id)
    running = sum(each.state in ACTIVE for each in is_others)
    _check("running", running, 1, quota.running, holder_of(record), "wait until one has ended, or stop one")


def holder_of(record: ExperimentRecord) -> str | None:
    """Name the account of an experiment: its owner, whichever of their tokens made it, else the token."""
    return record.created_by if record.owner is None else f"owner {record.owner}"


def check_episodes(num_open: int, quota: Quota, whose: str) -> None:
    """Check that a token may begin one more episode.

    Raises:
        QuotaExceeded: as many as may be are open.
    """
    _check("episodes", num_open, 1, quota.episodes, whose, "complete some of them")


def _check(name: str, used: int, wanted: int, allowed: int | None, whose: str | None, advice: str) -> None:
    if allowed is None or used + wanted <= allowed:
        return
    more = f", and {wanted} more are wanted" if wanted > 1 else ""
    raise QuotaExceeded(
        f"the quota of {whose} for {name} is {allowed}, of which {used} are used{more}: {advice}, or let an operator "
        "raise it",
        quota=name,
        used=used,
        wanted=wanted,
        allowed=allowed,
    )


def _sample_bytes(record: ExperimentRecord) -> int:
    samples = record.spec.get("samples")
    most = samples.get("max_bytes") if isinstance(samples, Mapping) else 0
    return most if isinstance(most, int) else 0
