"""A taskset of the real verifiers 0.4, in an interpreter of its own, plays episodes with its harness and rewards."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.agents.tasksets import TASK, load_taskset, rows_of_taskset
from flotilla.services.reward.grading import grading_samples
from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.task import Message
from flotilla.shared.testing.builders import a_task
from tests.agent_fleet import EXPERIMENT, agent_fleet
from tests.integration.gateway.test_verifiers_package import said_by, writes
from tests.unit.rollout.agents.world import a_spec

TASKSET = "examples/verifiers/arithmetic_taskset.py"
NUM_ROWS, SIZE = 4, 2


def interpreter_with_tasksets(folder: Path) -> str:
    """Find or make the interpreter that has verifiers 0.4."""
    if found := os.environ.get("FLOTILLA_TASKSETS_PYTHON"):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=600)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "verifiers==0.4.0"], capture_output=True, timeout=900)
    if done.returncode:
        pytest.skip(f"verifiers 0.4 cannot be installed: {done.stderr[-500:].decode(errors='replace')}")
    return python


@pytest.fixture(scope="module")
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield interpreter_with_tasksets(tmp_path_factory.mktemp("tasksets"))


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_a_taskset_plays_and_its_rewards_grade(tmp_path: Path, tasksets: str) -> None:
    problems = [{"prompt": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(NUM_ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    options = ("--options", json.dumps({"taskset": {"path": str(tmp_path / "train.jsonl")}}))
    program = (tasksets, "-m", "flotilla.agents")

    written = await said_by(*program, "verifiers-rows", TASKSET, str(tmp_path / "rows.jsonl"), *options)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    async with agent_fleet(a_spec(group_size=SIZE), writes) as fleet:
        tasks = [
            a_task(
                number,
                group_size=SIZE,
                messages=tuple(Message(**each) for each in row["prompt"]),
                metadata={TASK: row[TASK]},
            )
            for number, row in enumerate(rows)
        ]
        await fleet.plane.admission.issue_many(tasks, limit=1000)
        agent = (*program, "verifiers", TASKSET, EXPERIMENT, *options, "--parallel", "4")
        playing = asyncio.create_task(said_by(*agent, url=fleet.url))
        waiting = asyncio.create_task(fleet.until(lambda ledger: ledger.waiting.generated == NUM_ROWS, 300.0))
        await asyncio.wait([playing, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not playing.done(), playing.result()
        await waiting
        await fleet.gateway.commands.fail(fleet.gateway.repository.get(EXPERIMENT), "test", "it is over")
        said = await playing
        groups = {group.task.group_id: group for group in await fleet.groups()}
        verifier = AgentVerifier(fleet.plane.mailbox)
        rewards = {
            number: [grade.reward for grade in await verifier.score(grading_samples(group))]
            for number, group in groups.items()
        }

    assert (written, said) == (f"{NUM_ROWS} rows\n", f"{NUM_ROWS * SIZE} episodes\n")
    assert rewards == {number: [float(number % 2 == 0)] * SIZE for number in range(NUM_ROWS)}


def test_without_verifiers_a_taskset_is_refused_with_what_to_install() -> None:
    with pytest.raises(InvalidSpec, match=r"verifiers==0\.4\.0"):
        load_taskset("any", {})


def test_a_taskset_without_an_end_needs_a_limit() -> None:
    endless = SimpleNamespace(taskset=SimpleNamespace(bounded=False))

    with pytest.raises(InvalidSpec, match="--limit"):
        next(rows_of_taskset(endless))
