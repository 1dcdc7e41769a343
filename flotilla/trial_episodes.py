"""Plays the first turn of an experiment's environments before it starts: reset, and one step.

They run as in a rollout: those in files of the user's in a process of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.environments.conversation import EnvironmentConversations
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, Scalar
from flotilla.shared.schemas.task import Message, Task

NUM_ROWS = 200
"""Of each set of rows, in which one for an environment is looked for."""
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
