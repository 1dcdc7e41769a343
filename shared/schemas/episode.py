"""Episodes that agents from outside drive: what the gateway hands out, and how an episode ends."""

from typing import Annotated, Any, Final

from pydantic import Field, FiniteFloat

from flotilla.shared.schemas.reward_number import Reward
from flotilla.shared.schemas.task import Lane
from flotilla.shared.schemas.wire import TolerantWire

LONGEST_WAIT_SECONDS: Final = 30.0
MAX_METRICS: Final = 32
MAX_NAME: Final = 200
HOLDER: Final = r"^[A-Za-z0-9_-]{16,128}$"
MetricName = Annotated[str, Field(max_length=MAX_NAME)]


class OpenEpisode(TolerantWire):
    """Asks for an episode."""

    wait_seconds: float = Field(0.0, ge=0)
    """How long to wait for a task where there is none now; cut to 30."""
    holder: str | None = Field(None, pattern=HOLDER)
    """Who plays it: a name that nobody else knows, by which all that it holds is given back when it has ended."""


class BeginEpisode(OpenEpisode):
    """Asks a rollout for an episode, on behalf of an agent's call."""

    key: str | None = Field(None, max_length=128)
    """Of the call, the same where another gateway is told it again: an episode that was begun by it and is open is
    handed out again, and no second one."""
    only_known: bool = False
    """Begin none: hand out only what was begun by this key."""


class EpisodeMessage(TolerantWire):
    """One message of a task's prompt."""

    role: str
    content: str | tuple[dict[str, Any], ...]
    """Text; with images parts, `text` and `image_url` with a `data:` URI, as a chat is asked with them."""


class EpisodeTask(TolerantWire):
    """What the agent shall do: a row of the dataset."""

    group_id: int
    """Episodes of the same task have the same, and are compared with each other; each split counts its own."""
    split: Lane = Lane.TRAIN
    """evaluation: a held-out task, whose result is reported and never trained."""
    index: int
    """Which of its group it is, from 0."""
    row: int
    """Of the dataset."""
    messages: tuple[EpisodeMessage, ...]
    prompt: str
    """The messages as the model is given them: what `/v1/completions` is asked with. Empty where the model's
    template refuses them."""
    label: str | None = None
    data_source: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class OpenedEpisode(TolerantWire):
    """An episode as a rollout hands it out."""

    episode_id: str
    task: EpisodeTask
    lease_seconds: float
    """After so much silence of the agent the episode is abandoned."""
    seconds: float
    """How long it may last at most."""


class HandedOutEpisode(OpenedEpisode):
    """An episode as an agent gets it."""

    key: str
    """The API key of this episode."""
    base_url: str
    """The base URL for an OpenAI client."""
    model: str
    """Name to give as the model; any other name is accepted too."""


class EpisodeReward(TolerantWire):
    """What the episode was worth."""

    reward: Reward
    metrics: dict[MetricName, FiniteFloat] = Field(default_factory=dict, max_length=MAX_METRICS)
    """Free numbers for charts; they do not enter the reward."""


class GiveBackEpisodes(TolerantWire):
    """Gives back what somebody holds who has ended."""

    holder: str = Field(pattern=HOLDER)
    """That the episodes were begun with; it begins no others."""


class EpisodesGivenBack(TolerantWire):
    """What was given back; it is handed out again at once."""

    episode_ids: tuple[str, ...]


class CompleteEpisode(TolerantWire):
    """Ends an episode."""

    reward: Reward | None = None
    """Null: it comes later, or other components of the reward grade the episode."""
    metrics: dict[MetricName, FiniteFloat] = Field(default_factory=dict, max_length=MAX_METRICS)


class EndedEpisode(TolerantWire):
    """How an episode ended."""

    episode_id: str
    num_turns: int
    """Completions that were sampled."""
    num_trajectories: int
    """Conversations that they make, branches counted."""
    has_reward: bool
    reward_until_seconds: float
    """How much longer a reward is taken; 0 if none is."""
