"""What each system takes by itself, as notes on its sources have it, is what the tables take.

The notes lie beside the working tree, in ``shared/reference``; where they are not the tests are skipped. verl's are in
``defaults/verl.json``, which says of which release and file they are.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flotilla.importers.parameter import UNSET, Inherit
from flotilla.importers.systems import SYSTEMS
from flotilla.importers.values import same

WORDS: dict[str, Any] = {"off": False, "false": False, "true": True, "none": None, "{}": {}}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
ROW = re.compile(r"^\| *([^|]+?) *\|(.*)\|$", re.MULTILINE)
KNOWN = {
    # Silence leaves our own: they say nothing of what is computed, or a rule knows more.
    "openrlhf": {"micro_train_batch_size", "micro_rollout_batch_size", "max_steps", "data.max_len", "save_steps"},
    "roll": {"adv_estimator", "max_running_requests", "actor_train.model_args.disable_gradient_checkpointing"},
}
"""Names whose default in the notes is of another release, or none at all."""


def notes(system: str) -> str:
    for folder in Path(__file__).resolve().parents:
        path = folder / "shared" / "reference" / f"{system}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    pytest.skip(f"there are no notes on {system}")


def told(text: str) -> Any:
    """Read a default as the notes write it; UNSET where it is prose."""
    words = [word.rstrip(";,") for word in text.split()]
    if len(words) > 1 and all(NUMBER.fullmatch(word) for word in words):
        return [float(word) for word in words]
    first = words[0].lower() if words else ""
    return WORDS[first] if first in WORDS else float(first) if NUMBER.fullmatch(first) else UNSET


def defaults(system: str) -> dict[str, Any]:
    """Return the defaults that the notes tell, by the names of our tables."""
    table, found = SYSTEMS[system], {}
    for match in ROW.finditer(notes(system)):
        cells = [cell.strip() for cell in match[2].split("|")]
        written = cells[1] if system == "openrlhf" and len(cells) == 4 else cells[0]
        is_row = len(cells) == (4 if system == "openrlhf" else 3)
        for name in match[1].split(",") if is_row else ():
            bare = name.strip().strip("()`")
            for spelling in (f"--{bare}", bare, f"actor_train.{bare}", f"actor_infer.{bare}"):
                row = table.find(spelling)
                if row is not None and not row.is_tree and (value := told(written)) is not UNSET:
                    found[row.name] = value
                    break
    return found


@pytest.mark.parametrize(("system", "least"), [("openrlhf", 60), ("roll", 40)])
def test_the_tables_take_what_the_system_takes_by_itself(system: str, least: int) -> None:
    found, table = defaults(system), SYSTEMS[system]

    wrong = {}
    for name, value in found.items():
        ours = table.parameters[name].default
        is_silent = ours is UNSET or isinstance(ours, Inherit) or name.lstrip("-") in KNOWN[system]
        if not is_silent and ours != value and not (not ours and not value):
            wrong[name] = (ours, value)

    assert wrong == {}
    assert len(found) >= least


OTHERWISE = {
    "actor_rollout_ref.actor.optim.warmup_style": "the older name of lr_scheduler_type, which has the default",
    "actor_rollout_ref.actor.checkpoint.save_contents": "silence keeps everything here, which is what verl lists",
    "data.video_key": "verl names a column that rows without videos lack",
    "data.audio_key": "verl names a column that rows without sound lack",
    "custom_reward_function.name": "the older name of reward.custom_reward_function.name, which has the default",
    "reward_model.reward_manager": "the older name of reward.reward_manager.name, which has the default",
    "algorithm.filter_groups.metric": "without effect until filter_groups.enable is true, which wants a metric",
    "distillation.teacher_models.teacher_model.num_replicas": "how many servers a teacher has is not said by a spec",
    "trainer.n_gpus_per_node": "a rule takes 8 where nnodes is above 1, and one process where neither is written",
}
"""Names of verl's whose default is another here, with why that means the same."""


def test_the_tables_take_what_verl_takes_by_itself() -> None:
    listed = json.loads((Path(__file__).parent / "defaults" / "verl.json").read_text(encoding="utf-8"))
    wrong = {}
    for name, value in listed["defaults"].items():
        row = SYSTEMS["verl"].find(name)
        assert row is not None, name
        if not same(row.default, value) and row.default != value and not (not row.default and not value):
            wrong[name] = (row.default, value)

    assert {name: found for name, found in wrong.items() if name not in OTHERWISE} == {}
    assert OTHERWISE.keys() <= wrong.keys(), "these agree by now: take them off the list"
    assert listed["release"] and listed["file"] and len(listed["defaults"]) > 150
