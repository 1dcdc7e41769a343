"""From a spec to what answers its tasks."""

from services.rollout.engines.base import Engine
from services.rollout.environments.conversation import EnvironmentConversations
from services.rollout.episodes.base import Episodes
from services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from services.rollout.episodes.rendering import TurnRenderer
from services.rollout.episodes.resumption import resume_rule
from services.rollout.episodes.single_turn import SingleTurnEpisodes
from services.rollout.episodes.special_tokens import SamplingTally
from services.rollout.episodes.turns import Turns
from shared.config.episodes import SingleTurnConfig
from shared.config.spec import ExperimentSpec


def make_episodes(
    spec: ExperimentSpec, engine: Engine, renderer: TurnRenderer, turns: Turns, tally: SamplingTally
) -> Episodes:
    """Make the episodes of an experiment.

    Raises:
        InvalidSpec: an environment cannot be loaded.
        ModelError: the model's chat template cannot go on behind an answer.
    """
    config, resume = spec.rollout.episodes, resume_rule(spec.asynchrony)
    if isinstance(config, SingleTurnConfig):
        return SingleTurnEpisodes(engine, renderer, turns, resume, tally)
    renderer.check_continuation()
    limits = Limits.of(config, spec.rollout.engine.context_tokens)
    return MultiTurnEpisodes(engine, renderer, turns, limits, EnvironmentConversations(config), resume, tally)
