"""Long tests take turns: each run with ``--long-slot`` has one slot of them beside all others, by the commit's number.

Files are dealt to slots by their seconds, so that slots are of equal length, and a file is always in one slot. With N
slots each long test runs in every Nth commit. What has no part in the rotation is left to the night.
"""

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS: Mapping[str, int] = {
    # As five workers run them, on two cores with a load of 8 to 13: an idle machine takes less.
    "tests/faults/test_hosts.py": 472,
    "tests/faults/test_two_experiments.py": 61,
    "tests/integration/importers/test_trials.py": 150,
    "tests/integration/trainer/test_hosts.py": 39,
    "tests/integration/gateway/test_agents.py": 37,
    "tests/integration/gateway/test_example_agents.py": 14,
    "tests/integration/gateway/test_standbys.py": 40,
    # Of ranks 390, of agents 191 and of the lake 216 seconds were a processor's.
    "tests/faults/test_ranks.py": 330,
    "tests/faults/test_dying_ranks.py": 450,
    "tests/e2e/test_agents.py": 566,  # 60 of a processor went into clients that the example's agent no longer makes
    "tests/e2e/test_frozen_lake.py": 459,
    "tests/e2e/test_images.py": 140,
    "tests/e2e/test_many_experiments.py": 53,
    "tests/e2e/test_tls.py": 58,
    "tests/e2e/test_traces.py": 31,
    "tests/e2e/test_trust.py": 29,
    "tests/e2e/test_tutorials.py": 150,
    "tests/containers/test_read_only_root.py": 19,
    "tests/e2e/test_backup.py": 76,
    "tests/integration/cli/test_node_script.py": 16,
    "tests/faults/test_steering.py": 76,
    "tests/faults/test_curriculum.py": 41,
    # Those of every run until the whole took more than twenty minutes.
    "tests/faults/test_leaving.py": 169,
    "tests/e2e/test_fleet_commands.py": 105,
    "tests/faults/test_evaluation_lost_tail.py": 100,
    "tests/pairs/test_fleet.py": 138,
    "tests/pairs/test_ranks.py": 70,
    "tests/integration/trainer/test_crash_replay.py": 24,
    "tests/faults/test_cut_off.py": 59,
    "tests/integration/gateway/test_sharing.py": 72,
    "tests/integration/trainer/test_stores_disagree.py": 53,
    "tests/e2e/test_examples.py": 235,
    "tests/faults/test_loss_curve.py": 175,
    "tests/faults/test_diagnosis.py": 160,
    "tests/faults/test_injected.py": 92,
    "tests/pairs/test_training.py": 179,
    "tests/faults/test_lending.py": 228,
    "tests/integration/gateway/test_lending.py": 75,
}
"""Seconds of the long tests of each file in the rotation: kills of ranks and hosts, agents, whole fleets."""
NUM_SLOTS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rotation", "long tests in turn")
    group.addoption("--long-slot", metavar="NUMBER", help="run one slot of the long tests too: a number, or `commit`")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Resolve the slot once, before workers are given the options."""
    if config.getoption("long_slot") is not None:
        config.option.long_slot = str(slot_of(config.getoption("long_slot")))


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if config.getoption("long_slot") is None else line_of(int(config.getoption("long_slot")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("long_slot") is not None:  # with -q there is no header
        terminalreporter.write_line(line_of(int(config.getoption("long_slot"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests of other slots."""
    if (slot := config.getoption("long_slot")) is None:
        return
    files = frozenset(slots(SECONDS)[int(slot)])
    left = [item for item in items if item.get_closest_marker("long") and file_of(item) not in files]
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def line_of(slot: int) -> str:
    """Say which long tests run."""
    dealt = slots(SECONDS)
    seconds = sum(SECONDS[file] for file in dealt[slot])
    return f"long tests: slot {slot} of 0 to {len(dealt) - 1}, {seconds} seconds: {', '.join(dealt[slot])}"


def slots(seconds: Mapping[str, int], num_slots: int = NUM_SLOTS) -> list[list[str]]:
    """Deal files to slots of equal length: the longest first, each to the slot that has least."""
    dealt: list[list[str]] = [[] for _ in range(num_slots)]
    for file in sorted(seconds, key=lambda each: (-seconds[each], each)):
        min(dealt, key=lambda slot: sum(map(seconds.__getitem__, slot))).append(file)
    return dealt


def slot_of(asked: str, num_slots: int = NUM_SLOTS) -> int:
    """Choose the slot: the number that was asked for, or for ``commit`` that of the commit.

    Raises:
        pytest.UsageError: it is neither.
    """
    number = commit_number() if asked == "commit" else int(asked) if asked.isdecimal() else None
    if number is None:
        raise pytest.UsageError(f"--long-slot is a number or `commit`, not {asked!r}")
    return number % num_slots


def commit_number(root: Path = ROOT) -> int:
    """Count the commits up to this one. A clone that lacks history, or no clone, counts by the commit's hash, or is 0.

    A hash gives each slot its share of commits, but no promise of one in four.
    """
    if said(root, "rev-parse", "--is-shallow-repository") == "false":
        return int(said(root, "rev-list", "--count", "HEAD") or 0)
    return int(said(root, "rev-parse", "HEAD") or "0", 16)


def said(root: Path, *command: str) -> str:
    try:
        ended = subprocess.run(
            ["git", *command],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()


def missing(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """List files of the rotation that do not exist."""
    return [file for file in files if not (root / file).is_file()]
