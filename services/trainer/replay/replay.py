"""Trains recorded steps again, on the machine where the files are, and compares what comes out with the record."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from flotilla.services.trainer.checkpoint.manager import beginning, restored_from
from flotilla.services.trainer.learning.learner import Learner, StepResult
from flotilla.services.trainer.models.loading import check_device
from flotilla.services.trainer.replay.settings import base_spec, spec_of_step
from flotilla.shared.checkpoints.folders import CHECKPOINTS, OPTIMIZER, complete
from flotilla.shared.checkpoints.lineage import ROOT
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, ModelError
from flotilla.shared.host.cores import usable_cores
from flotilla.shared.models.hub import model_directory
from flotilla.shared.samples.folder import SAMPLES, step_name, stored_files
from flotilla.shared.samples.table import facts_of, to_groups
from flotilla.shared.schemas.sample_kinds import KeptGroup, TrainedTokens

log = logging.getLogger(__name__)

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of the samples of a step without reading them.

    Attributes:
        parent, lineage: names of what was trained before it, and with it.
        is_whole: whether all its groups are kept.
    """

    parent: str
    lineage: str
    is_whole: bool


def start_of(step: int, records: Mapping[int, StepRecord], starts: Mapping[int, str]) -> int:
    """Find the newest start from which a step can be computed again.

    Args:
        step: to be computed.
        records: samples by step.
        starts: lineage by step of every checkpoint there is; 0 is the model that training began with.

    Raises:
        InvalidRequest: there is none; the detail has the reason and the existing steps.
    """
    if step not in records:
        raise InvalidRequest(f"step {step} has no samples: {_possible(records, starts)}", step=step)
    missing = ""
    for start in sorted((each for each in starts if each < step), reverse=True):
        why = _why_not(start, step, records, starts[start])
        if why is None:
            return start
        missing = missing or why
    missing = missing or "there is no checkpoint before it"
    raise InvalidRequest(
        f"step {step} cannot be computed again: {missing}. {_possible(records, starts).capitalize()}", step=step
    )


def _why_not(start: int, step: int, records: Mapping[int, StepRecord], lineage: str) -> str | None:
    for number in range(start + 1, step + 1):
        record = records.get(number)
        if record is None:
            return f"step {number} after the checkpoint of step {start} has no samples"
        if not record.is_whole:
            return f"of step {number} only some groups are kept (samples.groups_per_step)"
        if record.parent != lineage:
            return f"the samples of step {number} continue other weights than those of step {number - 1}"
        lineage = record.lineage
    return None


def _possible(records: Mapping[int, StepRecord], starts: Mapping[int, str]) -> str:
    found = [
        step
        for step in sorted(records)
        if any(start < step and _why_not(start, step, records, starts[start]) is None for start in _near(step, starts))
    ]
    if not found:
        return "no step can be: a step needs its samples, a checkpoint before it and all samples in between"
    runs: list[list[int]] = []
    for step in found:
        if runs and runs[-1][1] == step - 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return f"steps that can be: {', '.join(str(a) if a == b else f'{a} to {b}' for a, b in runs)}"


def _near(step: int, starts: Mapping[int, str]) -> list[int]:
    """The newest starts before a step: one that works further back works through them, too, where they are whole."""
    return sorted((start for start in starts if start < step), reverse=True)[:2]


ROOT_LINEAGE = ROOT
"""Of the model that training began with."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure as it was recorded and as it is now.

    Attributes:
        name: as it is reported; ``grad_norm/N`` is that of the step's Nth update.
        recorded, now: its values.
    """

    name: str
    recorded: float
    now: float

    @property
    def difference(self) -> float:
        """Relative where the recorded value is above 1, else absolute; 0 for two that are no numbers."""
        if self.recorded == self.now or (self.recorded != self.recorded and self.now != self.now):
            return 0.0
        return abs(self.now - self.recorded) / max(1.0, abs(self.recorded))


@dataclass(frozen=True, eq=False)
class Replayed:
    """A step computed again.

    Attributes:
        step, version: which.
        start: the checkpoint's step that it was computed from; 0 for the model that training began with.
        figures: losses, ratios and gradient norms of the step, compared.
        worst_before: greatest difference of any figure in the steps from ``start`` to this one.
        groups: as recorded.
        now: what was found about each trajectory of each group, now.
        spec: that it was trained with.
        model: directory of the tokenizer.
    """

    step: int
    version: int
    start: int
    figures: tuple[Comparison, ...]
    worst_before: float
    groups: tuple[KeptGroup, ...]
    now: tuple[Sequence[TrainedTokens | None], ...]
    spec: ExperimentSpec
    model: Path

    @property
    def is_equal(self) -> bool:
        """Whether every figure is the recorded one, up to 1e-6."""
        return max((each.difference for each in self.figures), default=0.0) <= TOLERANCE


def replay(directory: Path, step: int, *, tell: Callable[[str], None] = lambda _: None) -> Replayed:
    """Compute a step again; blocks, and takes as long as the steps since the checkpoint before it took.

    Args:
        directory: of the experiment.
        step: from 1.
        tell: called with what is being done.

    Raises:
        InvalidRequest: it cannot be; the detail lists the steps that can.
        ModelError: the checkpoint or the model cannot be used.
    """
    folder = directory / SAMPLES
    facts = _facts(folder)
    records = {number: _record_of(each) for number, each in facts.items()}
    checkpoints = {each.step: each for each in complete(directory / CHECKPOINTS)}
    spec = base_spec(directory, step, checkpoints)
    # Without the optimiser's state the steps after it were trained with other moments than they would be now.
    starts = {number: each.state.lineage for number, each in checkpoints.items() if OPTIMIZER in each.state.files}
    model = _model_here(spec)
    if spec.checkpoint.resume_from is None and model is not None:
        starts[0] = ROOT_LINEAGE
    start = start_of(step, records, starts)
    transformers.logging.disable_progress_bar()
    threads = spec.parallelism.threads
    torch.set_num_threads(len(usable_cores()) if threads == "auto" else threads)
    tell(f"loading {'the model' if not start else f'the checkpoint of step {start}'}")
    device = check_device(spec.parallelism.device)
    restored = restored_from(spec, checkpoints[start], device) if start else beginning(spec, device)
    learner, worst = restored.learner, 0.0
    learner.sizes.load(directory)
    for number in range(start + 1, step):
        result, _ = _train(learner, spec_of_step(spec, facts[number]), folder, number)
        compared = _compare(result, facts[number])
        worst = max(worst, *(each.difference for each in compared))
        tell(f"step {number} again: largest difference {max(each.difference for each in compared):.1e}")
        if facts[number + 1]["version"] != facts[number]["version"]:
            learner.keep_version(int(facts[number + 1]["version"]), 0)
    trained_with = spec_of_step(spec, facts[step])
    result, groups = _train(learner, trained_with, folder, step)
    assert result.traced is not None
    traced = result.traced.of_groups([kept.group for kept in groups], lambda _: 0)
    return Replayed(
        step=step,
        version=int(facts[step]["version"]),
        start=start,
        figures=_compare(result, facts[step]),
        worst_before=worst,
        groups=tuple(groups),
        now=tuple(tokens for _, tokens in traced),
        spec=trained_with,
        model=checkpoints[start].path / "model" if start else model or Path(spec.model.path),
    )


def _model_here(spec: ExperimentSpec) -> Path | None:
    """Find the model that training began with; None if it is not on this machine any more."""
    try:
        directory = model_directory(spec.model)
    except ModelError:
        return None
    return directory if directory.is_dir() else None


def _train(learner: Learner, spec: ExperimentSpec, folder: Path, step: int) -> tuple[StepResult, list[KeptGroup]]:
    from pyarrow import parquet

    groups = to_groups(parquet.read_table(folder / step_name(step)))
    learner.follow(spec)
    return learner.train([kept.group for kept in groups], step), groups


def _facts(folder: Path) -> dict[int, Mapping[str, Any]]:
    from pyarrow import ArrowException, parquet

    found: dict[int, Mapping[str, Any]] = {}
    for file in stored_files(folder):
        if file.family == "step":
            try:
                schema = parquet.ParquetFile(folder / file.name)
                facts = facts_of(schema.schema_arrow.metadata)
            except (OSError, ArrowException, ValueError) as error:
                log.warning("samples of a step cannot be read", extra={"step": file.number, "error": repr(error)})
                continue
            found[file.number] = facts
    return found


def _record_of(facts: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        facts["parent"], facts["lineage"], facts.get("num_kept", facts["num_groups"]) == facts["num_groups"]
    )


def _compare(result: StepResult, facts: Mapping[str, Any]) -> tuple[Comparison, ...]:
    names = [name for name in facts["metrics"] if name in result.metrics]
    figures = [Comparison(name, float(facts["metrics"][name]), float(result.metrics[name])) for name in names]
    norms = [update.grad_norm for update in result.updates]
    for number, (recorded, now) in enumerate(zip(facts["grad_norms"], norms, strict=True), start=1):
        figures.append(Comparison(f"grad_norm/{number}", float(recorded), now))
    return tuple(figures)
