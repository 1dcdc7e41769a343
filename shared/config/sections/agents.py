"""Episodes that agents from outside drive, through an OpenAI-compatible endpoint of the gateway."""

from typing import Literal

from pydantic import Field

from flotilla.shared.config.base.model import Config


class AgentsConfig(Config):
    """Tasks are handed out to agents, and what they ask of the model is recorded and trained."""

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
    """What an episode of several branches counts for. as_one: like an episode of one: its reward, the mean of theirs,
    is compared with those of the other episodes of its group, all its branches get that advantage, and the weights of
    their losses add up to 1. each: every branch is compared and weighs like an episode of its own."""
    max_attempts: int = Field(4, ge=1, le=1000)
    """How often an episode that is abandoned again and again is handed out; then its group goes on without it."""
