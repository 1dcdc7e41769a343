"""From a spec to what answers its tasks."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.engines.base import Engine
from flotilla.services.rollout.environments.conversation import EnvironmentConversations
from flotilla.services.rollout.episodes.base import Episodes
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.rendering import ChatRenderer, TurnRenderer
from flotilla.services.rollout.episodes.resumption import resume_rule
from flotilla.services.rollout.episodes.single_turn import SingleTurnEpisodes
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.tools.code_interpreter import Sandboxes
from flotilla.services.rollout.tools.conversation import ToolConversations
from flotilla.services.rollout.tools.formats import role_of_results
from flotilla.services.rollout.tools.opening import open_tools
from flotilla.shared.config.sections.episodes import EnvironmentEpisodesConfig, SingleTurnConfig, ToolEpisodesConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.schemas.task import Message


@dataclass(frozen=True)
class OpenedEpisodes:
    """Episodes, and what ends what they hold."""

    episodes: Episodes
    close: Callable[[], Awaitable[None]]


async def open_episodes(
    spec: ExperimentSpec,
    engine: Engine,
    renderer: ChatRenderer,
    turns: Turns,
    tally: SamplingTally,
    networks: Sequence[IPNetwork] = LOOPBACK,
    sandboxes: Sandboxes | None = None,
) -> OpenedEpisodes:
    """Open the episodes of an experiment; ``networks`` are not public and may have tools, in ``sandboxes`` code runs.

    Raises:
        InvalidSpec: an environment or a tool cannot be loaded.
        ModelError: the model's chat template cannot continue behind an answer.
    """
    config = spec.rollout.episodes
    if isinstance(config, EnvironmentEpisodesConfig) and (own := [e for e in config.environments if e.is_code]):
        process = CustomProcess(environments=own)
        try:
            await process.start()
            episodes = make_episodes(spec, engine, renderer, turns, tally, process, networks)
        except BaseException:
            await process.aclose()
            raise
        return OpenedEpisodes(episodes, process.aclose)
    if not isinstance(config, ToolEpisodesConfig):
        made = make_episodes(spec, engine, renderer, turns, tally, networks=networks)
        return OpenedEpisodes(made, _nothing_to_close)
    tools = await open_tools(config, networks, sandboxes, shows_images=spec.data.images is not None)
    told = renderer.with_tools(tools.schemas)
    try:
        told.check_continuation(Message(role_of_results(config.format), "."))
    except BaseException:
        await tools.aclose()
        raise
    limits = Limits.of(config, spec.rollout.engine.context_tokens, spec.data.images)
    conversations, resume = ToolConversations(tools, config), resume_rule(spec.asynchrony)
    return OpenedEpisodes(MultiTurnEpisodes(engine, told, turns, limits, conversations, resume, tally), tools.aclose)


def make_episodes(
    spec: ExperimentSpec,
    engine: Engine,
    renderer: TurnRenderer,
    turns: Turns,
    tally: SamplingTally,
    process: CustomProcess | None = None,
    networks: Sequence[IPNetwork] = LOOPBACK,
) -> Episodes:
    """Make episodes that hold nothing: of a single turn, or with an environment; ``process`` has those of the user's.

    Servers of environments may be in ``networks``, which are not public.

    Raises:
        InvalidSpec: an environment cannot be loaded.
        ModelError: the model's chat template cannot continue behind an answer.
    """
    config, resume = spec.rollout.episodes, resume_rule(spec.asynchrony)
    assert not isinstance(config, ToolEpisodesConfig), "tools are opened"
    if isinstance(config, SingleTurnConfig):
        return SingleTurnEpisodes(engine, renderer, turns, resume, tally)
    renderer.check_continuation()
    limits = Limits.of(config, spec.rollout.engine.context_tokens, spec.data.images)
    conversations = EnvironmentConversations(config, process, networks)
    return MultiTurnEpisodes(engine, renderer, turns, limits, conversations, resume, tally, config.redundant_members)


async def _nothing_to_close() -> None:
    """Close nothing."""
