"""Tries out all that a spec names, before anything starts: files, rows, environments, prompts and graders.

Of environments the first turn is played: reset, and one step. They run as in a rollout: those in files of the user's in
a process of their own.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import balance_of
from flotilla.services.gateway.preflight.inspection import Inspection, Rows, entry_of, inspect
from flotilla.services.gateway.preflight.prompts import Prompts, look_at_prompts, why_no_room
from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.environments.conversation import EnvironmentConversations
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig
from flotilla.shared.config.sections.job import KtoConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, Scalar
from flotilla.shared.schemas.task import Message, Task
from flotilla.trial_grades import try_graders

NUM_ROWS = 200
"""Of each set of rows, in which one for an environment is searched for."""
ACTION = "This is a made-up action."
SHOWN_CHARACTERS = 60


@dataclass
class TriedEpisodes:
    """What came of it.

    Attributes:
        errors: path, value and what is wrong.
        lines: what each environment answered, for people.
        prompts: the first prompt of an episode of each, with its first observation.
    """

    errors: list[dict[str, Scalar]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    prompts: list[tuple[Message, ...]] = field(default_factory=list)


async def try_environments(spec: ExperimentSpec, datasets: Mapping[str, Dataset]) -> TriedEpisodes:
    """Reset and step each environment once, with the first row that is for it."""
    tried, episodes = TriedEpisodes(), spec.rollout.episodes
    if not isinstance(episodes, EnvironmentEpisodesConfig):
        return tried
    for number, config in enumerate(episodes.environments):
        path = f"rollout.episodes.environments.{number}"
        task = _first_task(config, datasets)
        if task is None:
            tried.lines.append(f"{path} ({config.environment}): not tried: no row is for its data sources")
            continue
        process = CustomProcess([config]) if config.is_code else None
        alone = episodes.model_copy(update={"environments": (config,)})
        try:
            if process is not None:
                await process.start()
            await _play(EnvironmentConversations(alone, process), task, f"{path} ({config.environment})", tried)
        except FlotillaError as error:
            tried.errors.append({"path": path, "value": config.environment, "allowed": error.detail})
        finally:
            if process is not None:
                await process.aclose()
    return tried


def _first_task(config: EnvironmentConfig, datasets: Mapping[str, Dataset]) -> Task | None:
    tasks = (
        dataset.task(0, group_size=1, row=row)
        for dataset in datasets.values()
        for row in range(min(NUM_ROWS, len(dataset.rows)))
    )
    return next(
        (each for each in tasks if config.data_sources is None or each.data_source in config.data_sources), None
    )


async def _play(conversations: EnvironmentConversations, task: Task, name: str, tried: TriedEpisodes) -> None:
    conversation = conversations(task, 0)
    try:
        begun = await conversation.begin()
        tried.prompts.append(begun.messages)
        reply = await conversation.answer(ACTION, is_cut=False)
    finally:
        await conversation.close()
    over = " and ends the episode" if reply.finish is not None else ""
    tried.lines.append(
        f"{name}: a made-up action is answered by {_shown(reply.messages)} with the reward {reply.reward:g}{over}"
    )


def _shown(messages: Sequence[Message]) -> str:
    text = messages[-1].content if messages else ""
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        rows: per source that could be read.
        prompts: as the model is given them; None where model or data cannot be read.
        lines: what environments and graders answered, for people.
        errors: one entry per thing that is wrong: path, value, what is allowed.
    """

    rows: tuple[Rows, ...]
    prompts: Prompts | None
    lines: tuple[str, ...]
    errors: tuple[dict[str, Scalar], ...]


async def try_out(spec: ExperimentSpec) -> Trial:
    """Open everything, reset and step environments, let graders grade: the spec's code is run, its URLs are called."""
    found = await asyncio.to_thread(inspect, spec)
    if spec.data.dump is not None:
        # Groups of a dump are answered and graded already: no model is asked with them.
        found = replace(found, datasets={name: each for name, each in found.datasets.items() if name != "data"})
    errors = list(found.errors)
    episodes = await try_environments(spec, found.datasets)
    errors += episodes.errors
    prompts = await _prompts(spec, found, episodes, errors)
    lines = list(episodes.lines)
    if isinstance(spec.job, KtoConfig) and "data" in found.datasets:
        lines.append(balance_of(found.datasets["data"], spec.job))
    if spec.samples_answers:
        graded = {name: each for name, each in found.datasets.items() if spec.finished_job is None or name != "data"}
        tried = await try_graders(spec, graded)
        # A file that is not there is said once.
        missing = {entry["path"] for entry in errors}
        errors += [each for each in tried.errors if f"{each['path']}.path" not in missing]
        lines += tried.lines
    return Trial(found.rows, prompts, tuple(lines), tuple(errors))


async def _prompts(
    spec: ExperimentSpec, found: Inspection, episodes: TriedEpisodes, errors: list[dict[str, Scalar]]
) -> Prompts | None:
    if not found.has_model or not found.datasets:
        return None
    try:
        datasets = tuple(found.datasets.values())
        prompts = await asyncio.to_thread(look_at_prompts, spec, datasets, episodes.prompts)
    except FlotillaError as error:
        errors += error.errors or [entry_of("model.path", error)]
        return None
    reason = why_no_room(spec, prompts)
    if reason is not None:
        path = "rollout.engine.context_tokens"
        errors.append({"path": path, "value": spec.rollout.engine.context_tokens, "allowed": reason})
    return prompts
