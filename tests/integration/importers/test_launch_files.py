"""Real launch files of three systems beside the repository, or in the folder that FLOTILLA_LAUNCH_FILES names."""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.launch_files.files import launch_files
from tests.launch_files.reading import Reading
from tests.launch_files.tried import Tried, tried

FOLDER = Path(os.environ.get("FLOTILLA_LAUNCH_FILES") or Path(__file__).parents[3].parent / "shared" / "launch_files")

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


def test_most_launch_files_are_read_exactly(found: list[Tried]) -> None:
    readings = Counter(each.reading for each in found)

    assert readings[Reading.EXACT] >= 0.8 * len(found), readings
