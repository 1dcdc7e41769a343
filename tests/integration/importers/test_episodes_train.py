"""Launch files with environments and with tools train three steps each, on a fleet on this machine.

Two are here, in the words of those systems' own examples. Users' own are taken from the folder that
FLOTILLA_LAUNCH_FILES names; without it they are skipped.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.shared.schemas.experiment import ExperimentState
from tests.fleet import RunningFleet, make_experiment, running_fleet
from tests.integration.importers.test_recipes_train import trained, write_verl_rows
from tests.unit.importers.roll.test_environments import FILE as LAKE_AND_ROOM
from tests.unit.importers.roll.test_environments import ROOM, STEPWISE
from tests.unit.importers.roll.test_environments import STEPS as STEPS_OF_LAKE
from tests.unit.importers.sources import nested
from tests.unit.importers.verl.test_tools import CALCULATOR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

FOLDER = os.environ.get("FLOTILLA_LAUNCH_FILES", "")
STEPS, CONTEXT = 3, 4096
SMALL = (
    "model.dtype=float32",
    "model.attention=auto",
    "model.kernels=auto",
    "rollout.group_size=2",
    "rollout.sampling.max_new_tokens=8",
    f"rollout.engine.context_tokens={CONTEXT}",
    "rollout.engine.slots=8",
    f"optimisation.steps={STEPS}",
    "optimisation.groups_per_mini_batch=2",
    "optimisation.warmup_updates=0",
    f"optimisation.micro_batch_tokens={CONTEXT}",
    "asynchrony.require_batches=1",
    "asynchrony.publication.transport=shared_memory",
    "evaluation=null",
    f"checkpoint.every_steps={STEPS}",
    "parallelism={device: cpu}",
    "resources={}",
    "rollout.engine.device=cpu",
    "tracking.trackers=[{kind: jsonl}]",
)
"""What makes a recipe small; what it says about episodes, tools and the algorithm stays."""


def tool(kind: str, name: str) -> dict[str, Any]:
    function = {"name": name, "description": f"{name}.", "parameters": {"type": "object", "properties": {}}}
    return {"class_name": kind, "config": {}, "tool_schema": {"type": "function", "function": function}}


TOOLS = {
    "gsm8k_tool_config.yaml": tool("verl.tools.gsm8k_tool.Gsm8kTool", "calc_gsm8k_reward"),
    "sandbox_fusion_tool_config.yaml": tool("recipe.retool.retool.CustomSandboxFusionTool", "code_interpreter"),
}
VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \
    data.val_files=train.parquet data.return_raw_chat=True actor_rollout_ref.model.path=model \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=conf/sandbox_fusion_tool_config.yaml \
    custom_reward_function.path=checks.py custom_reward_function.name=compute_score trainer.total_training_steps=3
"""
MULTI_TURN = """
defaults: [ppo_trainer, _self_]
actor_rollout_ref:
  rollout: {name: sglang, multi_turn: {enable: True, max_assistant_turns: 5}}
"""
RETOOL = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(zlib.crc32(solution_str.encode()) % 2)
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folders = {"FLOTILLA_CODE_FOLDERS": str(tmp_path_factory.getbasetemp())}
    with running_fleet(tmp_path_factory.mktemp("fleet") / "data", sandbox=True, **folders) as running:
        yield running


def launch_file(system: str, name: str) -> dict[str, Any]:
    if not FOLDER:
        pytest.skip("FLOTILLA_LAUNCH_FILES names no folder of launch files")
    files = json.loads((Path(FOLDER) / f"{system}.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = next(each for each in files if each["id"] == name)
    return found


def make_roomy_model(directory: Path) -> None:
    """Make the tiny model, with room for prompts of which its tokenizer makes a token of nearly each letter."""
    make_experiment(directory)
    config = directory / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))


def run(fleet: RunningFleet, system: str, path: Path, *sets: str, options: tuple[str, ...] = ()) -> list[str]:
    """Import a file, train it, and return the names of what was measured."""
    make_roomy_model(path.parent)
    output = path.parent / "spec.yaml"
    words = [word for pair in (f"model.path={path.parent / 'model'}", *SMALL, *sets) for word in ("--set", pair)]
    code = main(["import", system, str(path), "--rows", "1000", "--output", str(output), *options, *words])
    assert code == 0
    view = asyncio.run(trained(fleet, output, seconds=400))
    assert (view.state, view.step) == (ExperimentState.COMPLETED, STEPS), view
    lines = [json.loads(line) for line in (Path(view.directory) / "metrics.jsonl").read_text().splitlines()]
    return sorted({name for line in lines for name in line["values"]})


def write_tools(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in TOOLS.items():
            (folder / name).write_text(yaml.safe_dump({"tools": [content]}))


def test_environments_of_roll_train(fleet: RunningFleet, tmp_path: Path) -> None:
    path = tmp_path / "agentic.yaml"
    path.write_text(yaml.safe_dump(nested(LAKE_AND_ROOM)))

    measured = run(fleet, "roll", path)

    assert {"grader/environment/success/mean", "grader/episode/turns/mean"} <= set(measured)


@pytest.mark.long
def test_steps_of_rolls_manager_train_as_sequences_of_their_own(fleet: RunningFleet, tmp_path: Path) -> None:
    changes = {name.replace("__", "."): value for name, value in STEPWISE.items()}
    room = ROOM | {"env_manager_cls": "StepEnvManager", "agent_template": "{current_observation}"}
    path = tmp_path / "steps.yaml"
    path.write_text(
        yaml.safe_dump(nested(LAKE_AND_ROOM | changes | {"custom_envs.Lake": STEPS_OF_LAKE, "custom_envs.Room": room}))
    )

    measured = run(fleet, "roll", path)

    assert {"grader/environment/success/mean", "grader/episode/turns/mean"} <= set(measured)


@pytest.mark.long
def test_a_tool_class_of_verls_users_trains(fleet: RunningFleet, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL.replace("sandbox_fusion_tool_config", "own_tool_config"))
    (tmp_path / "checks.py").write_text(RETOOL)
    (tmp_path / "tools_of_mine").mkdir()
    (tmp_path / "tools_of_mine" / "calculator.py").write_text(CALCULATOR)
    (tmp_path / "conf").mkdir()
    own = tool("tools_of_mine.calculator.Calculator", "sum_up") | {"config": {"factor": 10}}
    (tmp_path / "conf" / "own_tool_config.yaml").write_text(yaml.safe_dump({"tools": [own]}))
    write_verl_rows(tmp_path / "train.parquet")

    measured = run(fleet, "verl", tmp_path / "run.sh", f"data.path={tmp_path / 'train.parquet'}")

    assert "grader/tools/calls/mean" in measured


@pytest.mark.long
def test_a_code_interpreter_of_verl_trains(fleet: RunningFleet, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    (tmp_path / "checks.py").write_text(RETOOL)
    write_tools(tmp_path / "conf")
    write_verl_rows(tmp_path / "train.parquet")

    measured = run(fleet, "verl", tmp_path / "run.sh", f"data.path={tmp_path / 'train.parquet'}")

    assert "grader/tools/calls/mean" in measured


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "roll-0.3/examples/qwen2.5-0.5B-agentic/agent_val_frozen_lake.yaml",
        "roll-0.2.1/examples/qwen2.5-0.5B-agentic/agent_val_frozen_lake_async_amd.yaml",
        "roll-0.3/examples/qwen2.5-0.5B-agentic/agent_val_frozen_lake_gigpo.yaml",
        "roll-0.2.1/examples/qwen3-30BA3B-agentic_fsdp2/agentic_val_sokoban_30a3.yaml",
    ],
)
def test_a_file_of_rolls_agentic_pipeline_trains(name: str, fleet: RunningFleet, tmp_path: Path) -> None:
    found = launch_file("roll", name)
    path = tmp_path / "launch" / "agentic.yaml"
    path.parent.mkdir()
    path.write_text(found["text"])
    for beside, text in found["beside"].items():
        file = (path.parent / beside).resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    measured = run(fleet, "roll", path, options=("--allow-refused",))

    assert {"grader/environment/success/mean", "grader/episode/turns/mean"} <= set(measured)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("verl-0.6.1/recipe/retool/run_qwen2-32b_dapo.sh", ("data.sources=[{path: ROWS}]",)),
        (
            "verl-0.9/verl/experimental/fully_async_policy/shell/dapo_7b_async_retool.sh",
            ("data.sources=[{path: ROWS}]",),
        ),
        (
            "verl-0.6.1/examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh",
            ("data.path=ROWS", "reward.components=[{kind: numeric, pattern: '(.)'}]"),
        ),
    ],
)
def test_a_file_of_verls_with_tools_trains(
    name: str, sets: tuple[str, ...], fleet: RunningFleet, tmp_path: Path
) -> None:
    found = launch_file("verl", name)
    (tmp_path / "run.sh").write_text(found["text"])
    config = tmp_path / "examples" / "sglang_multiturn" / "config"
    write_tools(tmp_path / "recipe" / "retool", config / "tool_config")
    (config / "gsm8k_multiturn_grpo.yaml").write_text(MULTI_TURN)
    (tmp_path / "recipe" / "retool" / "retool.py").write_text(RETOOL)
    write_verl_rows(tmp_path / "train.parquet")

    given = [each.replace("ROWS", str(tmp_path / "train.parquet")) for each in sets]
    measured = run(
        fleet, "verl", tmp_path / "run.sh", *given, "data.max_prompt_tokens=512", options=("--allow-refused",)
    )

    assert "grader/tools/calls/mean" in measured
