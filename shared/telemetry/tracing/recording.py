"""Whether this process records spans: decided once, at its start, by its ``__main__``.

Without ``FLOTILLA_TRACES`` ``tracer()`` is None, and a span costs this call.
"""

import atexit
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.task import Task
from flotilla.shared.telemetry.logging import experiment_id as current_experiment
from flotilla.shared.telemetry.tracing.tracer import Attribute, Place, Span, issue_of

if TYPE_CHECKING:
    from flotilla.shared.telemetry.tracing.tracer import Sink, Tracer

TRACES: Final = "FLOTILLA_TRACES"
SHARE: Final = "FLOTILLA_TRACES_SHARE"

_tracer: "Tracer | None" = None
_above: ContextVar[Place | None] = ContextVar("span", default=None)


def tracer() -> "Tracer | None":
    """The tracer of this process; None where nothing is traced."""
    return _tracer


def use_tracer(made: "Tracer | None") -> None:
    """Record spans with a tracer from now on, or none."""
    global _tracer
    _tracer = made


def record_issues(experiment_id: str, tasks: Sequence[Task]) -> None:
    """Record that tasks were issued now: the first span of each group's trace."""
    made = _tracer
    if made is None:
        return
    ended = time.time()
    for task in tasks:
        place = issue_of(experiment_id, task.lane, task.group_id)
        facts = {**_facts(experiment_id, task), "flotilla.version": task.min_version}
        made.record(Span("issue", place.trace_id, place.span_id, None, task.issued_at or ended, ended, facts))


def _facts(experiment_id: str, task: Task) -> dict[str, Attribute]:
    return {"flotilla.experiment": experiment_id, "flotilla.lane": task.lane.value, "flotilla.group": task.group_id}


@contextmanager
def group_span(
    name: str, task: Task, attributes: Mapping[str, Attribute] | None = None
) -> Iterator[dict[str, Attribute]]:
    """Record a span of a task's group, in the experiment that this process works for; spans within hang below it.

    Yields:
        Its attributes: add what is known only then.
    """
    made, experiment = _tracer, current_experiment.get()
    if made is None or experiment is None:
        yield {}
        return
    above = issue_of(experiment, task.lane, task.group_id)
    with _recorded(made, name, above, {**_facts(experiment, task), **(attributes or {})}) as found:
        yield found


@contextmanager
def inner_span(name: str, attributes: Mapping[str, Attribute] | None = None) -> Iterator[dict[str, Attribute]]:
    """Record a span below the present one; nothing where there is none."""
    made, above = _tracer, _above.get()
    if made is None or above is None:
        yield {}
        return
    with _recorded(made, name, above, attributes or {}) as found:
        yield found


@contextmanager
def _recorded(
    made: "Tracer", name: str, above: Place, attributes: Mapping[str, Attribute]
) -> Iterator[dict[str, Attribute]]:
    if not made.takes(above.trace_id):
        yield {}
        return
    found = dict(attributes)
    span_id, began, error = made.new_id(), time.time(), None
    token = _above.set(Place(above.trace_id, span_id))
    try:
        yield found
    except BaseException as raised:
        # Not its text, which may hold what a model wrote, or a secret of an address: spans leave the fleet.
        error = type(raised).__name__
        raise
    finally:
        _above.reset(token)
        made.record(Span(name, above.trace_id, span_id, above.span_id, began, time.time(), found, error))


def trace_process(process: str, environment: Mapping[str, str] | None = None) -> None:
    """Record this process's spans as ``FLOTILLA_TRACES`` says, until it ends; for ``__main__`` modules.

    Raises:
        InvalidRequest: the variable is neither a collector's address nor an absolute folder that can be written.
    """
    values = os.environ if environment is None else environment
    target = values.get(TRACES, "").strip()
    if not target:
        return
    # Here, since most processes record nothing, and a command line waits for its imports.
    from flotilla.shared.telemetry.tracing.tracer import Tracer

    share = _share_of(values.get(SHARE, "").strip())
    made = Tracer(process, _sink_of(target, process), share)
    use_tracer(made)
    atexit.register(made.close)


def _sink_of(target: str, process: str) -> "Sink":
    from flotilla.shared.telemetry.tracing.tracer import CollectorSink, FileSink

    wrong = InvalidRequest(f"{TRACES} must be http://HOST:PORT of a collector, or an absolute folder")
    if target.startswith(("http://", "https://")):
        try:
            parts = urlsplit(target)
            is_right = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_right = False
        if not is_right:
            raise wrong
        return CollectorSink(target)
    folder = Path(target)
    if not folder.is_absolute():
        raise wrong
    try:
        return FileSink(folder, process)
    except OSError as error:
        raise InvalidRequest(f"{TRACES}: no spans can be written into {folder}: {error.strerror}") from None


def _share_of(text: str) -> float:
    try:
        share = float(text or 1.0)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InvalidRequest(f"{SHARE} must be a number above 0 and at most 1, got {text!r}")
    return share
