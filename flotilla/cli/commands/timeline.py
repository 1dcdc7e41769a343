"""``flotilla timeline RUN``: what happened when, for the viewers of Chrome and Perfetto."""

import argparse
import asyncio
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TypedDict

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.output import new_console, telling, write_json
from flotilla.cli.sample_files import import_pyarrow_alone
from flotilla.cli.stored import StoredExperiments, stored_at
from flotilla.cli.timeline import (
    PUBLICATION_PARTS,
    STEP_PARTS,
    GroupTimes,
    PublicationTimes,
    StepTimes,
    Timeline,
    timeline_of,
)
from flotilla.shared.samples.folder import SAMPLES, open_samples_file, stored_files
from flotilla.shared.schemas.experiment import ExperimentView


class Row(TypedDict):
    """What is read of a sample."""

    kind: str
    step: int | None
    version: int
    group_id: int
    issued_at: float | None
    ended: str | None
    reward: float | None
    num_sampled: int
    timings: list[tuple[str, float]]


STEP_SERIES = tuple(f"time/{part}_seconds" for part in STEP_PARTS)
PUBLICATION_SERIES = tuple(f"publication/{part}_seconds" for part in PUBLICATION_PARTS)


async def timeline(arguments: argparse.Namespace) -> int:
    """Write the timeline of a run's last steps.

    Raises:
        NotFound: there is no experiment in the folder.
        OSError: the file cannot be written.
    """
    source, reference = stored_at(Path(arguments.run))
    async with source, telling("reading the run"):
        experiment = await source.experiment(reference)
        made = await _timeline_of(source, experiment, arguments.steps)
    output = Path(arguments.output or f"{experiment.name}-timeline.json")
    await asyncio.to_thread(_write, output, made)
    counts = _counts(made)
    if arguments.json:
        write_json({"file": str(output), **counts})
    else:
        console = new_console()
        told = f"{counts['groups']} groups, {counts['steps']} steps, {counts['publications']} publications"
        console.print(f"timeline   {output}: {told}", markup=False, soft_wrap=True)
        console.print("open it at chrome://tracing, or in Perfetto", markup=False)
        if counts["groups_without_times"]:
            text = f"{counts['groups_without_times']} groups without times: an earlier release sampled them"
            console.print(text, markup=False)
    return ExitCode.DONE


async def _timeline_of(source: StoredExperiments, experiment: ExperimentView, num_steps: int) -> Timeline:
    first = experiment.step - num_steps + 1 if num_steps else 0
    values: dict[str, dict[int, float]] = defaultdict(dict)
    ended_at: dict[int, tuple[float, int]] = {}
    after = None
    while (page := await source.metric_page(experiment, STEP_SERIES + PUBLICATION_SERIES, after=after)).items:
        for point in page.items:
            values[point.name][point.step] = point.value
            if point.name == STEP_SERIES[0] and point.at and point.step >= first:
                ended_at[point.step] = datetime.fromisoformat(point.at).timestamp(), point.version
        after = page.next
    steps = [
        StepTimes(step=step, version=version, ended_at=at, seconds=_parts(values, "time", STEP_PARTS, step))
        for step, (at, version) in ended_at.items()
    ]
    begin = min((each.ended_at - sum(each.seconds.values()) for each in steps), default=0.0)
    publications = [
        PublicationTimes(
            version=each.version,
            phase=each.phase,
            announced_at=each.announced_at,
            ended_at=each.ended_at,
            seconds=_parts(values, "publication", PUBLICATION_PARTS, each.step),
        )
        for each in source.publications(experiment)
        if each.ended_at >= begin
    ]
    events = [each for each in source.events(experiment) if not num_steps or each.at >= begin]
    folder = Path(experiment.directory)
    groups = await asyncio.to_thread(lambda: list(_groups(folder, first, begin if num_steps else 0.0)))
    return timeline_of(groups, steps, publications, events)


def _parts(
    values: Mapping[str, Mapping[int, float]], family: str, parts: tuple[str, ...], step: int
) -> dict[str, float]:
    found = {
        part: values[f"{family}/{part}_seconds"].get(step) for part in parts if f"{family}/{part}_seconds" in values
    }
    return {part: value for part, value in found.items() if value is not None}


def _groups(directory: Path, first: int, begin: float) -> Iterator[GroupTimes]:
    """Read the times of all groups but those that steps before the first trained, and others that ended before it."""
    import_pyarrow_alone()
    from pyarrow import ArrowException, parquet

    for stored in stored_files(directory / SAMPLES):
        if stored.family == "step" and stored.number < first:
            continue
        try:
            with open_samples_file(directory / SAMPLES, stored.name) as file:
                rows = parquet.ParquetFile(file).read(columns=list(Row.__annotations__)).to_pylist()
        except (OSError, ArrowException):
            continue  # it went meanwhile: the folder has a bound
        members: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            members[row["group_id"]].append(row)
        for each in members.values():
            made = _group_of(each)
            last = max(made.issued_at, made.graded_at or 0.0, made.generated_at or 0.0)
            if made.issued_at and (stored.family == "step" or last >= begin):
                yield made


def _group_of(members: Sequence[Row]) -> GroupTimes:
    task, issued_at = members[0], members[0]["issued_at"] or 0.0
    timings = [dict(each["timings"]) for each in members]
    rewards = [each["reward"] for each in members if each["reward"] is not None]

    def longest(name: str) -> float | None:
        return max((each[name] for each in timings if name in each), default=None)

    def at(name: str) -> float | None:
        seconds = longest(name)
        return None if seconds is None else issued_at + seconds

    return GroupTimes(
        group_id=task["group_id"],
        kind=task["kind"],
        step=task["step"],
        version=task["version"],
        issued_at=issued_at,
        generated_at=at("generated_after_seconds"),
        generation_seconds=longest("generation_seconds") or 0.0,
        graded_at=at("graded_after_seconds"),
        grading_seconds=longest("grading_seconds") or 0.0,
        ended=task["ended"],
        reward=fmean(rewards) if rewards else None,
        num_samples=len(members),
        num_tokens=sum(each["num_sampled"] for each in members),
    )


def _counts(made: Timeline) -> dict[str, int]:
    names = [each["name"] for each in made["traceEvents"] if each["ph"] == "X"]
    issued = {
        each["name"] for each in made["traceEvents"] if each["ph"] == "X" and (each["pid"], each["tid"]) == (1, 1)
    }
    flows = {each["name"] for each in made["traceEvents"] if each["ph"] == "s"}
    return {
        "groups": len(issued),
        "groups_without_times": len(issued - flows),
        "steps": sum(name.startswith("step ") for name in names),
        "publications": sum(name.startswith("version ") for name in names),
    }


def _write(output: Path, made: Timeline) -> None:
    fresh = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        with fresh.open("x", encoding="utf-8") as file:
            json.dump(made, file, separators=(",", ":"))
        fresh.replace(output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
