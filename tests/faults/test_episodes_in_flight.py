"""Rollouts, engines and the process of an environment are killed while episodes of several turns are in flight.

The grader plays each episode again: what was shown in each turn must be what the environment shows after the recorded
actions, so no turn of a killed episode may be left in one that began again.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.test_kill import patiently, until_completed, watch_balance
from tests.faults.trial import Trial, check_what_was_trained
from tests.fleet import RESTART_SECONDS, hold_back, make_experiment, running_fleet, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

STEPS, HELD_STEPS, TURNS = 16, 1, 5
VICTIMS = (
    "flotilla.services.rollout",
    "flotilla.services.rollout.engines.process.child",
    "flotilla.services.rollout.custom_code",
) * 2
LAKE = """
import asyncio
from flotilla.services.rollout.environments.frozen_lake import FrozenLake

class Slow(FrozenLake):
    async def step(self, text):
        await asyncio.sleep(0.05)
        # What a random policy writes is an action like others.
        return super().step(("Left", "Down", "Right", "Up")[len(text) % 4])
"""
GRADER = """
import zlib
from flotilla.services.rollout.environments.frozen_lake import FrozenLake

def score(sample):
    lake = FrozenLake()
    shown, is_over, is_exact = lake.reset(sample.metadata["seed"])[0], False, len(sample.turns) > 0
    for number, turn in enumerate(sample.turns):
        is_exact &= not is_over and (number == 0 or turn.observation == shown)
        shown, reward, is_over, _, _ = lake.step(("Left", "Down", "Right", "Up")[len(turn.response) % 4])
        is_exact &= turn.reward == reward
    is_exact &= is_over or len(sample.turns) == TURNS
    return {"reward": float(zlib.crc32(sample.response.encode()) % 2), "metrics": {"exact": float(is_exact)}}
"""


def a_spec(directory: Path) -> tuple[dict[str, Any], Path]:
    spec = make_experiment(
        directory,
        data={"path": str(directory / "tasks.jsonl"), "label_column": None},
        rollout={
            "group_size": 4,
            "sampling": {"max_new_tokens": 6, "ignore_eos": True},
            "engine": {"slots": 16, "context_tokens": 768, "threads": 1},
            "episodes": {
                "kind": "environment",
                "environments": [{"environment": f"{directory / 'lake.py'}:Slow"}],
                "max_turns": TURNS,
            },
        },
        optimisation={"steps": STEPS, "groups_per_mini_batch": 4, "learning_rate": 1e-4, "micro_batch_tokens": 4096},
    )
    (directory / "tasks.jsonl").write_text("".join(f'{{"prompt": "Go.", "seed": {seed}}}\n' for seed in range(300)))
    (directory / "lake.py").write_text(LAKE)
    (directory / "exact.py").write_text(GRADER.replace("TURNS", str(TURNS)))
    hold = hold_back(spec, directory, after_step=HELD_STEPS)
    exact = {"kind": "custom", "name": "exact", "path": f"{directory / 'exact.py'}:score"}
    spec["reward"]["components"] = [exact, {**spec["reward"]["components"][0], "weight": 0.1}]
    return spec, hold


def kill(victim: str, rollout: int) -> None:
    """Kill -9 a rollout, or the process of it that runs a module."""

    def killed() -> bool:
        for each in (psutil.Process(rollout), *psutil.Process(rollout).children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was found
                if victim in each.cmdline():
                    each.kill()
                    each.wait(RESTART_SECONDS)
                    return True
        return False

    until(killed, RESTART_SECONDS, f"{victim} of {rollout}")


async def test_episodes_in_flight_begin_again_whole_when_their_rollout_is_killed(tmp_path: Path) -> None:
    spec, hold = a_spec(tmp_path)
    balanced: list[bool] = []
    num_held = 0
    with running_fleet(tmp_path / "fleet", rollouts=2) as fleet:
        async with fleet.client() as client:
            trial = await Trial.start(fleet, client, spec)
            watching = asyncio.create_task(watch_balance(client, trial.id, balanced))
            for number, victim in enumerate(VICTIMS):
                serving = await trial.until_served_by(2)
                # Two steps more: there are episodes to begin, and the run does not end before its rollouts are back.
                hold.write_text(str((HELD_STEPS + 2 * number + 2) * spec["optimisation"]["groups_per_mini_batch"]))
                holder = await trial.until_one_holds(2, set(serving))
                kill(victim, holder)
                num_held += len(await trial.held_by(holder)) if victim == "flotilla.services.rollout" else 0
            hold.unlink()
            await until_completed(client, trial.id)
            watching.cancel()
            ledger = (await patiently(client, f"{trial.path}/ledger"))["train"]
            await check_what_was_trained(trial)
            exact, turns = await trial.metric("grader/exact/exact/min"), await trial.metric("grader/episode/turns/mean")
            trained = await trial.trained()

    print(f"{num_held} claims of the dead, {len(balanced)} looks, {ledger}")
    assert len(balanced) > 50 and all(balanced)
    assert (ledger["balanced"], ledger["outstanding"]) == (True, 0)
    assert ledger["trained"] == len(trained) == STEPS * spec["optimisation"]["groups_per_mini_batch"]
    assert num_held > 0, "nobody was killed with an episode in hand"
    assert len(exact) == STEPS and set(exact) == {1.0}
    assert min(turns) > 1
