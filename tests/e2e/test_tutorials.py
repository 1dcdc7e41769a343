"""The tutorials' commands work on the files that the tutorials show, with a model that is here."""

from pathlib import Path

import pytest
import yaml

from tests.contract.shell_text import named_files
from tests.e2e.documented.pages import ROOT
from tests.e2e.documented.scenes import TUTORIALS
from tests.e2e.documented.typing import Reader, Typed
from tests.fleet import make_experiment

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A directory with the tutorials' files, and the agents' example with the same model."""
    home = tmp_path / "home"
    made = tmp_path / "made"
    made.mkdir()
    spec = make_experiment(made)
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        folder = home / "tutorials" / page.stem
        folder.mkdir(parents=True)
        for name, text in named_files(page.read_text(encoding="utf-8")).items():
            (folder / name).write_text(text.replace(MODEL, spec["model"]["path"]))
    agent = yaml.safe_load((ROOT / "examples" / "agent" / "experiment.yaml").read_text())
    del agent["prepare"], agent["checkpoint"]
    agent |= {"model": spec["model"], "data": spec["data"]}
    agent["rollout"] |= {"group_size": 2}
    agent["optimisation"] |= {"steps": 2, "groups_per_mini_batch": 2, "warmup_updates": 0}
    (home / "examples" / "agent").mkdir(parents=True)
    (home / "examples" / "agent" / "experiment.yaml").write_text(yaml.safe_dump(agent))
    return Reader(home)


def test_a_reader_can_follow_the_tutorials(reader: Reader) -> None:
    try:
        for step in TUTORIALS:
            if isinstance(step, Typed):
                reader.types(step)
            else:
                step(reader)
    finally:
        for fleet in reader.home.glob("**/fleet.json"):
            reader.runs(f"flotilla down --data {fleet.parent}")
