"""Several experiments side by side: pure functions of what was read of them."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from flotilla.cli.points import Point, Points
from flotilla.cli.progress import Progress

"""(step, version, value) in the order of steps."""

USUAL = (
    "evaluation/accuracy",
    "evaluation/reward_mean",
    "evaluation/num_graded_rows",
    "evaluation/num_rows",
    "evaluation/pass@*",
    "reward/mean",
    "reward/std_within_group",
    "groups/flat_fraction",
    "completion_tokens/mean",
    "loss/total",
    "entropy",
    "kl/mean",
    "ratio/approx_kl",
    "grad_norm",
    "learning_rate",
    "lag/mean",
    "tokens/trained",
    "time/step_seconds",
    "trainer/idle_ratio",
)
"""The series that are compared unless others are named."""
ABSENT = "-"
AUTO = "auto"
DECIDED = frozenset({"parallelism.device", "rollout.engine.device", "model.dtype", "asynchrony.publication.lora"})
"""Values that an experiment's first services decide if its spec has auto (``shared/config/rules``)."""


class ComparedSeries(NamedTuple):
    """A series at one step.

    Attributes:
        name: of the series.
        step: None where no step has a value of all.
        values: in the order of the experiments; without a common step each one's last, None where it has none.
    """

    name: str
    step: int | None
    values: list[float | None]


class ComparedSetting(NamedTuple):
    """A setting in which specs differ.

    Attributes:
        path: in the spec.
        values: in the order of the experiments; what a spec does not have at all is ``"-"``.
    """

    path: str
    values: list[Any]


def common_step(several: Sequence[Sequence[Point]], at_most: int | None) -> int | None:
    """Find the last step at which every series has a value; None where there is none.

    Args:
        several: one series of each experiment.
        at_most: not beyond this step; None: anywhere.
    """
    steps = set.intersection(*({step for step, _, _ in points} for points in several)) if several else set()
    return max((step for step in steps if at_most is None or step <= at_most), default=None)


def value_at(points: Sequence[Point], step: int) -> float | None:
    """Value of a series at a step; None where it has none."""
    return next((value for known, _, value in points if known == step), None)


def compare_metrics(
    runs: Sequence[Progress], patterns: Sequence[str], *, step: int | None = None, named: Sequence[str] = ()
) -> list[ComparedSeries]:
    """Compare the values of series, each at the last step at which all experiments have one.

    Args:
        runs: the experiments.
        patterns: names of series, such as ``reward/*``, in the order in which they are wanted.
        step: not beyond this step.
        named: series that have an entry, even if no experiment has a value of them.
    """
    names = sorted({name for run in runs for name in run.series} | set(named))
    chosen = dict.fromkeys(name for pattern in patterns for name in names if fnmatchcase(name, pattern))
    found = []
    for name in chosen:
        several = [run.series.get(name, Points()) for run in runs]
        shared = common_step(several, step)
        if shared is None:
            values = [_last_value(points, step) for points in several]
        else:
            values = [value_at(points, shared) for points in several]
        found.append(ComparedSeries(name, shared, values))
    return found


def _last_value(points: Sequence[Point], at_most: int | None) -> float | None:
    values = [value for step, _, value in points if at_most is None or step <= at_most]
    return values[-1] if values else None


def remarks(run: Progress, *, at_most: int | None) -> list[str]:
    """Return what a reader must know of an experiment's values.

    Args:
        run: the experiment.
        at_most: no value beyond this step is shown; None: all are.
    """
    found = []
    if run.view.origin is not None:
        origin = run.view.origin
        begin = f"began from step {origin.step} of {origin.experiment_id}"
        found.append(f"{begin}: tokens/trained counts those of before, too")
    first = min((points[0][0] for points in run.series.values() if points), default=None)
    if first is not None and at_most is not None and first > at_most:
        found.append(f"has no value up to step {at_most}: its first is of step {first}")
    return found


def compare_specs(specs: Sequence[Mapping[str, Any]]) -> list[ComparedSetting]:
    """List the settings in which experiments differ, by path.

    What one of them leaves open that is decided when it gets its first services (``auto``) is no difference to what was
    decided for another.
    """
    several = [dict(_leaves(spec)) for spec in specs]
    paths = dict.fromkeys(path for leaves in several for path in leaves)
    rows = [ComparedSetting(path, [leaves.get(path, ABSENT) for leaves in several]) for path in paths]
    return [row for row in rows if len(_said(row.path, row.values)) > 1]


def _said(path: str, values: Sequence[Any]) -> list[Any]:
    """List the different values; not what is still to be decided."""
    is_decided = path in DECIDED and any(value != AUTO for value in values)
    found: list[Any] = []
    for value in values:
        if value not in found and not (is_decided and value == AUTO):
            found.append(value)
    return found


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, node
