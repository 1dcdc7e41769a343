"""From the reward section of a spec to one verifier that grades by all its components."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import httpx

from flotilla.services.reward.remote import Callbacks, RemoteVerifier
from flotilla.services.reward.verifiers.base import AsksServer, GraderFigures, GraderReports, Verifier, reports_of
from flotilla.services.reward.verifiers.code import CodeVerifier
from flotilla.services.reward.verifiers.comparing import JsonSchemaVerifier, MathVerifier, RegexVerifier
from flotilla.services.reward.verifiers.custom_process import CustomProcessVerifier
from flotilla.services.reward.verifiers.given import (
    AgentVerifier,
    ConstantVerifier,
    EnvironmentVerifier,
    RecordedVerifier,
)
from flotilla.services.reward.verifiers.ifeval import IfevalVerifier
from flotilla.services.reward.verifiers.judge import JudgeVerifier
from flotilla.services.reward.verifiers.matching import ChoiceVerifier, ExactVerifier, FormatVerifier, NumericVerifier
from flotilla.services.reward.verifiers.reward_model import RewardModelVerifier
from flotilla.services.reward.verifiers.verl import CODE_CASES, VerlDefaultVerifier
from flotilla.shared.config.sections import reward as sections
from flotilla.shared.config.sections.judge import JudgeConfig, JudgeModelConfig, RewardModelConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.models.hub import model_directory
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.schemas.grading import Grade, GradingSample, encodable
from flotilla.shared.schemas.service import Failure
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.streams.mailbox import Mailbox


@dataclass(frozen=True)
class Surroundings:
    """What verifiers need and a spec does not hold.

    Attributes:
        experiment: id of the experiment, sent to remote graders.
        sandbox_url: base URL of a sandbox service; None if the fleet has none.
        sandbox_token: its bearer token.
        grader_networks: private networks that may be called, if a spec sets ``allow_private``.
        secrets: environment variables by name, for ``secret_env``.
        mailbox: where rewards and answers come that are late; None where nothing is graded.
        gateway_url: where graders call back.
        places: where code of a spec may be; None: anywhere.
    """

    experiment: str
    sandbox_url: str | None = None
    sandbox_token: str | None = None
    grader_networks: Sequence[IPNetwork] = LOOPBACK
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    mailbox: Mailbox | None = None
    gateway_url: str | None = None
    places: Places | None = None


def new_client() -> httpx.AsyncClient:
    """Make the client that verifiers use: no redirects, no proxies of the environment."""
    return httpx.AsyncClient(
        follow_redirects=False,
        trust_env=False,
        timeout=None,  # noqa: S113  callers set deadlines
        verify=tls_context(),
    )


def build_component(config: sections.Component, surroundings: Surroundings) -> Verifier:
    """Make the verifier of one component.

    Raises:
        InvalidSpec: a custom file cannot be loaded, a secret is not set, or there is no sandbox to run code.
        ModelError: a hub's reward model is not on this machine.
    """
    if (made := OF_CONFIG_ALONE.get(type(config))) is not None:
        return made(config)
    match config:
        case sections.CustomConfig():
            return CustomProcessVerifier(config, surroundings.places)
        case sections.RecordedRewardConfig():
            return RecordedVerifier(config, surroundings.places)
        case sections.CodeConfig():
            return _code(config, surroundings)
        case sections.VerlDefaultConfig():
            code = _code(sections.CodeConfig(max_cases=CODE_CASES), surroundings) if config.runs_code else None
            return VerlDefaultVerifier(config, MathVerifier(sections.MathConfig()), code)
        case JudgeConfig():
            key = secret_of(config.api_key_env, "api_key_env", surroundings)
            return JudgeVerifier(config, new_client(), key, private=surroundings.grader_networks)
        case RewardModelConfig() | JudgeModelConfig():
            return RewardModelVerifier(config, model_directory(config.model))
        case sections.AgentRewardConfig():
            if surroundings.mailbox is None:
                raise InvalidSpec("a reward component of kind agent needs the data plane of an experiment")
            return AgentVerifier(surroundings.mailbox)
        case sections.RemoteConfig():
            return _remote(config, surroundings)
    raise AssertionError(f"no verifier is made of a {type(config).__name__}")


OF_CONFIG_ALONE: Mapping[type[sections.Component], Callable[[Any], Verifier]] = {
    sections.ExactConfig: ExactVerifier,
    sections.NumericConfig: NumericVerifier,
    sections.MathConfig: MathVerifier,
    sections.RegexConfig: RegexVerifier,
    sections.JsonSchemaConfig: JsonSchemaVerifier,
    sections.ChoiceConfig: ChoiceVerifier,
    sections.FormatConfig: FormatVerifier,
    sections.IfevalConfig: IfevalVerifier,
    sections.ConstantConfig: ConstantVerifier,
    sections.EnvironmentRewardConfig: lambda _: EnvironmentVerifier(),
}


def _remote(config: sections.RemoteConfig, surroundings: Surroundings) -> RemoteVerifier:
    secret = secret_of(config.secret_env, "secret_env", surroundings)
    callbacks = None
    if surroundings.mailbox is not None and surroundings.gateway_url is not None:
        callbacks = Callbacks(surroundings.mailbox, surroundings.gateway_url)
    if config.callback_seconds is not None and callbacks is None:
        raise InvalidSpec("callback_seconds needs a gateway that graders can call")
    client, networks = new_client(), surroundings.grader_networks
    return RemoteVerifier(config, surroundings.experiment, client, secret, callbacks=callbacks, private=networks)


def _code(config: sections.CodeConfig, surroundings: Surroundings) -> CodeVerifier:
    if surroundings.sandbox_url is None:
        raise InvalidSpec("a reward component that runs code needs a sandbox service, and the fleet has none")
    url, token = surroundings.sandbox_url, surroundings.sandbox_token
    return CodeVerifier(config, new_client(), url, token, experiment=surroundings.experiment)


def secret_of(name: str | None, key: str, surroundings: Surroundings) -> str | None:
    """Read a secret from the environment variable that a field of the spec names; None where it names none.

    Raises:
        InvalidSpec: it is not set.
    """
    if name is None:
        return None
    secret = surroundings.secrets.get(name)
    if not secret:
        raise InvalidSpec(f"the environment variable {name!r} ({key}) is not set for this service")
    return secret


def build_verifier(config: sections.RewardConfig, surroundings: Surroundings) -> "CombinedVerifier":
    """Make the verifier of a whole reward section.

    Raises:
        InvalidSpec: see ``build_component``.
    """
    return CombinedVerifier([(component, build_component(component, surroundings)) for component in config.components])


class CombinedVerifier:
    """Grades by several components; the reward is the weighted sum over those that scored the sample."""

    def __init__(
        self, parts: Sequence[tuple[sections.Component, Verifier]], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._parts = list(parts)
        self._figures = [GraderFigures(config.name or config.kind, now) for config, _ in parts]

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by every component at once."""
        gradings = [
            figures.of_call(_score_routed(config, part, samples))
            for (config, part), figures in zip(self._parts, self._figures, strict=True)
        ]
        if len(gradings) == 1:
            columns = [await gradings[0]]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(grading) for grading in gradings]
            columns = [task.result() for task in tasks]
        configs = [config for config, _ in self._parts]
        return [combine(list(zip(configs, grades, strict=True))) for grades in zip(*columns, strict=True)]

    def reweighed(self, weights: Mapping[int, float]) -> "CombinedVerifier":
        """Make one that grades by the same components, counts with this one, and has other weights, by their numbers.

        It is not to be started or closed.
        """
        other = copy(self)
        other._parts = [
            (config.model_copy(update={"weight": weights.get(number, config.weight)}), part)
            for number, (config, part) in enumerate(self._parts)
        ]
        return other

    @property
    def graders(self) -> GraderReports:
        """What each component did so far, by its name."""
        return reports_of(self._figures)

    @property
    def problem(self) -> Failure | None:
        """A server that a component asks and that does not answer now; None if there is none."""
        problems = [part.problem for _, part in self._parts if isinstance(part, AsksServer)]
        return next((each for each in problems if each is not None), None)

    async def start(self) -> None:
        """Start what is to be ready before the first sample.

        Raises:
            InvalidSpec: a custom function or a reward model cannot be loaded.
            GradingFailed: a process did not start.
        """
        for _, verifier in self._parts:
            if isinstance(verifier, CustomProcessVerifier | RewardModelVerifier | RecordedVerifier):
                await verifier.start()

    async def aclose(self) -> None:
        """Release what the components hold, every one even if another fails."""
        async with AsyncExitStack() as stack:
            for _, verifier in self._parts:
                stack.push_async_callback(verifier.aclose)


async def _score_routed(
    config: sections.Component, verifier: Verifier, samples: Sequence[GradingSample]
) -> list[Grade]:
    """Grade the samples whose data source the component is for; abstain from the others."""
    if config.data_sources is None:
        return await verifier.score(samples)
    chosen = [index for index, sample in enumerate(samples) if sample.data_source in config.data_sources]
    grades = [Grade.abstained("the component is for other data sources")] * len(samples)
    for index, grade in zip(chosen, await verifier.score([samples[index] for index in chosen]), strict=True):
        grades[index] = grade
    return grades


def combine(parts: Sequence[tuple[sections.Component, Grade]]) -> Grade:
    """Join one sample's grades.

    Returns:
        An error if any component failed; abstained if all abstained; else scored with ``sum(weight * reward)`` over
        those that scored. ``components`` holds their unweighted rewards by name, nested ones as ``name/inner``;
        metrics are called ``name/metric``. The answer is the first that one of them found.
    """
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    total = 0.0
    reasons = []
    for config, grade in parts:
        name = encodable(config.name or config.kind)
        if grade.status is GradeStatus.ERROR:
            return Grade.error(f"{name}: {grade.reason}")
        if grade.reward is None:
            reasons.append(f"{name}: {grade.reason or 'abstained'}")
            continue
        total += config.weight * grade.reward
        rewards[name] = grade.reward
        rewards |= {f"{name}/{inner}": value for inner, value in grade.components.items()}
        metrics |= {f"{name}/{metric}": value for metric, value in grade.metrics.items()}
    if not rewards:
        return Grade.abstained("; ".join(reasons))
    if not math.isfinite(total):
        return Grade.scored(total)
    answer = next((grade.answer for _, grade in parts if grade.answer is not None), None)
    return Grade.of_checked(total, rewards, metrics, answer)
