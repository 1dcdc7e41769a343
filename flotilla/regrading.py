"""A run's recorded samples under another grader: which rewards, filters and advantages would be others.

Files of samples are graded one after the other, so memory holds one step. What a file came to is appended to JSON lines
with a last line that names the file: a run that was interrupted continues with the next file.
"""

import asyncio
import heapq
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from flotilla.receipts import graders_of
from flotilla.services.reward.regrading import Regraded, graded_reward, lost_mask, names_of, regrade
from flotilla.services.reward.verifiers.base import Verifier
from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.services.trainer.replay.regraded import (
    NewlyGraded,
    compares_groups_alone,
    regraded_advantages,
    why_not_computed,
    why_not_trained,
)
from flotilla.services.trainer.replay.settings import changes_in, spec_of_step
from flotilla.shared.config.load.live import with_applied
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.files.beneath import open_beneath, read_beneath
from flotilla.shared.samples.folder import SAMPLES, SPEC_FILE, StoredFile, open_samples_file, stored_files
from flotilla.shared.samples.table import facts_of, to_groups
from flotilla.shared.schemas.live_changes import LiveChange, held_at
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleKind

FOLDER = "regraded"
"""Within an experiment's directory: what graders of later made of its samples."""
GROUPS_AT_A_TIME = 32
EXAMPLES = 5
LONGEST_EXAMPLE = 200
TOLERANCE = 1e-6
"""Difference of two advantages that is none."""
NOT_DECIDED = frozenset({SampleKind.EVALUATION, SampleKind.DROPPED})
"""Outcomes independent of grades: held-out answers, and what the trainer dropped for its age."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be graded.

    Attributes:
        directory: of the experiment.
        was: the spec that the samples were graded under.
        spec: the same with the new reward section.
        output: the JSON lines.
        files: of samples, evaluations and other ends first by their version, then by step.
        header: first line of the output: the section, and what its graders are by content.
        changes: of the spec while the experiment ran, as far as its newest step knew them.
    """

    directory: Path
    was: ExperimentSpec
    spec: ExperimentSpec
    output: Path
    files: tuple[StoredFile, ...]
    header: str
    changes: tuple[LiveChange, ...]

    def spec_of(self, file: StoredFile, facts: Mapping[str, Any]) -> ExperimentSpec:
        """Make the spec of a file's groups: with what had been changed by its step, or by its version."""
        if file.family == "step":
            return spec_of_step(self.spec, facts)
        return with_applied(self.spec, held_at(self.changes, file.number))

    @property
    def why_no_advantages(self) -> str | None:
        """Return why no advantage is computed; None where they are."""
        return why_not_computed(self.spec)


@dataclass(frozen=True, slots=True)
class GroupLine:
    """What became of a group, and what would have: a line of the output.

    Attributes:
        file, group_id, row, kind, label: which.
        step: that trained it; None where no step did.
        skipped: why it could not be graded; then nothing below is known.
        completions: ends of its members' texts.
        rewards_were, rewards: per member, the graders' verdict before shaping; None without one.
        reasons: per member, why the new grader gave none.
        outcome_was, outcome: ``trained``, or how and why it ended.
        trained_rewards: per member, as the trainer would get them; None where it would get none.
        advantages_were, advantages: per member, the mean over its sampled tokens; empty where none was computed.
    """

    file: str
    group_id: int
    row: int
    kind: str
    label: str | None
    step: int | None
    skipped: str | None = None
    completions: Sequence[str] = ()
    rewards_were: Sequence[float | None] = ()
    rewards: Sequence[float | None] = ()
    reasons: Sequence[str | None] = ()
    outcome_was: str = ""
    outcome: str = ""
    trained_rewards: Sequence[float | None] | None = None
    advantages_were: Sequence[float | None] = ()
    advantages: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """A sample whose reward would be another."""

    file: str
    group_id: int
    member: int
    before: float | None
    after: float | None
    why: str | None
    completion: str
    label: str | None


@dataclass
class Flips:
    """What would be other: counts, and the most telling examples.

    Attributes:
        counts: by name.
        outcomes: groups by ``(before, after)`` where the two differ.
        first_step: the first step with anything other, if any.
    """

    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    first_step: int | None = None
    _examples: list[tuple[float, int, Example]] = field(default_factory=list)

    def add(self, line: GroupLine) -> None:
        """Count one group's line."""
        moved = {"groups": 1, "groups_without_masks": int(line.skipped is not None)}
        rewards = list(zip(line.rewards_were, line.rewards, strict=True))
        flipped = [number for number, (was, now) in enumerate(rewards) if was != now]
        is_other = line.outcome_was != line.outcome
        pairs = [
            (was, now)
            for was, now in zip(line.advantages_were, line.advantages, strict=bool(line.advantages))
            if was is not None and now is not None
        ]
        other = [(was, now) for was, now in pairs if abs(was - now) > TOLERANCE]
        moved |= {
            "samples": len(rewards),
            "rewards": len(flipped),
            "higher": sum(_is_higher(*rewards[number]) for number in flipped),
            "filters": int(is_other),
            "advantages_compared": len(pairs),
            "advantages": len(other),
            "signs": sum(was * now < 0 for was, now in other),
        }
        self.counts.update(moved)
        if is_other:
            self.outcomes[line.outcome_was, line.outcome] += 1
        if line.step is not None and (flipped or is_other or other):
            self.first_step = line.step if self.first_step is None else min(line.step, self.first_step)
        for number in flipped[:1]:
            self._keep(line, number)

    def _keep(self, line: GroupLine, member: int) -> None:
        was, now = line.rewards_were[member], line.rewards[member]
        size = math.inf if was is None or now is None else abs(was - now)
        example = Example(
            file=line.file,
            group_id=line.group_id,
            member=member,
            before=was,
            after=now,
            why=line.reasons[member],
            completion=line.completions[member],
            label=line.label,
        )
        # The number distinguishes two of one size: examples have no order.
        entry = (size, -self.counts.total(), example)
        if len(self._examples) < EXAMPLES:
            heapq.heappush(self._examples, entry)
        else:
            heapq.heappushpop(self._examples, entry)

    @property
    def examples(self) -> list[Example]:
        """Samples whose reward would be another, the largest difference first."""
        return [example for _, _, example in sorted(self._examples, key=lambda each: (-each[0], -each[1]))]

    def document(self) -> dict[str, Any]:
        """Write it as JSON has it."""
        return {
            "counts": dict(self.counts),
            "outcomes": [{"before": was, "after": now, "groups": n} for (was, now), n in self.outcomes.most_common()],
            "first_step": self.first_step,
            "examples": [asdict(each) for each in self.examples],
        }


@dataclass(frozen=True, slots=True)
class FileEnd:
    """The line after those of a file of samples."""

    done: str
    modified_ns: int


_LINE = TypeAdapter[GroupLine | FileEnd](GroupLine | FileEnd)


def _is_higher(was: float | None, now: float | None) -> bool:
    return now is not None and (was is None or now > was)


def plan(directory: Path, reward: Mapping[str, Any], output: Path | None = None) -> Plan:
    """Find the samples and make the spec that they are to be graded under; blocks.

    Args:
        directory: of the experiment.
        reward: the new section; its paths are absolute.
        output: the JSON lines; None: below the experiment, by the section's digest.

    Raises:
        InvalidRequest: there are no samples, or no spec beside them, or the run has no rewards.
        InvalidSpec: the section does not go with the rest of the spec.
    """
    try:
        with read_beneath(directory, f"{SAMPLES}/{SPEC_FILE}") as source:
            was = validate_spec(json.load(source))
    except FileNotFoundError:
        why = f"{directory} has no {SAMPLES}/{SPEC_FILE}: its trainer has written no samples"
        raise InvalidRequest(why) from None
    if was.finished_job is not None:
        raise InvalidRequest(f"{directory} is a job of kind {was.job.kind}, which has no rewards")
    spec = validate_spec(was.model_dump(mode="json") | {"reward": dict(reward)})
    files = sorted(stored_files(directory / SAMPLES), key=lambda each: (each.family, each.number, each.name))
    if not files:
        raise InvalidRequest(f"{directory / SAMPLES} has no samples any more")
    made_by = {"version": metadata.version("flotilla"), "graders": graders_of(spec)}
    header = json.dumps({"flotilla": "regraded", **made_by, "reward": spec.reward.model_dump(mode="json")}) + "\n"
    if output is None:
        output = directory / FOLDER / f"{sha256(header.encode()).hexdigest()[:12]}.jsonl"
    changes = changes_in(_facts(directory, files[-1])) if files[-1].family == "step" else ()
    return Plan(directory, was, spec, output, tuple(files), header, changes)


def secrets_asked_for(spec: ExperimentSpec) -> frozenset[str]:
    """Name the environment variables that a spec's graders read, and whose values their servers could come to know."""
    names = {getattr(each, key, None) for each in spec.reward.components for key in ("secret_env", "api_key_env")}
    return frozenset(name for name in names if name)


async def regrade_run(
    planned: Plan, tell: Callable[[int, int], None] = lambda _, __: None, secrets: Mapping[str, str] | None = None
) -> Flips:
    """Grade every recorded group again, or what an earlier call left, and count what would be other.

    Args:
        planned: what.
        tell: called with the number of finished files, and of all.
        secrets: environment variables that graders may read, by name: the section may be of someone else.

    Raises:
        InvalidSpec: a grader cannot be loaded, or names another environment variable.
        InvalidRequest: the output holds what another grader made.
        OSError: the output cannot be written.
    """
    planned.output.parent.mkdir(parents=True, exist_ok=True)
    flips, done, end = await asyncio.to_thread(_resume, planned)
    verifier = build_verifier(planned.spec.reward, Surroundings(planned.directory.name, secrets=secrets or {}))
    try:
        await verifier.start()
        with os.fdopen(_open_output(planned, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8") as target:
            target.seek(end)
            target.truncate()
            if not end:
                target.write(planned.header)
            for number, file in enumerate(planned.files):
                tell(number, len(planned.files))
                if file.name in done:
                    continue
                for line in await _grade_file(planned, file, verifier):
                    flips.add(line)
                    target.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")
                target.write(json.dumps(asdict(FileEnd(file.name, file.modified_ns))) + "\n")
                target.flush()
            tell(len(planned.files), len(planned.files))
    finally:
        await verifier.aclose()
    return flips


def _open_output(planned: Plan, flags: int) -> int:
    """Open the output; below the experiment's folder, which may be of someone else, no link is followed to it."""
    if planned.output.parent == planned.directory / FOLDER:
        return open_beneath(planned.directory, f"{FOLDER}/{planned.output.name}", flags, 0o644)
    return os.open(planned.output, flags | os.O_CLOEXEC, 0o644)


def _resume(planned: Plan) -> tuple[Flips, set[str], int]:
    """Count what an output has of whole files, and where they end: bytes.

    Nothing where there is none, or where a file was written again since, as of a step that was trained again.
    """
    nothing = Flips(), set[str](), 0
    try:
        source = os.fdopen(_open_output(planned, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return nothing
    now = {file.name: file.modified_ns for file in planned.files}
    flips, done, end, read = Flips(), set[str](), 0, 0
    waiting: list[GroupLine] = []
    with source:
        for text in source:
            read += len(text)
            if end == 0:
                if text.decode("utf-8", "replace") != planned.header:
                    raise InvalidRequest(
                        f"{planned.output} holds what another grader made, or this one as it was: name another file"
                    )
                end = read
                continue
            try:
                line = _LINE.validate_json(text)
            except ValueError:
                break  # It was cut.
            if isinstance(line, GroupLine):
                waiting.append(line)
                continue
            if now.get(line.done, line.modified_ns) != line.modified_ns:
                return nothing
            try:
                for each in waiting:
                    flips.add(each)
            except (ValueError, IndexError):  # Lists of other lengths than a group's: not written here.
                return nothing
            waiting.clear()
            done.add(line.done)
            end = read
    return flips, done, end


async def _grade_file(planned: Plan, file: StoredFile, verifier: Verifier) -> list[GroupLine]:
    groups, facts = await asyncio.to_thread(_read_samples, planned.directory, file)
    graders, room = names_of(planned.was.reward), asyncio.Semaphore(GROUPS_AT_A_TIME)

    async def of(kept: KeptGroup) -> Regraded | None:
        if lost_mask(kept.group, planned.was.reward):
            return None
        async with room:
            return await regrade(kept, verifier, planned.spec.reward, graders)

    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(of(kept)) for kept in groups]
    pairs = list(zip(groups, (task.result() for task in found), strict=True))
    return await asyncio.to_thread(_lines, planned.spec_of(file, facts), file, pairs)


def _facts(directory: Path, file: StoredFile) -> dict[str, Any]:
    from pyarrow import ArrowException, parquet

    try:
        with open_samples_file(directory / SAMPLES, file.name) as source:
            return facts_of(parquet.read_schema(source).metadata)
    except FileNotFoundError:
        return {}  # Removed meanwhile, to keep to the bounds of samples.
    except (OSError, ArrowException, ValueError) as error:
        raise InvalidRequest(f"{file.name} cannot be read: {error}") from error


def _read_samples(directory: Path, file: StoredFile) -> tuple[list[KeptGroup], dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        with open_samples_file(directory / SAMPLES, file.name) as source:
            table = parquet.read_table(source)
            return to_groups(table), facts_of(table.schema.metadata)
    except FileNotFoundError:
        return [], {}
    except (OSError, ArrowException, ValueError) as error:
        raise InvalidRequest(f"{file.name} cannot be read: {error}") from error


def _lines(
    spec: ExperimentSpec, file: StoredFile, pairs: Sequence[tuple[KeptGroup, Regraded | None]]
) -> list[GroupLine]:
    outcomes = [_outcome(spec, kept, regraded) for kept, regraded in pairs]
    advantages = _advantages(spec, file, pairs, outcomes)
    return [
        _line(file, kept, regraded, outcome, found)
        for (kept, regraded), outcome, found in zip(pairs, outcomes, advantages, strict=True)
    ]


def _outcome(spec: ExperimentSpec, kept: KeptGroup, regraded: Regraded | None) -> str:
    """Name what becomes of a group under the new grader, as ``_outcome_was`` names what became of it."""
    if regraded is None or regraded.decision is None:
        return _outcome_was(kept)
    decision = regraded.decision
    if decision.trained is None:
        return f"{decision.resolution}: {decision.reason}"
    if (refused := why_not_trained(spec, decision.trained)) is not None:
        return f"{refused[0]}: {refused[1]}"
    return _outcome_was(kept) if kept.kind in NOT_DECIDED else SampleKind.TRAINED.value


def _outcome_was(kept: KeptGroup) -> str:
    return kept.kind.value if kept.reason is None else f"{kept.kind.value}: {kept.reason}"


def _advantages(
    spec: ExperimentSpec,
    file: StoredFile,
    pairs: Sequence[tuple[KeptGroup, Regraded | None]],
    outcomes: Sequence[str],
) -> list[list[npt.NDArray[np.float32] | None]]:
    """Compute the advantages of what would be trained: of a step together, of what was filtered each by itself.

    A group that was not trained has none where an estimator compares it with the rest of its step: nobody knows in
    which step it would have been.
    """
    found: list[list[npt.NDArray[np.float32] | None]] = [[] for _ in pairs]
    if why_not_computed(spec) is not None:
        return found
    chosen = {
        place: NewlyGraded(kept, regraded.decision.trained)
        for place, (kept, regraded) in enumerate(pairs)
        if outcomes[place] == SampleKind.TRAINED.value
        and regraded is not None
        and regraded.decision is not None
        and regraded.decision.trained is not None
    }
    if file.family == "step":
        batches = [list(chosen)] if chosen else []
    else:
        batches = [[place] for place in chosen] if compares_groups_alone(spec) else []
    for places in batches:
        of_batch = regraded_advantages(spec, [chosen[place] for place in places])
        for place, members in zip(places, of_batch, strict=True):
            found[place] = members
    return found


def _line(
    file: StoredFile,
    kept: KeptGroup,
    regraded: Regraded | None,
    outcome: str,
    advantages: Sequence[npt.NDArray[np.float32] | None],
) -> GroupLine:
    was, task = kept.group.trajectories, kept.group.task
    line = GroupLine(
        file=file.name,
        group_id=task.group_id,
        row=task.row,
        kind=kept.kind.value,
        label=None if task.label is None else task.label[:LONGEST_EXAMPLE],
        step=file.number if file.family == "step" else None,
        skipped=None if regraded is not None else "sample_mask left out which tokens of a member were sampled",
    )
    if regraded is None:
        return line
    trained = None if regraded.decision is None else regraded.decision.trained
    tokens = list(kept.tokens) or [None] * len(was)
    return replace(
        line,
        completions=[each.text[-LONGEST_EXAMPLE:] for each in was],
        rewards_were=[graded_reward(each) for each in was],
        rewards=[each.reward for each in regraded.graded.trajectories],
        reasons=[each.reason for each in regraded.graded.trajectories],
        outcome_was=_outcome_was(kept),
        outcome=outcome,
        trained_rewards=None if trained is None else [each.reward for each in trained.trajectories],
        advantages_were=[None if each is None else _mean(each.advantages) for each in tokens],
        advantages=[None if each is None else _mean(each) for each in advantages],
    )


def _mean(values: npt.NDArray[np.float32]) -> float | None:
    is_there = ~np.isnan(values)
    return float(values[is_there].astype(np.float64).mean()) if is_there.any() else None
