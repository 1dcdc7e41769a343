"""Agents from outside, and environments of other frameworks whose agents the rollouts start themselves."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue, field_validator

from flotilla.shared.config.base.model import Config

ELSEWHERE: Final[Mapping[str, str]] = {
    "openenv": "openenv:http://HOST:PORT",
    "gymnasium": "gymnasium:NAME",
}
"""Environments that need no agent, and how ``rollout.episodes.environments`` names them."""
PATH: Final = r"^[^\x00\n]+$"
VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"


class AgentEnvironmentConfig(Config):
    """What every environment has whose agent the rollouts start."""

    parallel: int = Field(16, ge=1, le=1024)
    """Episodes at a time that the agent of each rollout plays."""


class HarborConfig(AgentEnvironmentConfig):
    """Harbor task folders, each played by a command in a box of its own and graded by the task's own tests."""

    kind: Literal["harbor"]
    tasks: str = Field(pattern=PATH)
    """A task folder, or a folder of them, as rollouts see it; `data.path` has its rows, which `harbor-rows` wrote."""
    harness: str = Field(min_length=1)
    """The command of a shell that plays a task."""
    seconds: float = Field(600.0, gt=0)
    """Time of the harness, where a task sets none."""
    readable: tuple[Annotated[str, Field(pattern=PATH)], ...] = ()
    """Paths of the rollout's machine, beside `/usr`, that the harness needs."""
    skip_run: bool = False
    """Take what `RUN` lines would install as there already."""
    closed: bool = False
    """No network for any task but to the policy, whatever the tasks say."""
    secrets: tuple[Annotated[str, Field(pattern=VARIABLE)], ...] = ()
    """Variables of the rollout's environment that tasks may read, as `${NAME}`."""


class NemoGymConfig(AgentEnvironmentConfig):
    """A NeMo Gym resources server that runs already: sessions, tools and verification."""

    kind: Literal["nemo_gym"]
    url: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """Of the server; `data.path` has the rows of its data, which `nemo-gym-rows` wrote."""
    max_steps: int | None = Field(None, ge=1)
    """Answers of one episode at most; null: as many as `max_turns` lets it have."""


class VerifiersConfig(AgentEnvironmentConfig):
    """A taskset of verifiers 0.4, or an environment of 0.1, with its harness and rewards."""

    kind: Literal["verifiers"]
    python: str = Field(pattern=PATH)
    """The interpreter that has verifiers and the taskset installed, as rollouts see it."""
    taskset: str = Field(pattern=r"^[^\x00\n-][^\x00\n]*$")
    """Id of an installed one, or a Python file; `data.path` has its rows, which `verifiers-rows` wrote."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """verifiers' `[env]` (0.4), or the keywords of `load_environment` (0.1)."""

    @property
    def is_file(self) -> bool:
        """Whether the taskset is a Python file."""
        return self.taskset.endswith(".py")


AgentEnvironment = Annotated[HarborConfig | NemoGymConfig | VerifiersConfig, Field(discriminator="kind")]
"""An environment of another framework, chosen by ``kind``."""


class AgentsConfig(Config):
    """Tasks are handed out to agents, and what they ask of the model is recorded and trained."""

    environment: AgentEnvironment | None = None
    """An environment of another framework: each rollout starts the agent that plays it, restarts it when it dies, and
    ends it with the experiment. null: agents come from outside."""
    lease_seconds: float = Field(300.0, gt=0, le=86_400)
    """An episode whose agent is silent for so long is abandoned, and handed out again."""
    episode_seconds: float = Field(3600.0, gt=0, le=604_800)
    """Longest time of one episode; then it is abandoned."""
    group_seconds: float = Field(7200.0, gt=0, le=604_800)
    """Once the first episode of a group has begun, it is finished within this time, or trained with the episodes that
    it has."""
    max_turns: int = Field(64, ge=1, le=10_000)
    """Completions of one episode, all branches together."""
    max_branches: int = Field(8, ge=1, le=1024)
    """Conversations of one episode that do not continue each other; each is a trajectory of its own."""
    branches: Literal["as_one", "each"] = "as_one"
    """How an episode of several branches is counted. as_one: like an episode of one: its reward, the mean of theirs,
    is compared with those of the other episodes of its group, all its branches get that advantage, and the weights of
    their losses add up to 1. each: every branch is compared and weighs like an episode of its own."""
    max_attempts: int = Field(4, ge=1, le=1000)
    """How often an episode that is abandoned again and again is handed out; then its group continues without it."""

    @field_validator("environment", mode="before")
    @classmethod
    def _is_played_by_an_agent(cls, environment: Any) -> Any:
        kind = environment.get("kind") if isinstance(environment, Mapping) else None
        if isinstance(kind, str) and kind in ELSEWHERE:
            raise ValueError(
                f"{kind} needs no agent: leave rollout.agents out, and write rollout.episodes: {{kind: environment, "
                f"environments: [{{environment: '{ELSEWHERE[kind]}'}}]}}; the kinds here are harbor, nemo_gym and "
                "verifiers"
            )
        return environment
