"""ROLL's environments become ours: tags and their shares, options, turns, seeds; what is not offered is named."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from flotilla.importers.build import Imported
from flotilla.importers.parameter import Verdict
from flotilla.importers.roll.environments import FIRST_HELD_OUT, HELD_OUT_TASKS, MOST_ROWS, TASKS
from flotilla.services.rollout.environments import conversation as conversation_module
from flotilla.services.rollout.environments.conversation import EnvironmentConversations
from flotilla.services.rollout.environments.loading import load_environment
from flotilla.shared.config.sections.advantage import StepReinforceConfig
from flotilla.shared.config.sections.episodes import EnvironmentConfig, EnvironmentEpisodesConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.task import Message
from flotilla.shared.testing.builders import a_task
from tests.unit.importers.sources import import_flat

LAKE = {
    "env_type": "frozen_lake",
    "max_steps": 8,
    "max_tokens_per_step": 64,
    "env_manager_cls": "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager",
    "use_thread_lock": True,
    "agent_system_template": "You play.",
    "agent_template": "Turn {turn_idx}, {actions_left} left, {max_response_length} tokens:\n{observation}",
    "env_config": {"is_slippery": False, "format_penalty": -0.02, "action_pattern": "<a>(.*?)</a>", "max_steps": 8},
}
ROOM = {
    "env_type": "sokoban",
    "max_steps": 8,
    "env_config": {
        "dim_room": [6, 6], "num_boxes": 1, "search_depth": 30, "max_steps": 8, "env_instruction": "Push.",
        "grid_lookup": {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"},
    },
}  # fmt: skip
FILE: dict[str, Any] = {
    "pretrain": "model",
    "adv_estimator": "grpo",
    "rollout_batch_size": 64,
    "sequence_length": 1024,
    "max_steps": 10,
    "eval_steps": 5,
    "reward_normalization.grouping": "traj_group_id",
    "reward_normalization.method": "mean_std",
    "actor_train.training_args.per_device_train_batch_size": 2,
    "actor_train.training_args.gradient_accumulation_steps": 16,
    "train_env_manager.tags": ["Lake", "Room"],
    "train_env_manager.num_groups_partition": [6, 2],
    "train_env_manager.num_env_groups": 8,
    "train_env_manager.group_size": 8,
    "train_env_manager.generating_args": {"temperature": 0.99, "top_k": 100},
    "val_env_manager.tags": ["Lake"],
    "val_env_manager.num_env_groups": 16,
    "custom_envs.Lake": LAKE,
    "custom_envs.Room": ROOM,
}


def imported(**changes: Any) -> Imported:
    return import_flat("roll", FILE | {name.replace("__", "."): value for name, value in changes.items()})


def rows(found: Imported, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.files[name].splitlines()]


def test_tags_become_environments_groups_and_rows() -> None:
    found = imported()

    assert found.may_run(), found.report.render()
    spec = found.spec
    assert spec is not None
    episodes = spec.rollout.episodes
    assert isinstance(episodes, EnvironmentEpisodesConfig)
    assert (spec.rollout.group_size, episodes.max_turns, spec.rollout.engine.context_tokens) == (8, 8, 1024)
    assert (spec.rollout.sampling.max_new_tokens, spec.rollout.sampling.top_k) == (64, 100)
    assert episodes.redundant_members == 0
    # 64 trajectories of a step are 8 groups, 32 of an update 4.
    assert (spec.optimisation.groups_per_mini_batch, spec.asynchrony.require_batches) == (4, 2)
    lake, room = episodes.environments
    assert lake.options == {"is_slippery": False, "format_penalty": -0.02, "action_pattern": "<a>(.*?)</a>"}
    assert room.options["symbols"] == "W.GCBA@" and room.options["size"] == 6
    trained, held_out = rows(found, TASKS), rows(found, HELD_OUT_TASKS)
    assert len(trained) == 80 and len({row["seed"] for row in trained}) == 80
    assert [sum(row["tag"] == tag for row in trained) for tag in ("Lake", "Room")] == [60, 20]
    assert [row["seed"] for row in held_out] == list(range(FIRST_HELD_OUT, FIRST_HELD_OUT + 16))
    assert trained[0]["prompt"] == [{"role": "system", "content": "You play."}]
    for environment in episodes.environments:
        load_environment(environment)
    aside = {entry.name for entry in found.report.unsupported}
    assert {"train_env_manager.num_env_groups", "custom_envs.Lake.use_thread_lock"} <= aside


async def test_turns_are_shown_as_the_manager_showed_them() -> None:
    found = imported()
    assert found.spec is not None
    assert isinstance(found.spec.rollout.episodes, EnvironmentEpisodesConfig)
    row = rows(found, TASKS)[0]
    messages = tuple(Message(**each) for each in row["prompt"])
    task = a_task(messages=messages, metadata={"seed": row["seed"]}, data_source=row["tag"])
    conversation = EnvironmentConversations(found.spec.rollout.episodes)(task, 0)

    opening = await conversation.begin()
    following = await conversation.answer("<a>Left</a>", is_cut=False)

    system, first = opening.messages
    assert (system.role, system.content) == ("system", "You play.")
    assert first.content.startswith("You walk over a frozen lake") and "Turn 1, 8 left, 64 tokens:\n" in first.content
    if following.messages:
        assert following.messages[0].content.startswith("Turn 2, 7 left, 64 tokens:\n")


def test_redundant_environments_are_redundant_members() -> None:
    found = imported(train_env_manager__group_size_redundancy=2)

    assert found.may_run(), found.report.render()
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, EnvironmentEpisodesConfig)
    assert (found.spec.rollout.group_size, found.spec.rollout.episodes.redundant_members) == (8, 2)


def test_rows_are_bounded() -> None:
    assert len(rows(imported(max_steps=100_000), TASKS)) == MOST_ROWS


def test_the_managers_penalty_is_that_of_environments_without_one() -> None:
    found = imported(train_env_manager__format_penalty=-0.5)

    assert found.spec is not None and isinstance(found.spec.rollout.episodes, EnvironmentEpisodesConfig)
    assert [each.options["format_penalty"] for each in found.spec.rollout.episodes.environments] == [-0.02, -0.5]


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"custom_envs__Room": {"env_type": "deepeyes"}}, "custom_envs.Room.env_type", "deepeyes is not offered"),
        ({"custom_envs__Lake": {"env_type": "game:Wordle-v0", "max_steps": 8, "max_tokens_per_step": 64,
                                   "tool_wrapper": {"tool_configs": [{"tool_id": "browser"}]}}},
         "custom_envs.Lake.tool_wrapper.tool_configs", "not browser"),
        ({"custom_envs__Lake": LAKE | {"env_manager_cls": "x.VLTrajEnvManager"}}, "custom_envs.Lake.env_manager_cls",
         "VLTrajEnvManager shows images"),
        ({"custom_envs__Lake": LAKE | {"env_manager_cls": "x.StepEnvManager",
                                       "agent_template": "{current_observation}"}},
         "custom_envs.Lake.env_manager_cls", "compares each turn's own reward"),
        ({"custom_envs__Lake": LAKE | {"agent_template": "{history} {observation}"}}, "custom_envs.Lake.agent_template",
         "{turn_idx}"),
        ({"custom_envs__Lake": LAKE | {"agent_template": "{turn_idx}"}}, "custom_envs.Lake.agent_template",
         "the observation must be"),
        ({"custom_envs__Lake": LAKE | {"env_config": {"wind": 1}}}, "custom_envs.Lake.env_config.wind",
         "no such option"),
        ({"custom_envs__Room": ROOM | {"max_steps": 9}}, "custom_envs.Lake.max_steps", "one number of turns"),
        ({"train_env_manager__group_filter_cls": "x.Filter"}, "train_env_manager.group_filter_cls", "not offered"),
        ({"reward_normalization__grouping": "tags"}, "reward_normalization.grouping", "one at a time"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused_by_name(changes: dict[str, Any], name: str, words: str) -> None:
    found = imported(**changes)

    refused = {entry.name: entry.detail for entry in found.report.entries if entry.verdict is Verdict.REFUSED}
    assert words in refused[name]
    assert set(refused) == {name}
    assert found.may_run(allow_refused=True) and not found.may_run()


def test_without_an_environment_that_is_offered_there_is_no_spec() -> None:
    found = imported(
        train_env_manager__tags=["Web"], val_env_manager__tags=["Web"], custom_envs__Web={"env_type": "web"}
    )

    assert not found.may_run(allow_refused=True)
    assert any("none of the environments is offered" in problem for problem in found.report.problems)


def test_a_file_that_only_samples_is_no_experiment() -> None:
    found = import_flat("roll", {name: value for name, value in FILE.items() if not name.startswith("actor_train.")})

    assert not found.may_run(allow_refused=True)
    assert any("only samples" in problem for problem in found.report.problems)


def test_a_step_that_is_smaller_than_an_update_is_one_update() -> None:
    found = imported(actor_train__training_args__gradient_accumulation_steps=256)

    assert found.may_run() and found.spec is not None, found.report.render()
    assert (found.spec.optimisation.groups_per_mini_batch, found.spec.asynchrony.require_batches) == (8, 1)


def test_what_actor_infer_says_of_sampling_wins_over_the_manager() -> None:
    found = imported(actor_infer__generating_args__temperature=0.5, actor_infer__generating_args__max_new_tokens=32)

    assert found.may_run() and found.spec is not None, found.report.render()
    sampling = found.spec.rollout.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (0.5, 50, 32)


class Counting:
    """Stands for an environment of GEM's: says how often it was begun, and ends after two steps."""

    made = 0

    def __init__(self, **config: Any) -> None:
        type(self).made += 1
        self.config, self.number, self.episodes = config, type(self).made, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.episodes, self.turn = self.episodes + 1, 0
        return f"{self.number}.{self.episodes} seed {seed}", {"env_instruction": "Count."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"saw {action}", 0.5, self.turn == 2, False, {"metrics": {"success": True}, "suffix": "x"}


def test_environments_of_gem_are_played_by_a_file_beside_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counting.made = 0
    asked: list[tuple[str, dict[str, Any]]] = []

    def make(env_id: str, **config: Any) -> Counting:
        asked.append((env_id, config))
        return Counting(**config)

    questions = types.ModuleType("gem.envs.math_env")
    vars(questions)["MathEnv"] = Counting
    monkeypatch.setitem(sys.modules, "gem", types.SimpleNamespace(make=make))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "gem.envs.math_env", questions)
    each: dict[str, Any] = {"max_steps": 8, "max_tokens_per_step": 64}
    game = {**each, "env_type": "game:Wordle-v0", "env_config": {"word_length": 5}}
    questions_of = {**each, "env_type": "roll_math", "env_config": {"dataset_name": "owner/rows"}}
    found = imported(custom_envs__Lake=game, custom_envs__Room=questions_of)

    assert found.may_run(), found.report.render()
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, EnvironmentEpisodesConfig)
    (tmp_path / "roll_environments.py").write_text(found.files["roll_environments.py"])
    sections = [
        each.model_copy(update={"environment": f"{tmp_path}/{each.environment}"})
        for each in found.spec.rollout.episodes.environments
    ]
    wordle, rows = (load_environment(each) for each in sections)
    first, second = wordle(), wordle()
    observation, info = first.reset(3)
    assert observation == info["remembered"] == "1.1 seed 3"
    assert (info["instruction"], info["metrics"], info["is_valid"]) == ("Count.", {}, True)
    assert second.reset(4)[0] == "3.1 seed 4"
    assert first.step("a")[2] is False
    assert first.step("b")[:4] == ("saw b", 0.5, True, False)
    assert wordle().reset(5)[0] == "1.2 seed 5"
    assert asked == [("game:Wordle-v0", {"word_length": 5})] * 2
    assert rows().reset(1)[0] == "2.1 seed 1"


def with_tools(*tools: dict[str, Any]) -> dict[str, Any]:
    wrapper = {"wrapper_args": {"max_tool_uses": 2}, "tool_configs": list(tools)}
    return {"max_steps": 8, "max_tokens_per_step": 64, "env_type": "roll_qa", "env_config": {}, "tool_wrapper": wrapper,
            "agent_template": "{observation}\n{suffix}\n"}  # fmt: skip


def played(found: Imported, tmp_path: Path) -> Any:
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, EnvironmentEpisodesConfig)
    (tmp_path / "roll_environments.py").write_text(found.files["roll_environments.py"])
    section = found.spec.rollout.episodes.environments[0]
    return load_environment(section.model_copy(update={"environment": f"{tmp_path}/{section.environment}"}))


def test_tools_of_an_environment_wrap_it_as_roll_does_and_programs_run_in_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped: list[tuple[Any, Any]] = []

    def tool_wrapper(env: Any, wrapper_args: Any, tool_configs: Any) -> Any:
        wrapped.append((wrapper_args, tool_configs))
        return env

    module = types.ModuleType("roll.pipeline.agentic.tools.tool_env_wrapper")
    vars(module)["tool_wrapper"] = tool_wrapper
    questions = types.ModuleType("gem.envs.qa_env")
    vars(questions)["QaEnv"] = Counting
    monkeypatch.setitem(sys.modules, "gem", types.ModuleType("gem"))
    monkeypatch.setitem(sys.modules, "gem.envs.qa_env", questions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    search = {"tool_id": "search", "tool_args": {"search_url": "http://passages/retrieve"}}
    code = {"tool_id": "python_code", "tool_args": {"timeout": 5, "sandbox_type": "none"}}

    found = imported(custom_envs__Lake=with_tools(search, code), custom_envs__Room=with_tools(search, code))
    environment = played(found, tmp_path)()

    assert environment.reset(1)[0].endswith("seed 1\n")
    assert environment.step("a")[0] == "saw a\nx"
    assert wrapped[0][0] == {"max_tool_uses": 2}
    assert [each["tool_args"].get("sandbox_type") for each in wrapped[0][1]] == [None, "bwrap"]


def test_programs_of_the_policy_without_bubblewrap_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = types.ModuleType("gem.envs.qa_env")
    vars(questions)["QaEnv"] = Counting
    monkeypatch.setitem(sys.modules, "gem", types.ModuleType("gem"))
    monkeypatch.setitem(sys.modules, "gem.envs.qa_env", questions)
    monkeypatch.setattr("shutil.which", lambda name: None)
    each = with_tools({"tool_id": "python_code", "tool_args": {}})

    with pytest.raises(InvalidSpec, match="bwrap"):
        played(imported(custom_envs__Lake=each, custom_envs__Room=each), tmp_path)


STEPWISE = {"adv_estimator": "gigpo", "reward_normalization__method": "mean", "step_reward_gamma": 0.9}
STEPS = LAKE | {
    "env_manager_cls": "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager",
    "history_length": 5,
    "agent_template": "{env_instruction} {{x}} {step_count} of {history_length}: [{history}]\n"
                      "{current_step}: [{current_observation}] {max_response_length}",
}  # fmt: skip


class Lamp:
    """Says what happened, with a suffix; odd texts are no actions."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "off", {"env_instruction": "Light it.", "suffix": "go"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_valid = action != "?"
        info = {"metrics": {"action_is_valid": is_valid}, "action_content": action.upper(), "suffix": "more"}
        return f"saw {action}", -0.5 + is_valid, False, False, info


async def shown_by(found: Imported, texts: list[str]) -> list[str]:
    """Play some texts in the first environment of a spec, and return what the policy is shown each time."""
    assert found.may_run(), found.report.render()
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, EnvironmentEpisodesConfig)
    row = rows(found, TASKS)[0]
    prompt = row["prompt"] or [{"role": "user", "content": ""}]
    task = a_task(0, messages=tuple(Message(**each) for each in prompt), data_source=row["tag"], metadata=row)
    conversation = EnvironmentConversations(found.spec.rollout.episodes)(task, 0)
    replies = [await conversation.begin()]
    for text in texts:
        replies.append(await conversation.answer(text, is_cut=False))
    assert all(each.is_fresh for each in replies[1:])
    return ["|".join(f"{each.role}: {each.content}" for each in reply.messages) for reply in replies]


async def test_steps_have_a_prompt_of_their_own_as_rolls_manager_writes_it() -> None:
    room = ROOM | {"env_manager_cls": "StepEnvManager", "agent_template": "{current_observation}"}
    found = imported(**STEPWISE, custom_envs__Lake=STEPS, custom_envs__Room=room)

    first, second, third = await shown_by(found, ["<a>Fly</a>", "none"])

    lake = first.partition("1: [")[2].partition("]")[0]
    say = first.partition("user: ")[2].partition(" {x}")[0]
    assert say.startswith("You walk over a frozen lake")
    assert first == f"system: You play.|user: {say} {{x}} 0 of 0: []\n1: [{lake}] 64"
    tips = (
        "(IMPORTANT TIPS: this action is not valid, your new response *must* strictly adhere to the format according "
        "to env instructions.)"
    )
    fly = f"(step: 1, observation: {lake}, action: Fly{tips}, reward: -0.02)"
    nothing = f"(step: 2, observation: {lake}, action: {tips}, reward: -0.02)"
    assert second == f"system: You play.|user: {say} {{x}} 1 of 1: [{fly}]\n2: [{lake}] 64"
    assert third == f"system: You play.|user: {say} {{x}} 2 of 2: [{fly}, {nothing}]\n3: [{lake}] 64"
    spec = found.spec
    assert spec is not None and isinstance(spec.rollout.episodes, EnvironmentEpisodesConfig)
    lake_memory, room_memory = (each.memory for each in spec.rollout.episodes.environments)
    assert lake_memory is not None and lake_memory.turns == 4
    assert room_memory is not None and room_memory.turns == 0
    assert "sequence of its own" in found.report.render()


async def test_a_concatenating_manager_shows_observations_without_their_suffixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gem", types.SimpleNamespace(make=lambda env_id: Lamp()))  # type: ignore[arg-type]
    game = {"env_type": "game:Lamp-v0", "max_steps": 8, "env_manager_cls": "x.StepConcatEnvManager",
            "max_tokens_per_step": 64, "history_length": 3,
            "agent_template": "<{history}>{current_observation}!"}  # fmt: skip
    found = imported(**STEPWISE, custom_envs__Lake=game, custom_envs__Room=game)
    make = played(found, tmp_path)
    monkeypatch.setattr(conversation_module, "load_environment", lambda *_: make)
    monkeypatch.setattr(EnvironmentConfig, "is_code", False)

    shown = await shown_by(found, ["a", "?", "c"])

    assert shown == [
        "user: <>off\ngo!",
        "user: <off>saw a\nmore!",
        "user: <off\nsaw a>saw ?\nmore!",
        "user: <saw a\nsaw ?>saw c\nmore!",
    ]


def test_steps_of_a_batch_are_compared_and_bounded_twice() -> None:
    found = imported(adv_estimator="step_reinforce", reward_normalization__grouping="batch", reward_clip=5,
                     advantage_clip=20)  # fmt: skip

    assert found.may_run() and found.spec is not None, found.report.render()
    advantage = found.spec.algorithm.advantage
    assert isinstance(advantage, StepReinforceConfig)
    assert (advantage.over, advantage.clip) == ("batch", 5.0)


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ({"norm_mean_type": "group", "norm_std_type": "group"}, {"method": "mean_std"}),
        ({"norm_mean_type": "group"}, {"method": "mean"}),
        ({"norm_std_type": "group", "method": "mean"}, {"method": "mean_std"}),
        ({"grouping": "batch", "norm_mean_type": "batch", "norm_std_type": "batch"},
         {"grouping": "batch", "method": "mean_std"}),
    ],
)  # fmt: skip
def test_newer_names_of_a_normalisation_are_what_the_older_one_says(
    newer: dict[str, str], older: dict[str, str]
) -> None:
    def made(values: dict[str, str]) -> Any:
        named = {f"reward_normalization__{name}": value for name, value in values.items()}
        method = {} if "method" in values else {"reward_normalization__method": "identity"}
        found = imported(adv_estimator="step_reinforce", **method, **named)
        assert found.may_run(), found.report.render()
        return found.document

    assert made(newer) == made(older)


def test_a_mean_of_a_group_with_a_deviation_of_the_batch_is_refused() -> None:
    found = imported(adv_estimator="step_reinforce", reward_normalization__norm_mean_type="group",
                     reward_normalization__norm_std_type="batch")  # fmt: skip

    assert "reward_normalization.norm_std_type" in {entry.name for entry in found.report.refused}
