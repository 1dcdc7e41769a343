"""Launch files of each system, made from flat names and values, and their import."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from flotilla.importers.build import Imported, build
from flotilla.importers.openrlhf.launch import read_openrlhf
from flotilla.importers.parameter import Parameter, Verdict
from flotilla.importers.source import System
from flotilla.importers.systems import SYSTEMS, read
from flotilla.importers.verl.tools import PATH, TOOLS

ROWS = 100_000

BASES: Mapping[str, Mapping[str, Any]] = {
    "verl": {
        "data.train_files": "train.parquet",
        "data.val_files": "heldout.parquet",
        "actor_rollout_ref.model.path": "model",
        "algorithm.adv_estimator": "grpo",
        "custom_reward_function.path": "grade.py",
        "trainer.total_training_steps": 10,
    },
    "openrlhf": {
        "--pretrain": "model",
        "--prompt_data": "train.jsonl",
        "--apply_chat_template": True,
        "--remote_rm_url": "http://grader:5000/get_reward",
        "--n_samples_per_prompt": 4,
        "--eval_dataset": "heldout.jsonl",
        "--max_steps": 10,
    },
    "roll": {
        "pretrain": "model",
        "actor_train.data_args.file_name": "train.jsonl",
        "actor_train.data_args.messages": "messages",
        "rewards.math.worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
        "rollout_batch_size": 128,
        "response_length": 2048,
        "actor_train.training_args.gradient_accumulation_steps": 2,
        "max_steps": 10,
    },
    "trl": {
        "trainer": "grpo",
        "model": "model",
        "train_dataset": "owner/rows",
        "reward_funcs": ["accuracy_reward"],
        "gradient_accumulation_steps": 2,
        "max_steps": 48,
    },
}


STEPWISE = ("gigpo", "step_reinforce")
ENVIRONMENT = (
    "rollout.episodes={kind: environment, environments: [{environment: sokoban}]}",
    "reward.components=[{kind: environment}]",
)
"""What is written beside ROLL's estimators over steps, where the values have no environment."""


def import_flat(
    system: str,
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    rows: int = ROWS,
    settings: Sequence[str] = (),
) -> Imported:
    """Write the values as the system's users would, read that, and build a spec."""
    kept = {name: value for name, value in values.items() if value is not None or system != "openrlhf"}
    if system == "openrlhf":
        given = read_openrlhf(words_of(kept))
    elif system == "trl":
        given = read(system, yaml.safe_dump(kept), overrides, {}, source="launch.yaml")
    else:
        tools = [kept.pop(name) for name in list(kept) if name.startswith(f"{TOOLS}.")]
        text = yaml.safe_dump(nested({**kept, PATH: "tools.yaml"} if tools else kept))
        files = {"tools.yaml": yaml.safe_dump({"tools": tools})} if tools else {}
        given = read(system, text, overrides, {}, source="launch.yaml", beside=files.get)
    has_none = values.get("adv_estimator") in STEPWISE and "train_env_manager.tags" not in values
    ours = ENVIRONMENT if has_none else ()
    return build(SYSTEMS[system], given, rows=rows, overrides=(*ours, *settings))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        target = document
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return document


def words_of(values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if value is False:
            continue
        words.append(name)
        if value is not True:
            words += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return words


def rows_with(*verdicts: Verdict) -> list[tuple[str, Parameter]]:
    """List the rows of all systems that have one of these verdicts."""
    return [(name, row) for name, system in SYSTEMS.items() for row in rows_of(system) if row.verdict in verdicts]


def rows_of(system: System) -> list[Parameter]:
    return list(system.parameters.values())


def label(value: Any) -> str:
    return value.name if isinstance(value, Parameter) else str(value)
