"""Whole fleets run beside other files, then beside each other; last, those that want the machine; whatever crashes."""

import json
from itertools import pairwise
from pathlib import Path

from tests.integration.suite.running import run

TIMED = """
import json, os, time
from pathlib import Path
import pytest

@pytest.fixture(autouse=True)
def noted(request):
    begun = time.monotonic()
    yield
    line = json.dumps([request.node.nodeid, begun, time.monotonic()])
    with Path(__file__).parents[1].joinpath("times").open("a") as file:
        file.write(line + "\\n")

@pytest.mark.parametrize("number", range(4))
def test_that_takes_a_moment(number):
    time.sleep(0.1)
"""
CRASHING = """
import os

def test_that_crashes(is_first):
    if is_first:
        os._exit(1)
"""


def test_fleets_come_first_then_side_by_side_then_some_alone(tmp_path: Path) -> None:
    for folder, files in {
        "unit": {"test_a": TIMED, "test_b": TIMED, "test_crash": CRASHING + TIMED},
        "e2e": {"test_c": TIMED, "test_crash_too": CRASHING + TIMED},
        "faults": {"test_d": TIMED, "test_membership": TIMED},
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        for name, content in files.items():
            (tmp_path / folder / f"{name}.py").write_text(content)

    ended = run(tmp_path, "-n", "2", "--retry-failed-alone")

    assert ended.status == 0, ended.output
    assert ended.closing_line == "28 passed, 2 flaky"
    times = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    spans = [(begun, end, name) for name, begun, end in times if "crashes" not in name]
    fleets = [span for span in spans if not span[2].startswith("unit/")]
    alone = [span for span in fleets if "test_membership" in span[2]]
    assert (len(spans), len(fleets), len(alone)) == (28, 16, 4)
    assert max(end for _, end, name in spans if "test_membership" not in name) <= min(begun for begun, _, _ in alone)
    beside = [second for first, second in pairwise(sorted(fleets)) if second[0] < first[1]]
    others_began = max(begun for begun, _, name in spans if name.startswith(("unit/test_a", "unit/test_b")))
    assert all(begun >= others_began for begun, _, _ in beside)
