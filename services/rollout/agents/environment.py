"""The agent of an environment that a spec names: ``python -m flotilla.agents``, which this rollout starts and ends.

It is the command that a user would type, in a process of its own with all that it starts (``Kept``), and asks the
gateway for episodes as any agent does. One that dies is started again after a pause, and its death is reported; one
that keeps dying without an episode that was finished here ends the experiment.
"""

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import flotilla
from flotilla.shared.children.keeper import CANNOT_START
from flotilla.shared.children.processes import Kept, LastWords, cause_of_death, python_module, unheard
from flotilla.shared.children.restarts import LONGEST_PAUSE_SECONDS, Restarts
from flotilla.shared.children.spawning import child_environment
from flotilla.shared.config.sections.agents import (
    AgentEnvironment,
    AgentsConfig,
    HarborConfig,
    NemoGymConfig,
    VerifiersConfig,
)
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import AGENTS, Assignment, Failure

log = logging.getLogger(__name__)

MODULE: Final = "flotilla.agents"
MAX_DEATHS: Final = 5
"""An agent that dies this often without a finished episode in between will not recover by itself."""
SOUND_SECONDS: Final = 60.0
"""One that has lived for so long is no longer reported as one that dies."""
NO_TASK_PAUSE_SECONDS: Final = 5.0
"""After one that ended since the gateway had nothing for it: the experiment ends, or its token is about to change."""
LOOK_SECONDS: Final = 1.0
END_SECONDS: Final = 3.0
"""For tidying up, when it is ended."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where an agent asks for episodes.

    Attributes:
        gateway_url: of the gateway, or of several.
        experiment_id: whose episodes.
        token: that is good for these alone.
        networks: that are not public, and that a server of the spec may be in.
    """

    gateway_url: str
    experiment_id: str
    token: str
    networks: Sequence[IPNetwork]


def command_of(environment: AgentEnvironment, door: Door) -> list[str]:
    """Write the command that plays the episodes of an experiment, as ``flotilla/agents/__main__.py`` reads it."""
    playing, source, options = _arguments(environment, door)
    ours, *module = python_module(MODULE)
    python = environment.python if isinstance(environment, VerifiersConfig) else ours
    return [python, *module, playing, source, door.experiment_id, f"--parallel={environment.parallel}", *options]


def _arguments(environment: AgentEnvironment, door: Door) -> tuple[str, str, list[str]]:
    # Values are joined to their options: one may begin with a dash.
    if isinstance(environment, HarborConfig):
        options = [f"--harness={environment.harness}", f"--seconds={environment.seconds:g}"]
        options += [f"--readable={each}" for each in environment.readable]
        options += [f"--secret={each}" for each in environment.secrets]
        options += ["--skip-run"] if environment.skip_run else []
        options += ["--closed"] if environment.closed else []
        return "harbor", environment.tasks, options
    if isinstance(environment, NemoGymConfig):
        options = [f"--networks={','.join(map(str, door.networks)) or 'none'}"]
        options += [] if environment.max_steps is None else [f"--max-steps={environment.max_steps}"]
        return "nemo-gym", environment.url, options
    return "verifiers", environment.taskset, [f"--options={json.dumps(environment.options)}"]


class EnvironmentAgent:
    """The process of one session.

    Args:
        environment: of the spec.
        door: where it asks for episodes.
        num_completed: counts the episodes that were finished here.
        restarts: when one that died is started again; None: as this module says.
    """

    def __init__(
        self,
        environment: AgentEnvironment,
        door: Door,
        num_completed: Callable[[], int],
        restarts: Restarts | None = None,
    ) -> None:
        self.failure: Failure | None = None
        """Why it does not play now, or will not any more."""
        self.notify: Callable[[], None] = lambda: None
        """Called when that has changed; set by the session that reports it."""
        self._environment, self._door = environment, door
        self._num_completed = num_completed
        self._restarts = restarts or Restarts(MAX_DEATHS, longest_pause_seconds=LONGEST_PAUSE_SECONDS)
        self._words = LastWords(unheard)

    async def run(self) -> None:
        """Keep it running until this is cancelled, or it will not recover; it is ended then, with all that it started.

        Its settings are in its environment, neither in its command nor in a file: its token stays private.
        """
        place = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="flotilla-agent-"))
        try:
            # For an interpreter that has other packages: ours, and nothing that is installed beside it.
            await asyncio.to_thread((place / "flotilla").symlink_to, Path(flotilla.__file__).parent)
            pause: float | None = 0.0
            while pause is not None:
                await asyncio.sleep(pause)
                pause = await self._life(place)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    async def _life(self, place: Path) -> float | None:
        """Run it to its end; return the seconds until the next start, None for none."""
        command, self._words = command_of(self._environment, self._door), LastWords(unheard)
        paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = child_environment(
            FLOTILLA_TOKEN=self._door.token,
            FLOTILLA_GATEWAY_URL=self._door.gateway_url,
            PYTHONPATH=os.pathsep.join(paths),
        )
        try:
            kept = await Kept.start(
                command, environment=variables, directory=place, on_line=self._hear, seconds=END_SECONDS
            )
        except OSError as error:
            return self._died(f"cannot be started: {error}")
        ending = asyncio.create_task(kept.ended(), name="end of an agent")
        try:
            await self._watch(ending)
            code = ending.result()
        finally:
            ending.cancel()
            await kept.close(END_SECONDS)
        if code == 0:
            log.info("the agent has ended: the gateway has no episodes for it")
            return NO_TASK_PAUSE_SECONDS
        how = f"cannot be started by {command[0]}" if code == CANNOT_START else cause_of_death(code)
        return self._died(how + self._words.shown())

    async def _watch(self, ending: "asyncio.Task[int]") -> None:
        """Wait for its end; meanwhile forget earlier deaths once it plays."""
        clock = asyncio.get_running_loop().time
        began, completed = clock(), self._num_completed()
        while not ending.done():
            await asyncio.wait([ending], timeout=LOOK_SECONDS)
            has_played = self._num_completed() > completed
            if has_played:
                self._restarts.forget()
            if self.failure is not None and not ending.done() and (has_played or clock() - began >= SOUND_SECONDS):
                self.failure = None
                self.notify()

    def _died(self, how: str) -> float | None:
        pause = self._restarts.died()
        cause = f"the agent of rollout.agents.environment ({self._environment.kind}) {how}"
        log.error("an agent ended", extra={"cause": cause, "again_after_seconds": pause})
        self.failure = Failure(component=AGENTS, cause=cause, fatal=pause is None)
        self.notify()
        return pause

    def _hear(self, line: str) -> None:
        self._words.add(line.encode())
        log.info("agent output", extra={"line": line})


def open_environment(
    config: AgentsConfig,
    assignment: Assignment,
    gateway_url: str,
    networks: Sequence[IPNetwork],
    num_completed: Callable[[], int],
) -> EnvironmentAgent | None:
    """Make the agent of a spec's environment; None where it names none. It is not started yet.

    Raises:
        Unavailable: the gateway gave no token for it.
    """
    if config.environment is None:
        return None
    if assignment.token is None:
        raise Unavailable("the gateway gives rollouts no token for the agents that they start: it is an older one")
    door = Door(gateway_url, assignment.experiment_id, assignment.token, networks)
    return EnvironmentAgent(config.environment, door, num_completed)
