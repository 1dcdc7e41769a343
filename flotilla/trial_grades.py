"""Lets an experiment's graders grade a few rows before it starts: with a made-up answer, the label, and nothing.

Each component is built as the reward service does it, and asked once: what it fails on here, it fails on in training.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from flotilla.services.gateway.datasets.dataset import Dataset, Part
from flotilla.services.reward.verifiers.base import Verifier
from flotilla.services.reward.verifiers.custom_process import CustomProcessVerifier
from flotilla.services.reward.verifiers.registry import Surroundings, build_component
from flotilla.shared.config.sections.judge import JudgeConfig, RewardModelConfig
from flotilla.shared.config.sections.reward import (
    AgentRewardConfig,
    CodeConfig,
    ComparedConfig,
    Component,
    EnvironmentRewardConfig,
    MatchConfig,
    RemoteConfig,
    VerlDefaultConfig,
)
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import DEFAULT_GATEWAY, GRADER_NETWORKS, LOOPBACK, networks_from
from flotilla.shared.errors import FlotillaError, Scalar
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.grading import Grade, GradingMessage, GradingSample
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.streams.memory.plane import MemoryMailbox

NUM_ROWS = 3
"""Of each source and each held-out set."""
NUM_LABELS = 200
"""Rows of each of them whose labels are tried with components that compare in this process: that takes no time."""
ATTEMPT_SECONDS = 20.0
MADE_UP = "This is a made-up answer. #### 7"
ANSWERS = ("a made-up answer", "the label as answer", "an empty answer")
MOST_ERRORS = 3
"""Of one component: the others mostly repeat it."""
NOT_INSTALLED = "flotilla[reward] installed"
LATER = "answered 202"


@dataclass
class TriedGrades:
    """What came of it.

    Attributes:
        errors: path, value and what is wrong; one entry per kind of failure.
        lines: what each component gave, for people.
    """

    errors: list[dict[str, Scalar]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Trial:
    answer: str
    row: str
    sample: GradingSample


async def try_graders(
    spec: ExperimentSpec,
    datasets: Mapping[str, Dataset],
    *,
    places: Places | None = None,
    environment: Mapping[str, str] = os.environ,
) -> TriedGrades:
    """Build every reward component, and let it grade.

    The code of a custom function is run, and a grader or judge behind a URL is called, each URL of several.

    Args:
        datasets: rows by the section that they are of; without any the components are only built.
        places: where code may be; None: anywhere.
        environment: holds the secrets that components name.
    """
    surroundings = Surroundings(
        experiment="check",
        # A sandbox is found when an experiment starts: here it is enough that one could be named.
        sandbox_url="http://sandbox.invalid",
        secrets=environment,
        mailbox=MemoryMailbox(lambda: 0.0),
        gateway_url=DEFAULT_GATEWAY,
        places=places,
        grader_networks=networks_from(environment, GRADER_NETWORKS, LOOPBACK),
    )
    tried = TriedGrades()
    for number, component in enumerate(spec.reward.components):
        path = f"reward.components.{number}"
        for place, value, each in _one_by_one(component, path):
            try:
                await _try_one(each, place, value, surroundings, datasets, tried)
            except FlotillaError as error:
                tried.errors.append({"path": place, "value": value, "allowed": error.detail})
    return tried


def _one_by_one(component: Component, path: str) -> list[tuple[str, Scalar, Component]]:
    """List what is asked, with its place in the spec: each URL of a grader by itself, and once."""
    if isinstance(component, JudgeConfig):
        once = {"max_attempts": 1, "votes": 1, "attempt_seconds": min(component.attempt_seconds, ATTEMPT_SECONDS)}
        return [(path, component.url, component.model_copy(update=once))]
    if not isinstance(component, RemoteConfig):
        return [(path, getattr(component, "path", None), component)]
    once = {"max_attempts": 1, "attempt_seconds": min(component.attempt_seconds, ATTEMPT_SECONDS)}
    found: list[tuple[str, Scalar, Component]] = []
    for index, (url, _) in enumerate(component.weighted_urls):
        place = f"{path}.urls.{index}" if component.urls else path
        found.append(
            (place, url, component.model_copy(update=once | {"url": url, "urls": (), "callback_seconds": None}))
        )
    return found


async def _try_one(
    component: Component,
    place: str,
    value: Scalar,
    surroundings: Surroundings,
    datasets: Mapping[str, Dataset],
    tried: TriedGrades,
) -> None:
    verifier = build_component(component, surroundings)
    name = f"{place} ({component.name or component.kind})"
    try:
        if isinstance(verifier, CustomProcessVerifier):
            await verifier.start()
        why_not = _why_not(component)
        if why_not is not None:
            tried.lines.append(f"{name}: not tried here: {why_not}")
            return
        trials = [trial for field_, dataset in datasets.items() for trial in _trials(component, field_, dataset)]
        grades = await _graded(verifier, trials)
        if grades:
            _report(name, place, value, list(zip(trials, grades, strict=True)), tried)
    finally:
        await verifier.aclose()


def _why_not(component: Component) -> str | None:
    """Return why a component cannot be tried without a fleet, if so."""
    match component:
        case AgentRewardConfig() | EnvironmentRewardConfig():
            return "its rewards come with an episode"
        case CodeConfig() | VerlDefaultConfig(runs_code=True):
            return "programs run in a fleet's sandbox"
        case RewardModelConfig():
            return "its model is loaded when the experiment starts"
        case _:
            return None


def _trials(component: Component, section: str, dataset: Dataset) -> list[_Trial]:
    trials: list[_Trial | None] = []
    for part in dataset.parts or (Part(0, len(dataset.rows)),):
        rows = range(part.start, part.start + min(NUM_LABELS, part.num_rows))
        tasks = [dataset.task(0, group_size=1, row=row) for row in rows]
        chosen = component.data_sources
        tasks = [task for task in tasks if chosen is None or task.data_source in chosen]
        trials += [_trial(task, section, answer) for task in tasks[:NUM_ROWS] for answer in ANSWERS]
        if isinstance(component, MatchConfig) and not isinstance(component, ComparedConfig):
            # Labels further on may be of another kind.
            trials += [_trial(task, section, ANSWERS[2]) for task in tasks[NUM_ROWS:]]
    return [each for each in trials if each is not None]


def _trial(task: Task, section: str, answer: str) -> _Trial | None:
    response = {ANSWERS[0]: MADE_UP, ANSWERS[1]: task.label, ANSWERS[2]: ""}[answer]
    if response is None:
        return None
    sample = GradingSample(
        id=f"{section}/{task.row}/{ANSWERS.index(answer)}",
        prompt="\n\n".join(message.content for message in task.messages),
        messages=tuple(GradingMessage(role=each.role, content=each.content) for each in task.messages),
        response=response,
        label=task.label,
        data_source=task.data_source,
        metadata=dict(task.metadata),
        finish_reason="stop",
    )
    return _Trial(answer, f"row {task.row} of {section}", sample)


async def _graded(verifier: Verifier, trials: Sequence[_Trial]) -> list[Grade]:
    return await verifier.score([each.sample for each in trials]) if trials else []


def _report(name: str, place: str, value: Scalar, graded: Sequence[tuple[_Trial, Grade]], tried: TriedGrades) -> None:
    failed = [(trial, grade.reason or "") for trial, grade in graded if grade.status is GradeStatus.ERROR]
    if failed and all(NOT_INSTALLED in reason for _, reason in failed):
        tried.lines.append(f"{name}: not tried here: {failed[0][1]}")
        return
    if failed and all(LATER in reason for _, reason in failed):
        tried.lines.append(f"{name}: it answers later (202): its rewards were not seen")
        return
    reasons: dict[str, _Trial] = {}
    for trial, reason in failed:
        reasons.setdefault(reason, trial)
    for reason, trial in list(reasons.items())[:MOST_ERRORS]:
        is_everywhere = len(failed) == len(graded) and len(reasons) == 1
        where = f"{value}: " if "://" in str(value) else ""
        where += "" if is_everywhere else f"{trial.row}, {trial.answer}: "
        tried.errors.append({"path": place, "value": value, "allowed": f"{where}{reason}"})
    shown = [f"{answer} {_mean([grade for trial, grade in graded if trial.answer == answer])}" for answer in ANSWERS]
    num_rows = len({trial.row for trial, _ in graded})
    tried.lines.append(f"{name}: rewards on {num_rows} rows: {', '.join(shown)}")


def _mean(grades: Sequence[Grade]) -> str:
    if not grades:
        return "- (no label)"
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    if rewards:
        mean = fmean(rewards)
        return f"{mean:g}" if math.isfinite(mean) else "-"
    return "failed" if any(grade.status is GradeStatus.ERROR for grade in grades) else "abstained"
