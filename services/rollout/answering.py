"""What answers the tasks of an experiment: episodes of its spec, or agents."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flotilla.services.rollout.agents.environment import open_environment
from flotilla.services.rollout.agents.episode import Ended
from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.episodes.base import Episodes
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.episodes_of import open_episodes
from flotilla.services.rollout.loading import Loaded
from flotilla.services.rollout.profiling import profiled
from flotilla.services.rollout.tools.code_interpreter import Sandboxes
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.schemas.service import Assignment
from flotilla.shared.streams.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class Answering:
    """What answers tasks.

    Attributes:
        episodes: what the consumer runs; the agents where there are some.
        agents: the episodes that agents ask for.
        tally: counts what is sampled.
        close: ends what the episodes hold.
    """

    episodes: Episodes
    agents: AgentEpisodes | None
    tally: SamplingTally
    close: Callable[[], Awaitable[None]]


async def open_answering(
    spec: ExperimentSpec,
    loaded: Loaded,
    assignment: Assignment,
    mailbox: Mailbox,
    service_id: Callable[[], str],
    networks: Sequence[IPNetwork],
    sandboxes: Sandboxes | None,
    gateway_url: str,
) -> Answering:
    """Open what a spec says.

    Args:
        spec: of the experiment.
        loaded: its engine and renderer.
        assignment: to the experiment.
        mailbox: where late rewards of agents are left.
        service_id: what the gateway calls this service.
        networks: that are not public and may have tools.
        sandboxes: where tools run code.
        gateway_url: where agents that are started here ask for episodes.

    Raises:
        InvalidSpec: an environment or a tool cannot be loaded.
        ModelError: the model's chat template cannot continue behind an answer.
        Unavailable: the gateway gave no token for an agent.
    """
    engine, renderer = loaded.engine, loaded.renderer
    tally = SamplingTally(renderer.special_tokens())
    agents = None
    if spec.rollout.agents:
        agents = AgentEpisodes(
            engine, ChatTemplate(renderer), spec, mailbox, lambda: f"{assignment.experiment_id}.{service_id()}", tally
        )
        completed = partial(agents.counts.by_end.__getitem__, Ended.COMPLETED)
        agents.environment = open_environment(spec.rollout.agents, assignment, gateway_url, networks, completed)
    opened = await open_episodes(spec, engine, renderer, Turns.of(spec), tally, networks, sandboxes)
    directory = Path(assignment.directory)
    episodes = profiled(agents or opened.episodes, engine, directory, spec.tracking.profiler, service_id)
    return Answering(episodes, agents, tally, opened.close)
