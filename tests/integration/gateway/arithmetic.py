"""An environment of a package in an interpreter of its own, whose agent plays the episodes of a fleet here."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla.services.reward.grading import grading_samples
from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.shared.schemas.task import Message
from flotilla.shared.testing.builders import a_task
from tests.agent_fleet import EXPERIMENT, TOKEN, agent_fleet
from tests.fleet import ROOT
from tests.unit.rollout.agents.world import a_spec

NUM_ROWS, SIZE = 4, 2


async def said_by(*command: str, url: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLOTILLA_TOKEN": TOKEN, "FLOTILLA_GATEWAY_URL": url}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


def writes(prompt: str) -> str:
    """Solve the even problems, and no other."""
    number = int(prompt.rpartition("What is ")[2].split()[0])
    return f"#### {number + 1}~" if number % 2 == 0 else "no idea~"


async def check_that_it_plays(
    python: str, source: str, folder: Path, column: str, options_of: Callable[[str], Mapping[str, Any]]
) -> None:
    """Write the rows of an arithmetic environment of verifiers, play all, and look at what each was worth.

    Args:
        python: the interpreter that has the package.
        source: file of the environment.
        folder: for problems and rows.
        column: of the rows, by which the agent finds its task.
        options_of: makes the environment's options of the file with its problems.
    """
    problems = [{"prompt": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(NUM_ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    options = ("--options", json.dumps(options_of(str(folder / "train.jsonl"))))
    program = (python, "-m", "flotilla.agents")

    written = await said_by(*program, "verifiers-rows", source, str(folder / "rows.jsonl"), *options)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    said, rewards = await _played(
        (*program, "verifiers", source, EXPERIMENT, *options, "--parallel", "4"), rows, column
    )

    assert (written, said) == (f"{NUM_ROWS} rows\n", f"{NUM_ROWS * SIZE} episodes\n")
    assert rewards == {number: [float(number % 2 == 0)] * SIZE for number in range(NUM_ROWS)}


async def _played(
    agent: Sequence[str], rows: Sequence[Mapping[str, Any]], column: str
) -> tuple[str, dict[int, list[float | None]]]:
    async with agent_fleet(a_spec(group_size=SIZE), writes) as fleet:
        tasks = [
            a_task(
                number,
                group_size=SIZE,
                messages=tuple(Message(**each) for each in row["prompt"]),
                metadata={column: row[column]},
            )
            for number, row in enumerate(rows)
        ]
        await fleet.plane.admission.issue_many(tasks, limit=1000)
        playing = asyncio.create_task(said_by(*agent, url=fleet.url))
        waiting = asyncio.create_task(fleet.until(lambda ledger: ledger.waiting.generated == NUM_ROWS, 300.0))
        await asyncio.wait([playing, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not playing.done(), playing.result()
        await waiting
        await fleet.gateway.commands.fail(fleet.gateway.repository.get(EXPERIMENT), "test", "it is over")
        said = await playing
        groups = {group.task.group_id: group for group in await fleet.groups()}
        verifier = AgentVerifier(fleet.plane.mailbox)
        return said, {
            number: [grade.reward for grade in await verifier.score(grading_samples(group))]
            for number, group in groups.items()
        }
