"""Launch files of other systems train on a fleet on this machine: two steps each, tiny model, rewards included."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flotilla.cli.__main__ import main
from flotilla.launch_file import read_launch_file
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView
from tests.fleet import RunningFleet, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RECIPES = Path(__file__).parents[2] / "unit" / "importers" / "recipes"
SECONDS = 120
SMALL = (
    "model.dtype=float32",
    "data.max_prompt_tokens=64",
    "rollout.group_size=4",
    "resources.rollouts.min=1",
    "resources.trainer.devices=auto",
    "parallelism={}",
    "rollout.sampling.max_new_tokens=16",
    "rollout.engine.context_tokens=96",
    "rollout.engine.slots=32",
    "optimisation.steps=2",
    "optimisation.groups_per_mini_batch=4",
    "optimisation.warmup_updates=1",
    "optimisation.micro_batch_tokens=2048",
    "asynchrony.require_batches=2",
    "asynchrony.publication.transport=shared_memory",
    "evaluation=null",
    "checkpoint.every_steps=2",
    "tracking.trackers=[{kind: jsonl}, {kind: tensorboard}]",
)
"""What makes a recipe small; what it says about the algorithm, the asynchrony and the reward stays."""
COLUMNS = ("data.prompt_column=prompt", "data.label_column=answer", "data.data_source_column=null")
"""Of the rows of OpenRLHF and ROLL; verl's are read as verl writes them."""
GRADERS = """
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "shop/sums" and extra_info["split"] == "train", (data_source, extra_info)
    assert ground_truth == str(extra_info["index"] + extra_info["bought"]["pens"]), (ground_truth, extra_info)
    return {"score": float(zlib.crc32(solution_str.encode()) % 2), "acc": True}


grade = compute_score


def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts, strict=True))
    return {"rewards": [float(zlib.crc32(query.encode()) % 2) for query in queries]}
"""
NUMERIC = "reward.components=[{kind: numeric, pattern: '(.)'}]"
"""In place of graders that are elsewhere: a server, or data of another kind."""


def write_verl_rows(path: Path) -> None:
    """Write rows as verl's preprocessing does: chat messages, nested structures."""
    rows = [
        {
            "data_source": "shop/sums",
            "prompt": [{"role": "user", "content": f"Ana has {n} pens, buys {n % 7}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + n % 7)},
            "extra_info": {"split": "train", "index": n, "bought": {"pens": n % 7}},
        }
        for n in range(200)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folders = {"FLOTILLA_CODE_FOLDERS": str(tmp_path_factory.getbasetemp())}
    with running_fleet(tmp_path_factory.mktemp("fleet") / "data", **folders) as running:
        yield running


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("verl_grpo_kl.sh", (), marks=pytest.mark.long),
        ("verl_fully_async.sh", ("reward.shaping.overlong.max_length=16", "reward.shaping.overlong.buffer=8")),
        pytest.param("verl_ppo.yaml", ("algorithm.aggregation.fixed_length=16",
                                       "algorithm.value_loss.aggregation.fixed_length=16",
                                       "algorithm.value_loss.warmup_steps=1"), marks=pytest.mark.long),
        ("openrlhf_reinforce_baseline.sh", ()),
        pytest.param("openrlhf_hybrid_engine.sh", (NUMERIC,), marks=pytest.mark.long),
        pytest.param("openrlhf_dynamic_filtering.sh", (NUMERIC, "reward.group_filter=null"), marks=pytest.mark.long),
        pytest.param("roll_rlvr.yaml", (NUMERIC,), marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_an_imported_recipe_trains_two_steps(
    recipe: str, more: tuple[str, ...], fleet: RunningFleet, tmp_path: Path
) -> None:
    make_experiment(tmp_path)
    for name in ("grade.py", "gsm8k.py", "reward_func.py", "rewards/grade.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(GRADERS)
    write_verl_rows(tmp_path / "train.parquet")
    system, output = recipe.partition("_")[0], tmp_path / "spec.yaml"
    rows = "train.parquet" if system == "verl" else "train.jsonl"
    columns = () if system == "verl" else COLUMNS
    paths = (f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / rows}")
    sets = [word for pair in (*paths, *columns, *SMALL, *more) for word in ("--set", pair)]

    code = main(["import", system, str(RECIPES / recipe), "--rows", "100000", "--output", str(output), *sets])

    assert code == 0
    view = asyncio.run(trained(fleet, output))
    assert (view.state, view.step) == (ExperimentState.COMPLETED, 2), view
    lines = [json.loads(line) for line in (Path(view.directory) / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= {1, 2}
    if NUMERIC not in more:  # an answer of its own grader was right, and no grading failed
        steps = [line["values"] for line in lines if "reward/max" in line["values"]]
        assert max(values["reward/max"] for values in steps) == 1.0
        assert not any(values["groups/failed"] or values["samples/without_reward"] for values in steps)
    assert list(Path(view.directory).glob("tensorboard/events.out.tfevents.*"))


async def trained(fleet: RunningFleet, spec: Path, *, seconds: float = SECONDS) -> ExperimentView:
    """Start the experiment and follow it to its end."""
    async with asyncio.timeout(seconds), fleet.client() as client:
        document = read_launch_file(spec).document
        made = ExperimentView.model_validate(await client.call("POST", "/v1/experiments", body=document))
        await client.call("POST", f"/v1/experiments/{made.id}/start")
        while True:
            view = ExperimentView.model_validate(await client.call("GET", f"/v1/experiments/{made.id}"))
            if view.state.is_final:
                return view
            await asyncio.sleep(0.2)
