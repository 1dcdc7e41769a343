"""Keys that releases of verl have under their own names: corrections of 0.6.1, reward models and managers, batches."""

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.importers.adapter import verl_batch_adapter
from flotilla.importers.build import Imported, build
from flotilla.importers.systems import SYSTEMS, read
from tests.unit.importers.sources import BASES, import_flat

RC = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
RM = "reward.reward_model"


def imported(values: dict[str, Any]) -> Imported:
    return import_flat("verl", {**BASES["verl"], **values})


def correction(values: dict[str, Any]) -> Any:
    found = imported({f"{RC}.{name}": value for name, value in values.items()})
    assert found.may_run(), found.report.render()
    return found.document["algorithm"]["correction"]


def refused(found: Imported) -> dict[str, str]:
    return {each.name: each.detail for each in found.report.refused}


@pytest.mark.parametrize(
    ("test", "band"),
    [("token", {"scope": "token"}), ("sequence", {"scope": "sequence", "reduce": "sum"}),
     ("geometric", {"scope": "sequence", "reduce": "mean"})],
)  # fmt: skip
def test_older_tests_bound_a_ratio(test: str, band: dict[str, str]) -> None:
    both = correction({"rollout_rs": test, "rollout_rs_threshold": 1.25, "rollout_rs_threshold_lower": 0.9})
    one = correction({"rollout_rs": test, "rollout_rs_threshold": 1.25})

    assert both["rejections"] == [{**band, "lower": 0.9, "upper": 1.25}]
    assert one["rejections"] == [{**band, "lower": 0.8, "upper": 1.25}]


def test_a_veto_removes_sequences_beside_a_weight() -> None:
    found = correction({"rollout_is": "sequence", "rollout_token_veto_threshold": 1e-4})

    assert found == {"weight": {"level": "sequence", "upper": 2.0}, "veto": {"lower": 1e-4}}


def test_an_older_lower_bound_belongs_to_the_older_tests() -> None:
    found = imported({f"{RC}.rollout_rs": "token_k1", f"{RC}.rollout_rs_threshold": "0.5_2",
                      f"{RC}.rollout_rs_threshold_lower": 0.5})  # fmt: skip

    assert set(refused(found)) == {f"{RC}.rollout_rs_threshold_lower"}


def test_policy_gradient_in_bypass_mode_is_weighed_as_reinforce_and_an_older_test_beside_ppo_is_refused() -> None:
    bypassing = {f"{RC}.bypass_mode": True, f"{RC}.rollout_is": "token"}
    older = imported({**bypassing, f"{RC}.use_policy_gradient": True})
    newer = imported({**bypassing, f"{RC}.loss_type": "reinforce"})
    clipped = imported({**bypassing, f"{RC}.rollout_rs": "geometric", f"{RC}.rollout_rs_threshold": 1.01})

    assert older.may_run() and older.document["algorithm"] == newer.document["algorithm"]
    assert older.document["algorithm"]["policy_loss"] == {"kind": "policy_gradient"}
    assert set(refused(clipped)) == {f"{RC}.rollout_rs"}


@pytest.mark.parametrize(("filters", "batches"), [(False, 6), (True, 2)])
def test_the_recipe_dapo_trains_on_all_that_it_generates_unless_it_filters(filters: bool, batches: int) -> None:
    words = {"data.train_batch_size": 16, "data.gen_batch_size": 48, f"{ACTOR}.ppo_mini_batch_size": 8,
             "algorithm.filter_groups.enable": filters, "algorithm.filter_groups.metric": "acc",
             "actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "grpo",
             "trainer.total_training_steps": 3}  # fmt: skip
    text = "python3 -m recipe.dapo.main_dapo " + " ".join(f"{name}={value}" for name, value in words.items())
    found = build(SYSTEMS["verl"], read("verl", text, (), {}, source="run.sh"), rows=1000)

    assert found.may_run(), found.report.render()
    assert found.document["asynchrony"]["require_batches"] == batches


@pytest.mark.parametrize("declared", ["def", "async def"])
@pytest.mark.parametrize("answer", ["0.5", '{"score": 0.5, "acc": 1}'])
def test_a_function_of_lists_is_called_with_lists_of_one(tmp_path: Path, declared: str, answer: str) -> None:
    function = f"{declared} compute(data_sources, solution_strs, ground_truths, extra_infos, least=0):\n"
    said = "    assert (data_sources, solution_strs, ground_truths, extra_infos) == (['gsm8k'], ['4'], ['5'], [{}])\n"
    (tmp_path / "grade.py").write_text(f"{function}{said}    return [{answer}]\n")
    (tmp_path / "adapter.py").write_text(verl_batch_adapter("grade.py", "compute"))
    names: dict[str, Any] = {"__file__": str(tmp_path / "adapter.py")}
    exec(compile((tmp_path / "adapter.py").read_text(), "adapter.py", "exec"), names)
    sample = SimpleNamespace(label="5", metadata={}, data_source="gsm8k", response="4")

    found = names["score"](sample)
    found = asyncio.run(found) if inspect.isawaitable(found) else found

    assert found == (0.5 if answer == "0.5" else {"reward": 0.5, "metrics": {"acc": 1.0}})


def test_the_manager_batch_needs_a_function_and_writes_its_adapter() -> None:
    manager = {"reward_model.reward_manager": "batch"}
    found = imported(manager)

    assert found.may_run() and "solution_str" in next(iter(found.files.values()))
    assert 'f"{name}s"' in next(iter(found.files.values()))
    assert set(refused(imported({**manager, "custom_reward_function.path": None}))) == {"reward_model.reward_manager"}


@pytest.mark.parametrize(("room", "is_refused"), [(8192, False), (100, True)])
def test_where_a_reward_model_is_served_is_unsupported_and_less_room_than_the_policys_is_refused(
    room: int, is_refused: bool
) -> None:
    found = imported({"custom_reward_function.path": None, f"{RM}.enable": True, f"{RM}.model_path": "r",
                      f"{RM}.rollout.name": "vllm", f"{RM}.rollout.prompt_length": room,
                      f"{RM}.rollout.response_length": 100, f"{RM}.n_gpus_per_node": 8})  # fmt: skip

    assert {f"{RM}.rollout.name", f"{RM}.n_gpus_per_node"} <= {each.name for each in found.report.unsupported}
    assert bool(refused(found)) is is_refused


def test_trainer_and_rollouts_of_several_machines_take_turns_unless_they_are_apart() -> None:
    found = imported({"trainer.nnodes": 2})
    apart = imported({"trainer.nnodes": 2, "actor_rollout_ref.hybrid_engine": False})

    assert found.document["parallelism"]["nodes"] == 2
    assert found.document["resources"] == {"trainer": {"devices": 8}, "rollouts": {"min": 2}, "sharing": "time"}
    assert apart.document["resources"] == {"trainer": {"devices": 8}, "sharing": "none"}


def test_gamma_of_0_and_a_weight_without_lower_bound_are_translated() -> None:
    found = imported({"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.0,
                      f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10,
                      f"{ACTOR}.clip_ratio_high": 0.2})  # fmt: skip

    assert found.may_run(), found.report.render()
    assert found.document["algorithm"]["advantage"]["gamma"] == 0.0
    assert found.document["algorithm"]["policy_loss"] == {"kind": "cispo", "clip_low": 10.0, "clip_high": 0.2}


@pytest.mark.parametrize("written", ["['a.parquet', 'b.parquet']", '["a.parquet","b.parquet"]'])
def test_a_list_that_is_quoted_twice_is_a_list(written: str) -> None:
    found = imported({"data.train_files": written})

    assert [each["path"] for each in found.document["data"]["sources"]] == ["a.parquet", "b.parquet"]
