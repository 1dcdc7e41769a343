"""From a run's timestamps to what its parts cost. Pure.

Times of engines and trainer are fitted as a constant and a part for each token, then scaled until the simulation of the
run as it was takes as long for a group and for a step as the run did: what shares the cores slows the others down, and
only the simulation knows when.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Final

import numpy as np
import numpy.typing as npt

from flotilla.planning.fleet import Costs, Setup, Simulated, Work
from flotilla.planning.recorded import RecordedGroup, RecordedRun
from flotilla.planning.simulation import Simulation
from flotilla.services.reward.state import groups_at_a_time
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest

DRAWN: Final = 512
"""Groups that a simulation goes through before it begins again."""
STEPS: Final = 40
WARMUP: Final = 8
ROUNDS: Final = 8
CLOSE: Final = 0.02
ROW_SHARE: Final = 0.2
"""Share of an engine's step that answers take and not the step itself, where the run cannot tell: decoding waits for
weights to be read more than for what is computed with them."""
TOKEN_SHARE: Final = 0.9
"""Likewise, of a step of the trainer."""
STARVED: Final = 0.8
"""Cores below which a computing trainer shares the machine with others: one thread of it computes all the time."""
LEAST: Final = 1e-6
"""Seconds (or tokens) of which costs can be told: times since the epoch are no finer."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Model:
    """A run that can be simulated: costs, and the run as it was, simulated."""

    run: RecordedRun
    costs: Costs
    cores: float
    base: Simulated

    @property
    def bias(self) -> float:
        """Seconds of a measured step for one of a simulated one."""
        return self.run.step_seconds / self.base.step_seconds


@dataclass(frozen=True, slots=True)
class Scales:
    """What groups would be: factors on recorded lengths and on grading times."""

    lengths: float = 1.0
    grading: float = 1.0


def fit(run: RecordedRun, cores: float) -> Model:
    """Find the costs of a run.

    Args:
        run: as recorded.
        cores: of the machine that rollouts and trainer share.

    Raises:
        InvalidRequest: too little was recorded, or it is of a kind that is not simulated.
    """
    _refuse(run)
    _refuse_figures(run)
    work = work_of(run, run.spec, Scales())
    cores = cores_left(run, cores)
    costs = _direct(run, cores)
    setup = setup_of(run.spec, run.rollouts, cores)
    measured = run.measured_steps
    generation = fmean(group.generation_seconds for group in _measured_groups(run))
    compute = fmean(step.compute for step in measured)
    found = _simulated(setup, costs, work)
    for _ in range(ROUNDS):
        by_engine, by_trainer = generation / found.generation, compute / found.compute
        by_cores = 1.0
        if run.engine_cores and found.engine_cores:
            by_cores = run.engine_cores / found.engine_cores
        if max(abs(each - 1) for each in (by_engine, by_trainer, by_cores)) < CLOSE:
            break
        costs = replace(
            costs,
            tick=costs.tick * by_engine**0.8,
            row=costs.row * by_engine**0.8,
            update=costs.update * by_trainer**0.9,
            token=costs.token * by_trainer**0.9,
            engine_cores=min(cores, costs.engine_cores * by_cores),
            trainer_cores=_trainer_cores(run, costs, found, cores),
        )
        found = _simulated(setup, costs, work)
    return Model(run, costs, cores, found)


def cores_left(run: RecordedRun, cores: float) -> float:
    """Return how many of a machine's cores there are for rollouts and trainer.

    Where others take so much that the trainer has less than a core while it computes, what it and the engines got is
    all that there is: what one of them leaves goes to the other.
    """
    if not run.trainer_cores or run.trainer_cores >= STARVED or not run.engine_cores:
        return cores
    return min(cores, run.trainer_cores + run.rollouts * run.engine_cores)


def _trainer_cores(run: RecordedRun, costs: Costs, found: Simulated, cores: float) -> float:
    """Return how many cores the trainer would take, given how many it got and that it was slowed as it is simulated."""
    if not run.trainer_cores or not found.compute:
        return costs.trainer_cores
    tokens = fmean(sum(group.totals) for group in _measured_groups(run)) * run.spec.groups_per_step
    speed = min(1.0, (costs.update + costs.token * tokens) / found.compute)
    return min(cores, run.trainer_cores / speed)


def _simulated(setup: Setup, costs: Costs, work: Sequence[Work]) -> Simulated:
    return Simulation(setup, costs, work).run(WARMUP + STEPS, WARMUP)


def _refuse(run: RecordedRun) -> None:
    spec = run.spec
    if len(run.steps) < 2:
        raise InvalidRequest(f"the run has {len(run.steps)} recorded steps: two in a row are needed")
    if not _measured_groups(run):
        raise InvalidRequest("the run has no samples with times: `samples` of its spec keeps them")
    if spec.asynchrony.redundant_groups:
        raise InvalidRequest("asynchrony.redundant_groups is not simulated: what is ended depends on single answers")
    if spec.rollout.agents is not None or spec.shares_devices:
        raise InvalidRequest("runs of agents, and those that share or lend devices by time, are not simulated")


def _refuse_figures(run: RecordedRun) -> None:
    """Refuse what costs cannot be fitted to, and what is divided by."""
    steps, groups = run.measured_steps, _measured_groups(run)
    figures = {
        "its steps end at one time, or one before the other": run.step_seconds,
        "its steps took no time to compute": fmean(step.compute for step in steps),
        "its steps trained no tokens": fmean(step.tokens for step in steps),
        "its groups took no time to sample": max(each.generation_seconds for each in groups),
        "none of its groups was trained": sum(each.kind == "trained" for each in groups),
    }
    for problem, value in figures.items():
        if not value > LEAST:
            raise InvalidRequest(f"the run's records do not go together: {problem}")


def setup_of(spec: ExperimentSpec, rollouts: int, cores: float) -> Setup:
    """Read the settings that a simulation needs."""
    asynchrony = spec.asynchrony
    return Setup(
        rollouts=rollouts,
        slots=spec.rollout.engine.slots,
        groups_per_step=spec.groups_per_step,
        steps_per_version=asynchrony.trigger_parameter_sync_step,
        budget=spec.admission_budget,
        cores=cores,
        graders=groups_at_a_time(spec.reward) * spec.resources.rewards.min,
        max_lag=asynchrony.resolved_max_lag,
        paces=asynchrony.on_max_lag == "pace",
        drains=asynchrony.on_weight_update == "drain",
    )


def work_of(run: RecordedRun, spec: ExperimentSpec, scales: Scales) -> list[Work]:
    """Draw groups of the run, in the shares in which they were trained and filtered, as another spec has them.

    The same draw for each spec, so that two simulations differ by what was changed alone. Answers of a larger group are
    drawn from those of the recorded one.
    """
    draw = random.Random(0)
    groups = _measured_groups(run)
    trained = [each for each in groups if each.kind == "trained"]
    filtered = [each for each in groups if each.kind == "filtered"] or trained
    made = []
    for number in range(DRAWN):
        is_kept = draw.random() >= run.filtered_share
        group = draw.choice(trained if is_kept else filtered)
        made.append(_work(group, spec, scales, random.Random(number), is_kept=is_kept))
    return made


def _work(group: RecordedGroup, spec: ExperimentSpec, scales: Scales, draw: random.Random, *, is_kept: bool) -> Work:
    size, members = spec.rollout.group_size, list(range(len(group.lengths)))
    if size < len(members):
        chosen = sorted(draw.sample(members, size))
    else:
        chosen = members + draw.choices(members, k=size - len(members))
    if size != len(members) and spec.reward.filter_zero_spread:
        rewards = {group.rewards[each] for each in chosen}
        is_kept = len(rewards) > 1
    most = spec.rollout.sampling.max_new_tokens
    lengths = tuple(min(most, max(1, round(group.lengths[each] * scales.lengths))) for each in chosen)
    prompts = sum(group.totals[each] - group.lengths[each] for each in chosen)
    return Work(lengths, group.grading_seconds * scales.grading, prompts + sum(lengths), is_kept)


def _measured_groups(run: RecordedRun) -> list[RecordedGroup]:
    if len(run.steps) < 2:
        return list(run.groups)
    begin = run.steps[len(run.steps) - len(run.measured_steps) - 1].ended_at
    return [each for each in run.groups if each.graded_at >= begin] or list(run.groups)


def _direct(run: RecordedRun, cores: float) -> Costs:
    """Read what single timestamps tell, as if nothing shared the cores."""
    steps, groups = run.measured_steps, _measured_groups(run)
    tick, row = engine_costs(run)
    update, token = line(
        np.array([_tokens_of(run, step.tokens) for step in steps]),
        np.array([step.compute for step in steps]),
        TOKEN_SHARE,
    )
    parts = fmean(step.wait + step.compute + step.publish for step in steps)
    forward = _quantile([each.graded_at - each.generated_at - each.grading_seconds for each in groups], 0.25)
    ready = {id(step): _last_grade(run, step.computed_from) for step in steps if step.wait > 0.01}
    pickups = [step.computed_from - found for step in steps if (found := ready.get(id(step))) is not None]
    return Costs(
        tick=tick,
        row=row,
        update=update,
        token=token,
        claim=max(0.0, _quantile([each.started_at - each.issued_at for each in groups], 0.25)),
        forward=max(0.0, forward),
        pickup=max(0.0, median(pickups)) if pickups else 0.0,
        publish=fmean(step.publish for step in steps),
        publication=run.publication_seconds,
        switch=run.switch_seconds,
        overhead=max(0.0, run.step_seconds - parts),
        engine_cores=_cores_of(run.engine_cores, _engine_threads(run.spec), cores),
        trainer_cores=_cores_of(run.trainer_cores, _trainer_threads(run.spec), cores),
    )


def _cores_of(measured: float | None, threads: float | None, cores: float) -> float:
    if measured:
        return min(cores, measured)
    return cores if threads is None else min(cores, threads)


def _engine_threads(spec: ExperimentSpec) -> float | None:
    engine = spec.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or engine.device.startswith("cuda"):
        return 0.0
    return None if engine.threads == "auto" else engine.threads


def _trainer_threads(spec: ExperimentSpec) -> float | None:
    parallelism = spec.parallelism
    if parallelism.device.startswith("cuda"):
        return 0.0
    return None if parallelism.threads == "auto" else parallelism.threads * parallelism.ranks


def _tokens_of(run: RecordedRun, sampled: float) -> float:
    """Count a step's tokens with those of prompts."""
    groups = _measured_groups(run)
    return sampled * sum(sum(each.totals) for each in groups) / max(1, sum(sum(each.lengths) for each in groups))


def _last_grade(run: RecordedRun, before: float) -> float | None:
    return max(
        (each.graded_at for each in run.groups if each.kind == "trained" and each.graded_at <= before), default=None
    )


def _quantile(values: Sequence[float], share: float) -> float:
    if len(values) < 2:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def engine_costs(run: RecordedRun) -> tuple[float, float]:
    """Fit the seconds of an engine's step: a constant, and a part for each answer that runs."""
    groups = [each for each in run.groups if each.generation_seconds > LEAST and max(each.lengths, default=0)]
    running = _Running(groups, run.rollouts, run.spec.rollout.engine.slots)
    measured = [each for each in _measured_groups(run) if each.generation_seconds > LEAST and max(each.lengths)]
    per_token = np.array([each.generation_seconds / max(each.lengths) for each in measured])
    at_once = np.array([running.mean(each.started_at, each.generated_at) for each in measured])
    return line(at_once, per_token, ROW_SHARE)


class _Running:
    """How many answers an engine had at a time, on average over the rollouts."""

    def __init__(self, groups: Sequence[RecordedGroup], rollouts: int, slots: int) -> None:
        changes: list[tuple[float, int]] = []
        for group in groups:
            longest = max(group.lengths)
            for length in group.lengths:
                changes.append((group.started_at, 1))
                changes.append((group.started_at + group.generation_seconds * length / longest, -1))
        changes.sort()
        self._times = np.array([at for at, _ in changes])
        counts = np.cumsum([count for _, count in changes]) / rollouts
        spans = np.diff(self._times, append=self._times[-1])
        self._sums: Floats = np.concatenate([[0.0], np.cumsum(np.minimum(counts, slots) * spans)[:-1]])

    def mean(self, begin: float, end: float) -> float:
        """Return the mean between two times."""
        low, high = np.interp([begin, end], self._times, self._sums)
        return float((high - low) / (end - begin))


def line(x: Floats, y: Floats, usual_share: float) -> tuple[float, float]:
    """Fit ``y = constant + slope * x``, neither below 0.

    The slope is drawn to the one with which ``slope * x`` is the usual share of ``y``, the more the larger its standard
    error is beside half of the largest slope that it can have: points with one x tell nothing of it.
    """
    mean_x, mean_y = float(x.mean()), float(y.mean())
    usual = usual_share * mean_y / mean_x
    spread = float(((x - mean_x) ** 2).sum())
    slope, trust = usual, 0.0
    if spread > 0 and len(x) > 2:
        slope = float(((x - mean_x) * (y - mean_y)).sum()) / spread
        noise = float(((y - mean_y - slope * (x - mean_x)) ** 2).sum()) / (len(x) - 2)
        room = (mean_y / mean_x / 2) ** 2
        trust = room / (room + noise / spread)
        slope = min(max(slope, 0.0), mean_y / mean_x)
    slope = trust * slope + (1 - trust) * usual
    return mean_y - slope * mean_x, slope
