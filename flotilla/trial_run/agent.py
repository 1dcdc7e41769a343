"""The agent of a trial: the user's own where its file is here, else one of the same signature."""

import zlib
from pathlib import Path
from typing import Final

import httpx

from flotilla.agents.episodes import play_all
from flotilla.agents.openrlhf import OpenRlhfAgent, load_agent
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.trial_run.edits import Document, Section

PARALLEL: Final = 4


class MadeAgent:
    """An agent as OpenRLHF has them: two turns, about half of whose answers are right."""

    def __init__(self) -> None:
        self._turns = 0

    async def reset(self, states: Section) -> Document:
        """Begin with the prompt as it is."""
        return {"observation": states["observation"]}

    async def step(self, states: Section) -> Document:
        """Give a reward, and continue once."""
        self._turns += 1
        right = float(zlib.crc32(str(states["action_text"]).encode()) % 2)
        return {"rewards": right, "scores": right, "environment_feedback": "\nGo on.\n", "done": self._turns > 1}


async def play_trial(gateway: str, token: str, experiment: str, file: Path | None) -> None:
    """Play the episodes of an experiment until it has ended.

    Raises:
        InvalidSpec: the user's file has no agent.
        ExceptionGroup: of what that agent raised.
    """
    kind = MadeAgent if file is None else load_agent(file)
    limits = httpx.Limits(max_connections=PARALLEL)
    async with httpx.AsyncClient(limits=limits, verify=tls_context()) as client:
        await play_all(gateway, experiment, token, OpenRlhfAgent(kind, client), parallel=PARALLEL)
