"""Every command that a page tells a reader to type is typed, or it is said why not."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.contract.shell_text import named_files
from tests.e2e.documented.pages import ROOT, documented
from tests.e2e.documented.scenes import ALL_SCENES, ELSEWHERE, NOT_HERE, SCENES, Scene
from tests.e2e.documented.typing import Reader, Typed
from tests.fleet import make_experiment

LAUNCH_FILES = {
    "run.sh": "python3 -m verl.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=models/m\n",
    "ppo.yaml": """
data: {train_files: train.parquet}
actor_rollout_ref: {model: {path: models/m}}
trainer: {total_training_steps: 3}
""",
    "train.sh": "python3 -m openrlhf.cli.train_ppo_ray --pretrain models/m --prompt_data d.jsonl "
    "--remote_rm_url http://127.0.0.1:9/ --max_steps 3\n",
    "rlvr.yaml": """
exp_name: trial
pretrain: models/m
max_steps: 3
prompt_length: 64
response_length: 64
rollout_batch_size: 4
num_return_sequences_in_group: 4
actor_train: {data_args: {file_name: [train.jsonl]}}
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [math]
""",
}


def lines_of(scene: Scene) -> set[tuple[str, str]]:
    return {(each.page, each.line) for each in scene if isinstance(each, Typed)}


def test_every_documented_command_is_typed_or_it_is_said_why_not() -> None:
    typed = set().union(*map(lines_of, ALL_SCENES.values()))
    excused = [*ELSEWHERE, *NOT_HERE]

    def is_excused(page: str, line: str) -> bool:
        return any(page == where and line.startswith(begin) for where, begin in excused)

    found = set(documented())
    untyped = sorted(line for line in found if line not in typed and not is_excused(*line))
    assert untyped == [], "type it in a scene of tests/e2e/documented/scenes.py, or say there who does, or why not"
    assert sorted(typed - found) == [], "typed, and on no page any more"
    stale = [e for e in excused if not any(page == e[0] and line.startswith(e[1]) for page, line in found)]
    assert stale == [], "excused, and on no page any more"


@pytest.mark.parametrize("why", [*ELSEWHERE.values(), *NOT_HERE.values()])
def test_tests_that_run_a_command_elsewhere_are_there(why: str) -> None:
    assert [name for name in re.findall(r"tests/[\w/]+\.py", why) if not (ROOT / name).exists()] == []


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A directory with what the pages take for granted."""
    home = tmp_path / "home"
    place = home / "examples" / "arithmetic"
    place.mkdir(parents=True)
    sections = {"name": "arithmetic", "optimisation": {"steps": 12}, "checkpoint": {"every_steps": 4, "keep": 999}}
    evaluation = {"path": str(place / "heldout.jsonl"), "max_rows": 8, "every_versions": 4}
    spec = make_experiment(place, evaluation=evaluation, **sections)
    (place / "experiment.yaml").write_text(yaml.safe_dump(spec))
    for name, text in LAUNCH_FILES.items():
        (home / name).write_text(text)
    for page in (ROOT / "docs" / "import").glob("*.md"):
        for name, text in named_files(page.read_text(encoding="utf-8")).items():
            (home / name).write_text(text)
    shutil.copytree(ROOT / "tests" / "unit" / "importers" / "parameters", home / "lists")
    write_own(home / "own", Path(spec["model"]["path"]))
    return Reader(home)


def write_own(folder: Path, model: Path) -> None:
    """Write the files of `Your own model, data and reward`, as the page has them, for a model that is here."""
    page = (ROOT / "docs" / "your-own.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(jsonl|python|yaml)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    folder.mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text(blocks["jsonl"])
    (folder / "grade.py").write_text(blocks["python"])
    spec = yaml.safe_load(blocks["yaml"])
    spec["model"] = {"path": str(model)}
    # A random model is never right: its groups would all be filtered.
    spec["reward"].pop("filter_zero_spread")
    (folder / "experiment.yaml").write_text(json.dumps(spec))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "without-a-fleet" else pytest.mark.long) for name in SCENES]
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reader_can_type_it(name: str, reader: Reader) -> None:
    try:
        for step in SCENES[name]:
            if isinstance(step, Typed):
                reader.types(step)
            else:
                step(reader)
    finally:
        for fleet in reader.home.glob("**/fleet.json"):
            reader.runs(f"flotilla down --data {fleet.parent}")
