"""Random faults under a running experiment, and the accounting after them.

    python -m tests.survival --faults 300 --seed 0 --json survival.json --report docs/survival.md
    python -m tests.survival --kills 200

``--kills`` ends processes by SIGKILL, the Redis server included. ``--faults`` also pauses them for 3 to 40 s, cuts the
power with and without the end of the Redis server's log, fills the disk, deletes weight images, deletes or spoils
checkpoints, lets clocks jump and drops packets. After each fault the run must move on and its ledger must balance; the
ledger is also read all the while. At the end the experiment is stopped, and every group is accounted for: trained once
along the surviving lineage, or with a reason. Prompts differ in how long their answers are, so that a loss of slow ones
would show. Without either option it runs to ``--steps`` without faults. Exit code 1 if anything was lost, trained
twice, too old or miscounted.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.shared.errors import FlotillaError
from tests.survival.accounting import Account, account
from tests.survival.faults import PATIENCE_SECONDS, Draw, Fault, Fleet, possible_faults
from tests.survival.long_tail import ROWS, make_long_tailed
from tests.survival.report import markdown

GROUPS_PER_STEP = 4
POLL_SECONDS = 0.1
STOP_SECONDS = 90.0


@dataclass
class Report:
    """What happened.

    Attributes:
        seed: of the choice.
        faults: how many of each kind happened.
        impossible: kinds that this machine does not allow, with the reason.
        recovery_seconds: from the end of a fault to the next step that was done after it, by kind.
        seconds: of the whole run.
        looks: how often the ledger was read while processes died.
        unbalanced: ledgers that did not balance.
        account: the accounting at the end.
    """

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    impossible: list[str] = field(default_factory=list)
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    looks: int = 0
    unbalanced: list[dict[str, Any]] = field(default_factory=list)
    account: Account | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing was lost, trained twice, too old or miscounted, at any time."""
        return self.account is not None and self.account.is_sound and not self.unbalanced

    def to_dict(self) -> dict[str, Any]:
        """Make it JSON; recovery as median and maximum."""
        recovery = {
            kind: {"median": round(sorted(values)[len(values) // 2], 2), "max": round(max(values), 2)}
            for kind, values in sorted(self.recovery_seconds.items())
        }
        return {
            "is_sound": self.is_sound,
            "seed": self.seed,
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(sorted(self.faults.items())),
            "impossible": self.impossible,
            "seconds": round(self.seconds, 1),
            "recovery_seconds": recovery,
            "ledger_looks": self.looks,
            "unbalanced": self.unbalanced,
            **(self.account.to_dict() if self.account else {}),
        }


async def survive(
    directory: Path,
    *,
    kills: int = 0,
    faults: int = 0,
    seed: int = 0,
    only: Sequence[str] = (),
    rollouts: int = 2,
    steps: int = 0,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Run an experiment while its fleet meets faults, then stop it and account for everything.

    Ctrl-C ends the faults early, after the one under way; a second one ends the run.

    Args:
        directory: for model, data and fleet.
        kills: how many processes to kill.
        faults: instead of kills alone: how many faults of every kind that this machine allows.
        seed: of the choice.
        only: names of faults to choose from; all where it is empty.
        rollouts: rollout services.
        steps: go on to at least this step.
        say: gets a line for each fault.

    Raises:
        AssertionError: the run failed or stood still.
    """
    spec = make_long_tailed(
        directory,
        optimisation={"steps": 1_000_000, "groups_per_mini_batch": GROUPS_PER_STEP, "learning_rate": 1e-6},
        checkpoint={"every_steps": 5},
        resources={"rollouts": {"min": 1}},
    )
    report, chance = Report(seed), random.Random(seed)
    started, count = time.monotonic(), faults or kills
    async with Fleet(directory, rollouts, only_kills=not faults) as fleet:
        possible, report.impossible = possible_faults(fleet)
        draw = Draw([each for each in possible if not only or each.name in only], chance)
        await fleet.start(spec)
        watching = asyncio.create_task(_watch(fleet, report))
        try:
            await _until_further(fleet, 0)
            await _meet_all(fleet, draw, count, report, chance, say)
            await _until_further(fleet, steps - 1, (steps + 60) * 5.0)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        await _stop(fleet)
        report.account = await account(fleet.client, fleet.experiment_id, directory, rows=ROWS)
    report.seconds = time.monotonic() - started
    return report


async def _meet_all(
    fleet: Fleet, draw: Draw, count: int, report: Report, chance: random.Random, say: Callable[[str], None] | None
) -> None:
    """Let one fault after the other happen; told line by line, and ended early by Ctrl-C, only with ``say``."""
    enough = _interrupted(say) if say else asyncio.Event()
    started = time.monotonic()
    for number in range(1, count + 1):
        if enough.is_set():
            break
        fault = draw.next()
        took = await _meet(fleet, fault, report, chance)
        if say:
            at = time.monotonic() - started
            say(f"{at:6.0f} s  fault {number}/{count}: {fault.name}, goes on after {took:.1f} s")
        await asyncio.sleep(chance.uniform(0, 1.5))


def _interrupted(say: Callable[[str], None]) -> asyncio.Event:
    """Make an event that the next Ctrl-C sets; the one after it has its usual effect."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()

    def first() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)
        say("no further faults: accounting for what has happened")

    loop.add_signal_handler(signal.SIGINT, first)
    return interrupted


async def _meet(fleet: Fleet, fault: Fault, report: Report, chance: random.Random) -> float:
    """Let a fault happen; return the seconds from its end to the next step that was done after it."""
    step = await _step(fleet)
    await fault.happen(fleet, chance)
    report.faults[fault.name] += 1
    started = time.monotonic()
    await _look(fleet, report, deadline_seconds=60.0)
    # What was done before or during the fault proves nothing; after a lost checkpoint it has to be done again.
    await _until_further(fleet, max(step, await _step(fleet)))
    took = time.monotonic() - started
    report.recovery_seconds.setdefault(fault.name, []).append(took)
    return took


async def _stop(fleet: Fleet) -> None:
    await fleet.client.call("POST", f"{fleet.path}/stop", deadline_seconds=60)
    end = time.monotonic() + STOP_SECONDS
    while True:
        view = await fleet.client.call("GET", fleet.path, deadline_seconds=60, attempt_seconds=5)
        if view["state"] == "stopped":
            return
        assert time.monotonic() < end, f"still {view['state']} after {STOP_SECONDS} s"
        await asyncio.sleep(POLL_SECONDS)


async def _step(fleet: Fleet) -> int:
    view = await fleet.client.call("GET", fleet.path, deadline_seconds=60, attempt_seconds=5)
    assert view["state"] in {"starting", "running"}, (view["state"], view["problem"])
    return int(view["step"])


async def _until_further(fleet: Fleet, step: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a step beyond ``step`` is done: a trainer that replays has to pass it again."""
    end = time.monotonic() + patience_seconds
    while await _step(fleet) <= step:
        if time.monotonic() > end:
            found = await fleet.client.call("GET", f"{fleet.path}/diagnosis", deadline_seconds=60)
            raise AssertionError(f"nothing went on for {patience_seconds:g} s: {found['component']}: {found['cause']}")
        await asyncio.sleep(POLL_SECONDS)


async def _look(fleet: Fleet, report: Report, *, deadline_seconds: float) -> None:
    ledger = await fleet.client.call(
        "GET", f"{fleet.path}/ledger", deadline_seconds=deadline_seconds, attempt_seconds=5
    )
    report.looks += 1
    if not ledger["train"]["balanced"]:
        report.unbalanced.append(ledger["train"])


async def _watch(fleet: Fleet, report: Report) -> None:
    while True:
        with contextlib.suppress(FlotillaError):
            await _look(fleet, report, deadline_seconds=2.0)
        await asyncio.sleep(POLL_SECONDS)


def main() -> int:
    """Run it, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--kills", type=int, default=0, help="so many processes are killed")
    number.add_argument("--faults", type=int, default=0, help="so many faults of every kind")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="choose from these faults alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="go on to at least this step")
    parser.add_argument("--keep", type=Path, help="keep model, data and logs in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--report", type=Path, help="write a page here; it holds a run with and one without faults")
    arguments = parser.parse_args()

    def run(kills: int, faults: int, steps: int) -> Report:
        with contextlib.ExitStack() as stack:
            if arguments.keep:
                directory = arguments.keep / f"{kills + faults}-faults"
                directory.mkdir(parents=True)
            else:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flotilla-survival-")))
            work = survive(
                directory,
                kills=kills,
                faults=faults,
                seed=arguments.seed,
                only=arguments.only,
                rollouts=arguments.rollouts,
                steps=steps,
                say=lambda line: print(line, flush=True),
            )
            return asyncio.run(work)

    report = run(arguments.kills, arguments.faults, arguments.steps)
    reports = [report]
    if arguments.report:
        assert report.account is not None
        print(json.dumps(report.to_dict(), indent=2), flush=True)
        print("the same without faults", flush=True)
        reports.append(run(0, 0, min(report.account.steps, 500)))
        arguments.report.write_text(markdown(*(each.to_dict() for each in reports)), encoding="utf-8")
    text = json.dumps([each.to_dict() for each in reports], indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if all(each.is_sound for each in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
