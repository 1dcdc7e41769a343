"""Long tests in turn: slots of equal length, chosen by the commit."""

from pathlib import Path

import pytest

from tests.suite.rotation import NUM_SLOTS, SECONDS, commit_number, line_of, missing, slot_of, slots

BUDGET_SECONDS = 1200
"""Of one slot, as measured beside much else: a fleet has half a processor then, so that two cores need about five
minutes. With the tests by day the suite is to stay under 20 minutes."""


def test_every_file_is_in_one_slot_and_slots_are_of_equal_length() -> None:
    dealt = slots(SECONDS)

    assert sorted(file for slot in dealt for file in slot) == sorted(SECONDS)
    assert missing(SECONDS) == []
    assert all(sum(SECONDS[file] for file in slot) <= BUDGET_SECONDS for slot in dealt)
    assert all(slot and str(number) in line_of(number) for number, slot in enumerate(dealt))


def test_what_the_rotation_is_for_is_in_it() -> None:
    assert {
        "tests/faults/test_ranks.py",
        "tests/faults/test_hosts.py",
        "tests/faults/test_two_experiments.py",
        "tests/e2e/test_agents.py",
    } <= SECONDS.keys()


def test_files_are_dealt_longest_first_to_the_shortest_slot() -> None:
    assert slots({"a": 9, "b": 5, "c": 4, "d": 1}, 2) == [["a", "d"], ["b", "c"]]


def test_consecutive_commits_take_all_slots() -> None:
    assert {slot_of(str(number)) for number in range(41, 41 + NUM_SLOTS)} == set(range(NUM_SLOTS))


@pytest.mark.parametrize("asked", ["", "x", "-1", "1.5"])
def test_another_slot_is_refused(asked: str) -> None:
    with pytest.raises(pytest.UsageError, match="number or `commit`"):
        slot_of(asked)


def test_a_folder_that_is_no_clone_has_a_slot_too(tmp_path: Path) -> None:
    assert commit_number(tmp_path / "absent") == 0
