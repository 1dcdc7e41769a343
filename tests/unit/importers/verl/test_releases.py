"""Files of releases up to 0.3.0 have the silent defaults of these, and say so; others have today's."""

from typing import Any

import pytest

from flotilla.importers.build import Imported, build
from flotilla.importers.systems import SYSTEMS, read
from flotilla.shared.errors import InvalidSpec

ACTOR = "actor_rollout_ref.actor"
REST = {
    "data.train_files": "train.parquet", "data.train_batch_size": 64, "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "grpo", "trainer.total_training_steps": 3,
    f"{ACTOR}.ppo_mini_batch_size": 32,
}  # fmt: skip
OLDER = {"data.val_batch_size": 100, f"{ACTOR}.ppo_micro_batch_size": 8}


def imported(program: str = "verl.trainer.main_ppo", **more: Any) -> Imported:
    words = {**REST, **more}
    text = f"python3 -m {program} " + " ".join(f"{name}={value}" for name, value in words.items())
    return build(SYSTEMS["verl"], read("verl", text, (), {}, source="run.sh"), rows=1000)


def algorithm(**more: Any) -> Any:
    found = imported(**more)
    assert found.may_run(), found.report.render()
    return found.document["algorithm"]


def noted(found: Imported) -> bool:
    return any("releases up to 0.3.0" in each for each in found.report.suggestion)


@pytest.mark.parametrize("sign", [{"algorithm.kl_ctrl.kl_coef": 0.002}, OLDER,
                                  {"critic.model.fsdp_config.grad_offload": False}])  # fmt: skip
def test_an_older_file_takes_the_kl_off_the_reward_adds_entropy_and_has_no_dual_clip(sign: dict[str, Any]) -> None:
    found = imported(**sign)

    assert found.may_run() and noted(found)
    made = found.document["algorithm"]
    assert made["kl"]["placement"] == "reward"
    assert made["kl"]["coefficient"] == sign.get("algorithm.kl_ctrl.kl_coef", 0.001)
    assert made["entropy_coefficient"] == 0.001
    assert made["policy_loss"]["dual_clip"] is None


def test_what_an_older_file_writes_counts() -> None:
    made = algorithm(**OLDER, **{f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0,
                                 "algorithm.kl_ctrl.kl_coef": 0.5})  # fmt: skip

    assert made["kl"]["placement"] == "loss" and made["kl"]["coefficient"] == 0.001
    assert made["entropy_coefficient"] == 0


@pytest.mark.parametrize(
    "newer",
    [{"algorithm.use_kl_in_reward": False}, {f"{ACTOR}.clip_ratio_high": 0.28},
     {f"{ACTOR}.loss_agg_mode": "token-mean"}],
)  # fmt: skip
def test_a_key_of_later_releases_brings_back_todays_defaults(newer: dict[str, Any]) -> None:
    found = imported(**OLDER, **newer)

    assert found.may_run() and not noted(found)
    assert "kl" not in found.document["algorithm"]
    assert found.document["algorithm"]["policy_loss"]["dual_clip"] == 3.0
    assert found.document["algorithm"]["entropy_coefficient"] == 0


def test_a_file_without_such_keys_has_todays_defaults() -> None:
    found = imported(**{f"{ACTOR}.ppo_micro_batch_size": "null"})

    assert not noted(found) and "kl" not in found.document["algorithm"]


def test_a_batch_smaller_than_a_mini_batch_is_one_update() -> None:
    found = imported(**{"data.train_batch_size": 16})

    assert found.may_run(), found.report.render()
    assert found.document["optimisation"]["groups_per_mini_batch"] == 16
    assert found.document["asynchrony"]["require_batches"] == 1
    assert any("one update of them all" in each for each in found.report.suggestion)
    assert not imported(**{"data.train_batch_size": 48}).may_run()


@pytest.mark.parametrize(
    ("policys", "critics", "expected"), [(0.5, 0.25, 8), (0.5, 0.5, None), (0.25, 0.0, 0), (0.0, 0.0, None)]
)
def test_a_critic_warms_up_over_updates_of_its_own(policys: float, critics: float, expected: int | None) -> None:
    found = imported(**{"algorithm.adv_estimator": "gae", "trainer.total_training_steps": 16,
                        f"{ACTOR}.optim.lr_warmup_steps_ratio": policys,
                        "critic.optim.lr_warmup_steps_ratio": critics})  # fmt: skip

    assert found.may_run(), found.report.render()
    assert found.document["algorithm"]["value_loss"].get("warmup_updates") == expected


def test_easyr1_is_refused_by_its_name() -> None:
    text = "python3 -m verl.trainer.main config=examples/config.yaml worker.actor.model.model_path=m trainer.nnodes=1"
    found = build(SYSTEMS["verl"], read("verl", text, (), {}, source="run.sh"), rows=1000)

    assert any("EasyR1's trainer" in each.detail for each in found.report.refused)
    assert not found.may_run()


def test_the_older_name_of_the_recipe_dapo_draws_and_filters() -> None:
    found = imported("recipe.dapo.src.main_dapo", **{"data.gen_batch_size": 192, "algorithm.filter_groups.enable": True,
                     "algorithm.filter_groups.metric": "acc"})  # fmt: skip

    assert found.may_run(), found.report.render()
    assert found.document["reward"]["filter_zero_spread"] is True
    assert found.document["asynchrony"]["require_batches"] == 2


@pytest.mark.parametrize(
    "text",
    [
        'MODEL_PATH=m\nif [ "$SURE" != YES ]; then exit 1; fi\npython3 -m verl.trainer.main_ppo a.b=1',
        "echo nothing here",
        'MODEL_PATH=m\n[ -n "$SURE" ] || exit 1\nbash other.sh',
    ],
)
def test_a_script_that_does_not_reach_its_trainer_becomes_no_spec_of_defaults(text: str) -> None:
    where = "run.sh:2" if "exit" in text else "run.sh"
    with pytest.raises(InvalidSpec, match=f"^{where}: no trainer of verl is started here"):
        read("verl", text, (), {}, source="run.sh")


@pytest.mark.parametrize("written", ["False", "-1"])
def test_false_is_never(written: str) -> None:
    found = imported(**{"trainer.test_freq": written, "trainer.save_freq": written})

    assert found.may_run(), found.report.render()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_model.micro_batch_size", 8), ("reward_model.ulysses_sequence_parallel_size", 2),
        ("reward_model.num_workers", 4), ("reward_model.param_offload", True),
        ("actor_rollout_ref.ref.param_offload", True), ("actor_rollout_ref.profiler.ranks", "[0]"),
        ("actor_rollout_ref.rollout.moe_tensor_parallel_size", 2),
        ("actor_rollout_ref.rollout.cudagraph_capture_sizes", "[1,2]"),
        (f"{ACTOR}.calculate_sum_pi_squared", True), (f"{ACTOR}.checkpoint.strict", False),
        (f"{ACTOR}.checkpoint.contents", "[model,optimizer,extra]"),
        ("actor_rollout_ref.rollout.chat_scheduler",
         "examples.ppo_trainer.naive_chat_scheduler.NaiveChatCompletionScheduler"),
    ],
)  # fmt: skip
def test_keys_that_change_no_result_keep_no_file_out(name: str, value: Any) -> None:
    found = imported(**{name: value})

    assert found.may_run(), found.report.render()
    assert name in {each.name for each in found.report.entries}


def test_a_value_that_a_variable_does_not_have_names_the_variable() -> None:
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$BASE data.train_files=a.parquet"
    found = build(SYSTEMS["verl"], read("verl", text, (), {}, source="run.sh"), rows=1000)

    assert any("BASE is empty in the script: give BASE=VALUE" in each for each in found.report.problems)
    with pytest.raises(InvalidSpec, match="N_GPUS is empty in the script"):
        build(SYSTEMS["verl"], read("verl", f"{text} trainer.n_gpus_per_node=$N_GPUS", (), {}, source="run.sh"))
