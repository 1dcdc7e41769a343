"""Real launch files of three systems beside the repository, or in the folder that FLOTILLA_LAUNCH_FILES names."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.launch_files.files import launch_files
from tests.launch_files.outcome import Outcome
from tests.launch_files.reading import Reading
from tests.launch_files.tried import Tried, tried

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("FLOTILLA_LAUNCH_FILES") or ROOT.parent / "shared" / "launch_files")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="there are no launch files beside the repository"),
]


@pytest.fixture(scope="module")
def found() -> list[Tried]:
    return list(tried(launch_files(FOLDER)))


def test_no_launch_file_is_read_differently(found: list[Tried]) -> None:
    assert [(each.id, each.differs) for each in found if each.reading is Reading.DIFFERENT] == []


def test_no_launch_file_ends_in_a_traceback_a_wrong_exit_code_or_a_wrong_spec(found: list[Tried]) -> None:
    assert [(each.id, each.problems) for each in found if each.is_wrong] == []


def test_each_refusal_names_a_capability_that_the_documentation_lists(found: list[Tried]) -> None:
    section = (ROOT / "docs" / "import.md").read_text(encoding="utf-8").partition("## What is not done")[2]
    rows = [row.split(" | ") for row in section.partition("\n## ")[0].splitlines() if row.startswith("| ")][2:]
    words = [word for row in rows for word in re.findall(r"`([^`]+)`", row[1])]
    refused = [each for each in found if each.outcome is not Outcome.TRANSLATED]

    said = {(each.id, text) for each in refused for text in (*each.reasons.values(), *each.problems)}
    assert refused and all(each.reasons or each.problems for each in refused)
    assert sorted(each for each in said if not any(word in each[1] for word in words)) == []
    if "FLOTILLA_LAUNCH_FILES" not in os.environ:
        unused = [word for word in words if not any(word in text for _, text in said)]
        # Of programs that no file here starts, and of what their flags come to as those of train_ppo_ray.
        expected = [
            "data.images does not go with",
            "is given the images of the row",
            "the fleet has no job of this kind",
        ]
        expected += ["reward: this key is required", "leave it out; a script of train_sft"]
        assert unused == expected, "said of no file: take them off the list"


def test_four_of_five_launch_files_become_a_spec(found: list[Tried]) -> None:
    outcomes = Counter(each.outcome for each in found)

    assert outcomes[Outcome.TRANSLATED] >= 0.8 * len(found), outcomes


def test_most_launch_files_are_read_exactly(found: list[Tried]) -> None:
    readings = Counter(each.reading for each in found)

    assert readings[Reading.EXACT] >= 0.97 * len(found), readings
