"""Reads what a run recorded of its speed: series and publications from the database, groups from the samples."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flotilla.cli.sample_files import import_pyarrow_alone
from flotilla.cli.stored import StoredExperiments, stored_at
from flotilla.planning.recorded import RecordedGroup, RecordedRun, RecordedStep
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.samples.folder import SAMPLES, SPEC_FILE, open_samples_file, stored_files
from flotilla.shared.schemas.experiment import ExperimentView
from flotilla.shared.streams.ledger import Ledger

LAST_STEPS = 60
"""Older ones are not read: lengths and what is filtered change while a policy learns."""
STEP, WAIT, COMPUTE, PUBLISH = (f"time/{part}_seconds" for part in ("step", "wait", "compute", "publish"))
ENDED = (STEP, WAIT, COMPUTE, PUBLISH)
CHECKPOINT, PUBLICATION, SWITCH = "time/checkpoint_seconds", "time/publication_seconds", "publication/commit_seconds"
TOKENS, LAG = "tokens/trained_in_step", "lag/mean"
ENGINE_CORES, TRAINER_CORES = "rollouter/cores", "time/compute_cores"
SERIES = (*ENDED, CHECKPOINT, PUBLICATION, SWITCH, TOKENS, LAG, ENGINE_CORES, TRAINER_CORES)
LARGEST = 1e12
"""No time in seconds and no number of tokens is above it."""
ROWS_AT_ONCE = 64
"""Rows have all token ids of a conversation, which are unpacked to be counted."""
TIMES = ("generated_after_seconds", "graded_after_seconds", "generation_seconds", "grading_seconds")


class Row(NamedTuple):
    """What is read of a sample; of its token ids their number."""

    kind: str
    group_id: int
    issued_at: float | None
    reward: float | None
    num_sampled: int
    token_ids: int
    timings: list[tuple[str, float]] | None


async def read_run(named: Path) -> RecordedRun:
    """Read a run from its folder, or that of its experiment, as it is now.

    Raises:
        NotFound: there is no experiment in the folder.
        InvalidRequest: it is a job without rollouts, or its spec is not one, or its records are damaged.
    """
    source, reference = stored_at(named)
    async with source:
        experiment = await source.experiment(reference)
        values, ended_at = await _series(source, experiment)
        directory = Path(experiment.directory)
        spec = validate_spec(await asyncio.to_thread(_spec, directory, experiment.spec))
        if spec.finished_job is not None or not spec.trains:
            raise InvalidRequest(f"{experiment.name} is a job without rollouts and trainer: there is nothing to plan")
        steps = [_step(number, ended_at[number], values) for number in _whole(values, ended_at)][-LAST_STEPS:]
        first = steps[0].step if steps else 0
        groups = await on_daemon_thread(lambda: list(_groups(directory, first, steps)), "samples")
        ledger = await source.ledger(experiment)
        return RecordedRun(
            spec=spec,
            rollouts=_rollouts(source, experiment, spec),
            groups=groups,
            steps=steps,
            publication_seconds=_mean(values[PUBLICATION], first) or 0.0,
            switch_seconds=_mean(values[SWITCH], first) or 0.0,
            filtered_share=_filtered_share(None if ledger is None else ledger.train, groups),
            engine_cores=_mean(values[ENGINE_CORES], first),
            trainer_cores=_mean(values[TRAINER_CORES], first),
        )


async def _series(
    source: StoredExperiments, experiment: ExperimentView
) -> tuple[Mapping[str, Mapping[int, float]], Mapping[int, float]]:
    values: dict[str, dict[int, float]] = {name: {} for name in SERIES}
    ended_at: dict[int, float] = {}
    after = None
    while (page := await source.metric_page(experiment, SERIES, after=after)).items:
        for point in page.items:
            _checked(point.value, f"{point.name} of step {point.step} in the database of {source.data}")
            values[point.name][point.step] = point.value
            if point.name == ENDED[0] and point.at:
                ended_at[point.step] = _instant(point.at, source)
        after = page.next
    return values, ended_at


def _instant(at: str, source: StoredExperiments) -> float:
    try:
        return datetime.fromisoformat(at).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"the database of {source.data} has a step that ended at {at!r}: {error}") from error


def _checked(value: float | None, what: str) -> None:
    """Refuse what no clock and no counter says; NaN is neither below nor above."""
    if value is not None and not 0 <= value <= LARGEST:
        raise InvalidRequest(f"{what} is {value}: a number from 0 to {LARGEST:g} is expected")


def _whole(values: Mapping[str, Mapping[int, float]], ended_at: Mapping[int, float]) -> Iterator[int]:
    """List the newest steps without a gap, in their order; one without the time of its end is a gap."""
    numbers: list[int] = []
    for number in sorted(ended_at, reverse=True):
        if (numbers and number != numbers[-1] - 1) or any(number not in values[name] for name in ENDED):
            break
        numbers.append(number)
    return reversed(numbers)


def _step(number: int, ended_at: float, values: Mapping[str, Mapping[int, float]]) -> RecordedStep:
    return RecordedStep(
        step=number,
        ended_at=ended_at,
        wait=values[WAIT][number],
        compute=values[COMPUTE][number],
        publish=values[PUBLISH][number],
        checkpoint=values[CHECKPOINT].get(number, 0.0),
        tokens=values[TOKENS].get(number, 0.0),
        lag=values[LAG].get(number, 0.0),
    )


def _mean(values: Mapping[int, float], first: int) -> float | None:
    """Take the mean from a step on, without the beginning where there is more."""
    found = [value for step, value in sorted(values.items()) if step >= first]
    found = found[min(2, len(found) - 1) :] if found else []
    return fmean(found) if found else None


def _spec(directory: Path, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Read the spec as the trainer had it, whose devices are decided."""
    try:
        with open_samples_file(directory / SAMPLES, SPEC_FILE) as file:
            found = json.load(file)
    except OSError:
        return dict(recorded)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{directory / SAMPLES / SPEC_FILE} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{directory / SAMPLES / SPEC_FILE} is no spec: an object is expected")
    return found


def _rollouts(source: StoredExperiments, experiment: ExperimentView, spec: ExperimentSpec) -> int:
    """Count the rollouts of the newest publication; before the first one, those that it has at least."""
    members = source.publication_members(experiment)
    return max(1, members[-1]) if members else spec.resources.rollouts.min


def _filtered_share(ledger: Ledger | None, groups: Sequence[RecordedGroup]) -> float:
    """Return the share of graded groups that were filtered, from the ledger or the samples of a running experiment."""
    if ledger is not None:
        filtered, trained = sum(ledger.filtered.values()), ledger.trained + ledger.planned
    else:
        filtered = sum(each.kind == "filtered" for each in groups)
        trained = len(groups) - filtered
    return filtered / (filtered + trained) if filtered else 0.0


def _groups(directory: Path, first: int, steps: Sequence[RecordedStep]) -> Iterator[RecordedGroup]:
    import_pyarrow_alone()

    begin = steps[0].computed_from - steps[0].wait if steps else 0.0
    for stored in stored_files(directory / SAMPLES):
        if stored.family == "evaluation" or (stored.family == "step" and stored.number < first):
            continue
        members: dict[int, list[Row]] = defaultdict(list)
        for row in _rows(directory / SAMPLES, stored.name):
            if row.kind in {"trained", "filtered"} and row.num_sampled:
                members[row.group_id].append(row)
        for each in members.values():
            made = _group_of(each, directory / SAMPLES / stored.name)
            if made is not None and (stored.family == "step" or made.graded_at >= begin):
                yield made


def _rows(samples: Path, name: str) -> Iterator[Row]:
    """Read a file of samples, a few rows at a time; none of one that went meanwhile: the folder has a bound."""
    from pyarrow import ArrowException, Table, compute, parquet

    try:
        with open_samples_file(samples, name) as opened:
            file = parquet.ParquetFile(opened)
            missing = set(Row._fields).difference(file.schema_arrow.names)
            if missing:
                raise InvalidRequest(f"{samples / name} has no column {', '.join(sorted(missing))}")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(Row._fields)):
                table = Table.from_batches([batch]).select(Row._fields)
                position = Row._fields.index("token_ids")
                lengths = compute.list_value_length(table.column(position))
                table = table.set_column(position, "token_ids", lengths).cast(_columns())
                for row in (Row(**each) for each in table.to_pylist()):
                    if None in {row.kind, row.group_id, row.num_sampled, row.token_ids}:
                        raise InvalidRequest(f"{samples / name} has a sample without kind, group or token ids")
                    yield row
    except OSError:
        return
    except (ArrowException, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{samples / name} holds no samples: {error}") from error


def _columns() -> Any:
    import pyarrow

    text, whole, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    types = (text, whole, number, number, whole, whole, pyarrow.map_(text, number))
    return pyarrow.schema(list(zip(Row._fields, types, strict=True)))


def _group_of(members: Sequence[Row], file: Path) -> RecordedGroup | None:
    """Put a group together; None of one whose times are not known."""
    issued_at = members[0].issued_at
    timings = [dict(each.timings or ()) for each in members]
    longest = [max((each[name] for each in timings if each.get(name) is not None), default=None) for name in TIMES]
    for name, value in zip(("issued_at", *TIMES), (issued_at, *longest), strict=True):
        _checked(value, f"{name} of group {members[0].group_id} in {file}")
    for each in members:
        _checked(each.num_sampled, f"num_sampled of group {each.group_id} in {file}")
    generated, graded, sampling, grading = longest
    if issued_at is None or generated is None or graded is None or sampling is None:
        return None
    return RecordedGroup(
        group_id=members[0].group_id,
        kind=members[0].kind,
        issued_at=issued_at,
        generated_at=issued_at + generated,
        graded_at=issued_at + graded,
        generation_seconds=sampling,
        grading_seconds=grading or 0.0,
        lengths=tuple(each.num_sampled for each in members),
        totals=tuple(max(each.num_sampled, each.token_ids) for each in members),
        rewards=tuple(each.reward for each in members),
    )
