"""Whenever a trainer is killed while it writes a checkpoint, the one before is the newest that is whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.shared.checkpoints.folders import check_files
from tests.fleet import ROOT, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAM = """
import sys, threading
from pathlib import Path
import torch
from flotilla.services.trainer.checkpoint.manager import CheckpointManager, Progress, beginning
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from tests.unit.trainer.builders import a_spec, uneven_groups

directory, model = map(Path, sys.argv[1:])
spec = a_spec(model={"path": str(model)}, optimisation={"steps": 3, "groups_per_mini_batch": 2})
line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=3)
manager = CheckpointManager("e", CheckpointStorage(directory, keep=1))
learner, progress = beginning(spec, torch.device("cpu")).learner, Progress.start()
for step in (1, 2):
    learner.train(uneven_groups(2, seed=step), step)
    progress.step = step
    if step == 2:
        arm_process("trainer-worker")
    copied = manager.copy(learner, progress, line)
    writing = threading.Thread(target=manager.write, args=(copied,))
    writing.start()
    if step == 2:
        learner.train(uneven_groups(2, seed=3), 3)
    writing.join()
"""


@pytest.mark.parametrize(
    ("point", "newest"),
    [
        ("checkpoint.copy kill", 1),
        ("checkpoint.file kill nth=1", 1),
        ("checkpoint.file kill nth=2", 1),
        ("checkpoint.write kill", 1),
        ("trainer.step kill", 2),
    ],
)
def test_the_last_whole_checkpoint_stays(tmp_path: Path, point: str, newest: int) -> None:
    storage = CheckpointStorage(tmp_path / "checkpoints", keep=1)

    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(storage.directory), str(tiny_model())],
        cwd=ROOT,
        env=os.environ | {"FLOTILLA_FAULTS": point},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    # No step of the loop is computed here: the last point is none, and shows that the others are.
    assert ended.returncode == (0 if newest == 2 else -signal.SIGKILL), ended.stderr
    (stored,) = storage.complete()
    assert stored.step == newest
    check_files(stored)
    storage.sweep()
    assert [each.name for each in storage.directory.iterdir()] == [stored.path.name]
