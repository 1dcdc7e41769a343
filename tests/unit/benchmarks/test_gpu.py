"""The script for a machine with a GPU: what it found is kept, whatever ends a part."""

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu_place import REHEARSAL
from benchmarks.gpu_resume import resumed_optimiser
from flotilla.services.trainer.models.optimizer import PolicyOptimizer


def test_what_a_part_started_ends_with_it_even_if_it_does_not_want_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "END_SECONDS", 0.3)
    told = tmp_path / "child"
    script = f"trap '' TERM; sleep 60 & echo $! > {told}; wait; wait"
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    while not (told.is_file() and told.read_text().strip()):
        time.sleep(0.01)
    child = psutil.Process(int(told.read_text()))

    gpu.end_group(process)

    assert process.returncode is not None
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running()


def test_figures_of_a_part_that_was_ended_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(command: list[str], **_: object) -> "Hanging":
        report = Path(command[command.index("--alone") + 1])
        gpu.write(report, {"torch": "2", "first": {"seconds": 1.0}})
        return Hanging()

    class Hanging:
        pid, returncode = 0, -9

        def wait(self, seconds: float) -> int:
            raise subprocess.TimeoutExpired("part", seconds)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(gpu, "end_group", lambda _: None)

    found = gpu.run_apart("engine", rehearses=True, seconds=7)

    assert found == {"torch": "2", "first": {"seconds": 1.0}, "failed": "the part was ended after 7 s"}


def test_parts_for_which_there_is_no_time_are_named_and_count_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.json"
    monkeypatch.setattr(
        "sys.argv", ["gpu", "--part", "fleet", "--part", "lora", "--seconds", "40", "--json", str(report)]
    )

    assert gpu.main() == 2

    assert json.loads(report.read_text())["lora"] == {"failed": "left out: 20 s were left"}


def test_a_long_part_leaves_time_to_those_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run_apart(part: str, *, rehearses: bool, seconds: float) -> gpu.Figures:
        given.append(seconds)
        return {}

    monkeypatch.setattr(gpu, "run_apart", run_apart)
    monkeypatch.setattr("sys.argv", ["gpu", "--part", "engine", "--part", "fleet", "--seconds", "570"])
    monkeypatch.delenv("OUT", raising=False)

    assert gpu.main() == 0

    assert given == pytest.approx([450, 550], abs=1)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"seconds": 1.0, "engine": ["failed"]}, False),
        ({"fleet": {"ledger": {"trained": 8, "failed": {}}}}, False),
        ({"fleet": {"ledger": {"trained": 8, "failed": {"timeout": 1}}}}, False),
        ({"failed": "why"}, True),
        ({"0.6B": {"1 samples": {"failed": "why"}}}, True),
    ],
)
def test_a_failure_counts_at_any_depth(figures: gpu.Figures, expected: bool) -> None:
    assert gpu.has_failed(figures) is expected


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_an_optimiser_that_forgets_what_was_saved_is_found(is_offloaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resumed_optimiser(REHEARSAL, is_offloaded=is_offloaded)["same_bits"]

    monkeypatch.setattr(PolicyOptimizer, "load", lambda self, tensors, updates: None)

    with pytest.raises(AssertionError, match="went another way"):
        resumed_optimiser(REHEARSAL, is_offloaded=is_offloaded)
