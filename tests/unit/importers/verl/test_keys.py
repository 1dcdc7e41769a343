"""Keys of verl that say less, or more, than their names: each is read where verl itself reads it, or refused."""

from typing import Any

import pytest

from flotilla.importers.build import Imported, look_up
from flotilla.importers.parameter import Verdict
from tests.unit.importers.sources import BASES, import_flat

ROLLOUT = "actor_rollout_ref.rollout"
ASYNC = {
    **BASES["verl"],
    "data.train_batch_size": 0,
    "async_training.require_batches": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 10,
    "algorithm.adv_estimator": "reinforce_plus_plus",
}


def field(found: Imported, path: str) -> Any:
    assert found.spec is not None, found.report.problems
    return look_up(found.spec.model_dump(mode="json"), path)


def verdicts(found: Imported) -> dict[str, Verdict]:
    return {entry.name: entry.verdict for entry in found.report.entries}


def test_the_fully_async_trainer_reads_the_passes_of_the_section_trainer() -> None:
    limits = {"rollout.total_rollout_steps": 10**9, "trainer.total_epochs": 2, "rollout.total_epochs": 50}

    found = import_flat("verl", {**ASYNC, **limits}, rows=1000)

    assert field(found, "optimisation.steps") == 2 * 1000 // 10
    assert verdicts(found)["trainer.total_epochs"] is Verdict.TRANSLATED
    assert verdicts(found)["rollout.total_epochs"] is Verdict.IGNORED


def test_passes_are_thirty_where_the_fully_async_file_is_silent() -> None:
    found = import_flat("verl", {**ASYNC, "rollout.total_rollout_steps": None}, rows=1000)

    assert field(found, "optimisation.steps") == 30 * 1000 // 10


@pytest.mark.parametrize(("values", "size"), [({}, 1), ({"rollout.n": 8}, 1), ({f"{ROLLOUT}.n": 8, "rollout.n": 4}, 8)])
def test_the_fully_async_trainer_reads_the_groups_size_of_the_engines_section(
    values: dict[str, int], size: int
) -> None:
    found = import_flat("verl", {**ASYNC, "rollout.total_rollout_steps": 1000, **values})

    assert field(found, "rollout.group_size") == size
    assert verdicts(found).get("rollout.n", Verdict.IGNORED) is Verdict.IGNORED


def test_two_different_periods_of_evaluation_are_refused_in_fully_async_training() -> None:
    base = {**ASYNC, "rollout.total_rollout_steps": 1000, "rollout.test_freq": 5}

    assert import_flat("verl", {**base, "trainer.test_freq": 5}).report.refused == []
    refused = import_flat("verl", {**base, "trainer.test_freq": 10}).report.refused
    assert [entry.name for entry in refused] == ["rollout.test_freq"]


@pytest.mark.parametrize(
    ("values", "keep"),
    [
        ({"trainer.remove_previous_ckpt_in_save": True}, 1),
        ({"trainer.remove_previous_ckpt_in_save": True, "trainer.max_actor_ckpt_to_keep": 3}, 1),
        ({"trainer.remove_previous_ckpt_in_save": False, "trainer.max_actor_ckpt_to_keep": 3}, 3),
        ({"trainer.remove_previous_ckpt_in_save": False}, 5),
    ],
)
def test_removing_the_previous_checkpoint_keeps_the_newest_alone(values: dict[str, Any], keep: int) -> None:
    found = import_flat("verl", {**BASES["verl"], "trainer.save_freq": 2, **values})

    assert field(found, "checkpoint.keep") == keep


@pytest.mark.parametrize("name", ["data.video_key", "data.audio_key"])
@pytest.mark.parametrize("value", ["images", "videos", "pictures"])
def test_a_column_of_videos_or_sound_is_refused_by_any_name(name: str, value: str) -> None:
    report = import_flat("verl", {**BASES["verl"], name: value}).report

    assert [entry.name for entry in report.refused] == [name]
    assert "null" in report.refused[0].detail


@pytest.mark.parametrize("name", ["data.image_key", "data.video_key", "data.audio_key"])
def test_no_column_of_images_is_no_refusal(name: str) -> None:
    assert import_flat("verl", {**BASES["verl"], name: None}).report.refused == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_turn.tool_config_path", "tools.yaml"),
        ("multi_turn.function_tool_path", "tools.py"),
        ("multi_turn.interaction_config_path", "user.yaml"),
        ("multi_turn.completion_callback", "module.Callback"),
        ("multi_turn.max_turns", 5),
        ("multi_turn.max_assistant_turns", 5),
        ("multi_turn.max_user_turns", 5),
        ("multi_turn.num_repeat_rollouts", 2),
        ("multi_turn.max_parallel_calls", 4),
        ("multi_turn.anything_new", "x"),
        ("agent.agent_loop_config_path", "agent.yaml"),
        ("agent.agent_loop_manager_class", "module.Manager"),
    ],
)
def test_a_setting_of_turns_tools_or_agents_is_refused_though_nothing_is_enabled(name: str, value: Any) -> None:
    full = f"{ROLLOUT}.{name}"

    report = import_flat("verl", {**BASES["verl"], full: value}).report

    assert [entry.name for entry in report.refused] == [full]
    assert "single turn" in report.refused[0].detail


@pytest.mark.parametrize(
    ("name", "value"), [("enable", True), ("tool_config_path", "tools.yaml"), ("function_tool_path", "tools.py")]
)
def test_a_refused_tool_says_how_the_spec_has_tools(name: str, value: Any) -> None:
    full = f"{ROLLOUT}.multi_turn.{name}"

    (entry,) = import_flat("verl", {**BASES["verl"], full: value}).report.refused

    assert "rollout.episodes={kind: tools" in entry.detail


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_turn.enable", False),
        ("multi_turn.tool_config_path", None),
        ("multi_turn.max_turns", None),
        ("multi_turn.max_parallel_calls", 1),
        ("multi_turn.format", "hermes"),
        ("multi_turn.use_inference_chat_template", False),
        ("agent.agent_loop_config_path", None),
    ],
)
def test_turns_and_tools_at_their_defaults_ask_for_nothing(name: str, value: Any) -> None:
    assert import_flat("verl", {**BASES["verl"], f"{ROLLOUT}.{name}": value}).report.refused == []


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ({"data.train_batch_size": 512, "data.gen_batch_size": 512}, False),
        ({"data.gen_batch_size": 1024}, False),
        ({"data.train_batch_size": 512, "data.gen_batch_size": 1536}, True),
        ({"data.train_batch_size": 512, "data.gen_batch_size": 1}, True),
    ],
)
def test_the_prompts_that_are_generated_must_be_those_of_a_step(values: dict[str, int], is_refused: bool) -> None:
    refused = import_flat("verl", {**BASES["verl"], **values}).report.refused

    assert [entry.name for entry in refused] == (["data.gen_batch_size"] if is_refused else [])


def test_prompts_that_are_generated_as_they_must_be_are_not_said_to_set_anything() -> None:
    found = import_flat("verl", {**ASYNC, "rollout.total_rollout_steps": 1000, "data.gen_batch_size": 1})

    assert verdicts(found)["data.gen_batch_size"] is Verdict.IGNORED


@pytest.mark.parametrize(("is_filtered", "batches", "bounds"), [(True, 10, True), (False, 10, False), (True, 0, False)])
def test_a_bound_on_the_batches_of_a_filter_is_one_on_groups_without_signal(
    is_filtered: bool, batches: int, bounds: bool
) -> None:
    name = "algorithm.filter_groups.max_num_gen_batches"

    found = import_flat("verl", {**BASES["verl"], "algorithm.filter_groups.enable": is_filtered, name: batches})

    assert found.spec is not None, found.report.problems
    bound = found.spec.health.max_groups_without_signal
    assert bound == (batches * found.spec.groups_per_step if bounds else None)
    assert not found.report.refused


def test_a_routers_balance_is_read_only_where_verls_model_has_one() -> None:
    section = "actor_rollout_ref.actor.megatron.override_transformer_config"
    given = {f"{section}.moe_aux_loss_coeff": 0.01, f"{section}.moe_z_loss_coeff": 0.001}

    silent = import_flat("verl", {**BASES["verl"], **given})
    named = import_flat("verl", {**BASES["verl"], **given, f"{section}.moe_router_load_balancing_type": "aux_loss"})

    assert silent.document["optimisation"]["router"] == {"z": 0.001}
    assert named.document["optimisation"]["router"] == {"z": 0.001, "balance": 0.01}


def test_arguments_of_the_reward_function_are_written_into_its_adapter() -> None:
    names = {"custom_reward_function.path": "grade.py", "custom_reward_function.name": "grade"}
    more = {
        "custom_reward_function.reward_kwargs.low": 0.5,
        "reward.custom_reward_function.reward_kwargs.judge.model": "m",
    }

    made = import_flat("verl", {**BASES["verl"], **names, **more})

    assert "MORE = {'low': 0.5, 'judge': {'model': 'm'}}" in next(iter(made.files.values()))
    assert made.report.refused == []


def test_heads_of_several_tokens_that_are_trained_are_refused_and_others_are_set_aside() -> None:
    mtp = "actor_rollout_ref.model.mtp"

    trained = import_flat("verl", {**BASES["verl"], f"{mtp}.enable": True, f"{mtp}.enable_train": True})
    kept = import_flat("verl", {**BASES["verl"], f"{mtp}.enable": True, f"{mtp}.enable_rollout": True,
                                f"{mtp}.method": "mtp", f"{mtp}.enable_train": False})  # fmt: skip

    assert [entry.name for entry in trained.report.refused] == [f"{mtp}.enable_train"]
    assert {entry.name for entry in kept.report.unsupported} == {
        f"{mtp}.enable",
        f"{mtp}.enable_rollout",
        f"{mtp}.method",
    }
    assert kept.report.problems == []


def test_the_floor_of_a_teachers_likeliest_tokens_is_not_read_beside_k1() -> None:
    loss = "distillation.distillation_loss"
    teacher = {"distillation.enabled": True, f"{loss}.loss_mode": "k1", f"{loss}.use_policy_gradient": True,
               f"{loss}.use_task_rewards": False, f"{loss}.log_prob_min_clamp": -10.0, f"{loss}.loss_max_clamp": 10.0,
               "distillation.teacher_model.model_path": "a-teacher", "actor_rollout_ref.rollout.n": 1}  # fmt: skip

    made = import_flat("verl", {**BASES["verl"], **teacher})

    assert (made.report.refused, made.report.problems) == ([], [])
    assert made.spec is not None and made.spec.rollout.group_size == 1
