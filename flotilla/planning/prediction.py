"""What a run would do with other settings: its measured figures, times what the simulation says of the change. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flotilla.planning.fitting import STEPS, WARMUP, Model, Scales, fit, setup_of, work_of
from flotilla.planning.fleet import Simulated
from flotilla.planning.recorded import RecordedRun
from flotilla.planning.simulation import Simulation
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What would be other; None: as it was.

    Attributes:
        staleness: ``asynchrony.staleness_threshold``.
        groups: ``optimisation.groups_per_mini_batch``.
        steps_per_version: ``asynchrony.trigger_parameter_sync_step``.
        lengths: factor on the answers' recorded lengths.
        max_new_tokens: answers are cut there.
        grading: factor on the time that grading a group takes.
        cores: that rollouts and trainer share.
    """

    rollouts: int | None = None
    staleness: float | None = None
    group_size: int | None = None
    groups: int | None = None
    steps_per_version: int | None = None
    slots: int | None = None
    lengths: float = 1.0
    max_new_tokens: int | None = None
    grading: float = 1.0
    cores: float | None = None

    def spec_of(self, spec: ExperimentSpec) -> ExperimentSpec:
        """Make the spec with what is changed.

        Raises:
            InvalidSpec: it does not go together.
        """
        document = spec.model_dump(mode="json")
        sections: Mapping[str, Mapping[str, Any]] = {
            "asynchrony": {
                "staleness_threshold": self.staleness,
                "trigger_parameter_sync_step": self.steps_per_version,
            },
            "optimisation": {"groups_per_mini_batch": self.groups},
            "rollout": {"group_size": self.group_size},
        }
        for name, values in sections.items():
            document[name] |= {key: value for key, value in values.items() if value is not None}
        if self.slots is not None:
            document["rollout"]["engine"]["slots"] = self.slots
        if self.max_new_tokens is not None:
            document["rollout"]["sampling"]["max_new_tokens"] = self.max_new_tokens
        if self.staleness is not None and bool(self.staleness) != bool(spec.asynchrony.staleness_threshold):
            # What follows from it where it is left out, and is refused beside the other.
            for key in ("on_weight_update", "max_lag", "on_max_lag"):
                document["asynchrony"].pop(key)
        return validate_spec(document)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is told of a run.

    Attributes:
        lag: mean of a trained token, in versions.
        waits: share of the trainer's time without its groups.
        rollouts_idle: share of the rollouts' time without a group; None where it was not measured.
        binds: what bounds the speed; None where it was not seen.
    """

    step_seconds: float
    tokens_per_second: float
    lag: float
    waits: float
    rollouts_idle: float | None
    binds: str | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run and what it would be.

    Attributes:
        measured: as the run recorded it.
        simulated: the same run, simulated.
        predicted: with the change: what was measured, times the ratio of the simulations.
        cause, advice: of what would bind.
    """

    measured: Figures
    simulated: Figures
    predicted: Figures
    cause: str
    advice: str

    def document(self) -> dict[str, Any]:
        """Write it as JSON has it."""
        return asdict(self)


def predict(run: RecordedRun, change: Change, cores: float) -> Prediction:
    """Return what a run would do with other settings.

    Args:
        run: as recorded.
        change: of its settings.
        cores: that its rollouts and trainer shared.

    Raises:
        InvalidRequest: see ``fit``.
        InvalidSpec: the change does not go with the rest of the spec.
        ValueError: nothing would move.
    """
    return predict_from(fit(run, cores), change)


def predict_from(model: Model, change: Change) -> Prediction:
    """Return what a run would do whose costs are known; see ``predict``."""
    run, spec = model.run, change.spec_of(model.run.spec)
    work = work_of(run, spec, Scales(change.lengths, change.grading))
    cores = model.cores if change.cores is None else change.cores
    setup = setup_of(spec, change.rollouts or run.rollouts, cores)
    found = Simulation(setup, model.costs, work).run(WARMUP + STEPS, WARMUP)
    measured = run.measured_steps
    waited = sum(each.wait for each in measured) / (run.step_seconds * len(measured))
    return Prediction(
        measured=Figures(run.step_seconds, run.tokens_per_second, run.lag, min(1.0, waited), None, None),
        simulated=_figures(model.base),
        predicted=_figures(
            found,
            found.step_seconds * model.bias,
            run.tokens_per_second * found.tokens_per_second / model.base.tokens_per_second,
        ),
        cause=found.binds.cause,
        advice=found.binds.advice,
    )


def _figures(found: Simulated, step_seconds: float | None = None, tokens_per_second: float | None = None) -> Figures:
    return Figures(
        step_seconds=step_seconds or found.step_seconds,
        tokens_per_second=tokens_per_second or found.tokens_per_second,
        lag=found.lag,
        waits=found.wait / found.step_seconds,
        rollouts_idle=found.rollouts_idle,
        binds=found.binds.component,
    )
