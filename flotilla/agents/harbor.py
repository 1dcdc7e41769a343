"""Harbor's tasks, played by a harness: any command that talks to the episode's OpenAI or Anthropic endpoint.

The harness and then the task's own tests run in a box (``box.py``), with the task's paths: ``/app``, ``/tests``,
``/logs``. An episode without a reward of the tests is abandoned, and its task is issued again: it is never a reward of
0.
"""

import asyncio
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.agents.box import NOT_RUN, TIMED_OUT, Box, open_box
from flotilla.agents.episodes import Episode, EpisodeLost, Verdict
from flotilla.agents.harbor_tasks import HarborTask, read_task, task_folders
from flotilla.agents.relay import url_inside
from flotilla.shared.errors import InvalidSpec, Unavailable

TASK = "harbor_task"
"""Column of the rows that names their task."""
REWARDS = ("reward.json", "reward.txt")
"""Files that tests write below ``/logs/verifier``; the first existing one counts."""
AGENT_OUTPUT, TEST_OUTPUT = "harness.txt", "test-stdout.txt"


def read_tasks(path: Path, *, skip_run: bool = False, readable: Collection[str] = ()) -> dict[str, HarborTask]:
    """Read the tasks of a path by name; see ``read_task``.

    Raises:
        InvalidSpec: there is none, or one cannot be played here.
    """
    return {
        name: read_task(folder, skip_run=skip_run, readable=readable) for name, folder in task_folders(path).items()
    }


def task_rows(tasks: Mapping[str, HarborTask]) -> Iterator[dict[str, Any]]:
    """Make the experiment's rows: the agent's instruction, and the task."""
    for name, task in tasks.items():
        yield {"prompt": [{"role": "user", "content": task.instruction}], TASK: name}


@dataclass(frozen=True, slots=True)
class Harness:
    """What plays the tasks.

    Attributes:
        command: of a shell, run where the task works.
        seconds: time of tasks that set none.
        readable: paths of this machine, beside ``/usr``, that it needs.
        keep: folder in which boxes are left to be examined; None: nowhere.
        is_closed: whether it has no network but for the policy, whatever tasks say.
        folder: in which boxes are that are not kept; None: that of temporary files.
    """

    command: str
    seconds: float = 600.0
    readable: Sequence[Path] = ()
    keep: Path | None = None
    is_closed: bool = False
    folder: Path | None = None


class HarborAgent:
    """Plays episodes as Harbor's tasks.

    Args:
        tasks: by name, see ``read_tasks``.
        harness: what plays them.
    """

    def __init__(self, tasks: Mapping[str, HarborTask], harness: Harness) -> None:
        self._tasks, self._harness = tasks, harness
        self._has_run = False

    async def __call__(self, episode: Episode) -> Verdict:
        """Play one episode.

        Raises:
            EpisodeLost: the box ended, the tests took too long, or wrote no reward.
            InvalidSpec: the task is not among these, or the harness cannot be run.
        """
        name = episode.task["metadata"].get(TASK)
        if name not in self._tasks:
            raise InvalidSpec(f"the row has no {TASK} of these tasks, but {name!r}: harbor-rows writes them")
        task, harness = self._tasks[name], self._harness
        only = episode.base_url if task.is_closed or harness.is_closed else None
        url = episode.base_url if only is None else url_inside(only)
        try:
            async with open_box(
                task.image.copies, readable=harness.readable, keep=harness.keep, only=only, parent=harness.folder
            ) as box:
                status = await self._play(box, task, episode, url)
                rewards = await _graded(box, task)
        except (Unavailable, OSError) as error:
            raise EpisodeLost(f"task {name}: {error}") from error
        reward = rewards.pop("reward", None)
        if reward is None:
            raise EpisodeLost(f"task {name}: the tests' rewards are {', '.join(rewards)}, and none is called reward")
        ended = {"timed_out": float(status in TIMED_OUT), "failed": float(status not in {0, *TIMED_OUT})}
        return Verdict(reward, rewards | {f"harness_{what}": value for what, value in ended.items()})

    async def _play(self, box: Box, task: HarborTask, episode: Episode, url: str) -> int:
        """Run the harness; return its status."""
        told = {
            "INSTRUCTION": task.instruction,
            "MODEL": episode.model,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": episode.key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": episode.key,
        }
        status = await box.run(
            self._harness.command,
            folder=task.image.workdir,
            variables=task.image.variables | told,
            output=f"/logs/agent/{AGENT_OUTPUT}",
            seconds=task.agent_seconds or self._harness.seconds,
        )
        # Later it is what the policy has come to: its commands may end with these, too.
        if status in NOT_RUN and not self._has_run:
            said = (box.read("agent", AGENT_OUTPUT) or "").strip()[-500:]
            raise InvalidSpec(f"the harness cannot be run in a box (status {status}): {said}")
        self._has_run = True
        return status


async def _graded(box: Box, task: HarborTask) -> dict[str, float]:
    """Run the task's tests; return their rewards by name.

    Raises:
        EpisodeLost: there are none.
    """
    box.clear("verifier", *REWARDS)
    await asyncio.to_thread(box.fill, "tests", task.tests)
    status = await box.run(
        "if [ -x /tests/test.sh ]; then exec /tests/test.sh; else exec bash /tests/test.sh; fi",
        folder=task.image.workdir,
        variables={**task.image.variables, **task.verifier_variables},
        output=f"/logs/verifier/{TEST_OUTPUT}",
        seconds=task.verifier_seconds,
    )
    if status in TIMED_OUT:
        raise EpisodeLost(f"task {task.name}: its tests took longer than {task.verifier_seconds:g} s")
    for file in REWARDS:
        written = box.read("verifier", file)
        if written is not None:
            return rewards_of(written, f"task {task.name}: {file}")
    said = (box.read("verifier", TEST_OUTPUT) or "").strip()[-500:]
    raise EpisodeLost(f"task {task.name}: its tests wrote no reward (status {status}): {said}")


def rewards_of(written: str, where: str) -> dict[str, float]:
    """Read what tests wrote: a number, or an object of numbers; a single one is the reward, whatever its name.

    Raises:
        EpisodeLost: it is neither.
    """
    try:
        found: Any = json.loads(written) if written.lstrip().startswith("{") else {"reward": written}
        rewards = {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise EpisodeLost(f"{where} is no number and no object of numbers: {error}") from error
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise EpisodeLost(f"{where} has no finite numbers: {written[:200]!r}")
    return {"reward": next(iter(rewards.values()))} if len(rewards) == 1 else rewards
