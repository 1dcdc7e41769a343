"""Environments: the same episode from the same seed, known returns of known players, texts that are no actions."""

import random
from collections import deque
from typing import Any

import pytest

from flotilla.services.rollout.environments.base import ActionTable, Environment
from flotilla.services.rollout.environments.conversation import EnvironmentConversation, EnvironmentConversations
from flotilla.services.rollout.environments.countdown import Countdown, value_of
from flotilla.services.rollout.environments.frozen_lake import ACTIONS, FrozenLake, moved
from flotilla.services.rollout.environments.loading import BUILT_IN, load_environment
from flotilla.services.rollout.environments.sokoban import ACTIONS as PUSHES
from flotilla.services.rollout.environments.sokoban import Room, Sokoban
from flotilla.services.rollout.environments.word_game import marks
from flotilla.shared.config.sections.episodes import ENVIRONMENTS, EnvironmentConfig, EnvironmentEpisodesConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task


def test_ice_that_is_slippery_leads_aside_in_two_of_three_cases() -> None:
    lake, rng = FrozenLake(size=5, frozen=1.0, is_slippery=True), random.Random(1)
    straight = total = 0
    for seed in range(600):
        lake.reset(seed)
        before = lake.player
        action = rng.randrange(4)
        lake.step(ACTIONS[action])
        if len({moved(lake.lake, before, other) for other in range(4)}) == 4 and before not in {lake.player}:
            total += 1
            straight += lake.player == moved(lake.lake, before, action)
    assert straight / total == pytest.approx(1 / 3, abs=0.08)


def solved(room: Room) -> list[int] | None:
    """Find the shortest sequence of pushes and steps."""
    ways: dict[Room, list[int]] = {room: []}
    waiting = deque([room])
    while waiting:
        here = waiting.popleft()
        if here.is_solved:
            return ways[here]
        for action in range(4):
            there = here.pushed(action)
            if there not in ways:
                ways[there] = [*ways[here], action]
                waiting.append(there)
    return None


@pytest.mark.parametrize(("boxes", "seeds"), [(1, 40), (2, 6)])
def test_every_room_can_be_solved_and_pays_what_it_should(boxes: int, seeds: int) -> None:
    game = Sokoban(num_boxes=boxes, max_steps=200, search_depth=12)
    for seed in range(seeds):
        game.reset(seed)
        assert not game.room.boxes & game.room.targets
        actions = solved(game.room)
        assert actions
        total, is_over = 0.0, False
        for action in actions:
            assert not is_over
            _, reward, is_over, is_late, info = game.step(PUSHES[action])
            total += reward
        assert is_over and not is_late
        assert info["metrics"]["success"] == 1.0
        # Each step costs 0.1, each box that comes to rest on a target gives 1 (what leaves one pays it back), all 10.
        assert total == pytest.approx(-0.1 * len(actions) + boxes + 10)


def test_countdown_is_won_by_its_solution_and_by_nothing_else() -> None:
    game = Countdown(num_numbers=4)
    for seed in range(50):
        game.reset(seed)
        solution = game.solution
        shown, reward, is_over, _, info = game.step(f"I think <answer>{solution}</answer>")
        assert (shown, reward, is_over, info["metrics"]["success"]) == ("right", 1.0, True, 1.0)
        game.reset(seed)
        _, reward, is_over, _, _ = game.step(f"{game.numbers[0]} - {game.numbers[0]}")
        assert (reward, is_over) == (0.0, False)


@pytest.mark.parametrize(
    "text", ["9 * 9", "__import__('os')", "1 / 0", "2 ** 3", "(" * 500, "3 +", "", "1.5 + 2", "-3", "9 " * 200, "1 1"]
)
def test_what_is_no_expression_of_the_numbers_has_no_value(text: str) -> None:
    assert value_of(text, [1, 2, 3, 9, 0]) is None


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [("speed", "creep", "-YGG-"), ("array", "radar", "YYYG-"), ("allow", "llama", "YGY--")],
)
def test_a_letter_is_marked_no_more_often_than_the_word_has_it(guess: str, secret: str, expected: str) -> None:
    assert marks(guess, secret) == expected


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_same_seed_and_texts_give_the_same_episode(name: str) -> None:
    assert set(ENVIRONMENTS) == set(BUILT_IN)
    texts = ["Left", "nothing", "<answer>Down</answer>", "1 + 1", "about", "Up"]

    def episode(environment: Environment, seed: int) -> list[Any]:
        shown: list[Any] = [environment.reset(seed)]
        for text in texts:
            shown.append(environment.step(text))
            if shown[-1][2]:
                break
        return shown

    make = load_environment(EnvironmentConfig(environment=name))
    assert episode(make(), 11) == episode(make(), 11)
    begun = {make().reset(seed)[0] for seed in range(20)} if name != "word_game" else {"a", "b"}
    assert len(begun) > 1


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "countdown", "word_game"])
def test_a_text_that_is_no_action_costs_the_penalty_and_ends_nothing(name: str) -> None:
    environment = load_environment(EnvironmentConfig(environment=name, options={"format_penalty": -0.25}))()
    environment.reset(3)

    _, reward, is_over, _, info = environment.step("I would rather not say anything at all")

    assert reward == pytest.approx(-0.35 if name == "sokoban" else -0.25)
    assert not is_over
    assert info["metrics"]["action_is_valid"] == 0.0


def test_actions_are_read_from_answers_and_thoughts_are_left_out() -> None:
    table = ActionTable(("Up", "Down"))

    assert table.read(" up\n") == 0
    assert table.read("<think>Down? <answer>Down</answer></think>hm <answer> UP </answer><answer>Down</answer>") == 0
    assert table.read("go up") is None
    assert ActionTable(("Up", "Down"), r"\[(\w+)\]").read("so [down]!") == 1
    assert ActionTable(("Up", "Down"), r"\[(\w+)\]").read("down") is None


async def test_a_conversation_begins_with_the_rows_seed_and_the_instruction_where_there_is_no_prompt() -> None:
    open_one = EnvironmentConversations(EnvironmentEpisodesConfig(kind="environment", environments=(LAKE,)))
    expected, info = FrozenLake().reset(5)

    asked = await open_one(a_task(messages=(Message("user", "Go."),), metadata={"seed": 5}), 0).begin()
    unasked = await open_one(a_task(messages=(Message("user", ""),), metadata={"seed": 5}), 1).begin()
    other = await open_one(a_task(messages=(Message("system", "s"),), seed=9), 0).begin()

    assert asked.messages == (Message("user", f"Go.\n\n{expected}"),)
    assert unasked.messages == (Message("user", f"{info['instruction']}\n\n{expected}"),)
    assert [each.role for each in other.messages] == ["system", "user"]
    assert asked.state == unasked.state != other.state


LAKE = EnvironmentConfig(environment="frozen_lake")
OWN = """
import asyncio
class Slow:
    async def reset(self, seed):
        return f"seed {seed}", {}
    async def step(self, text):
        await asyncio.sleep(0 if text == "quick" else 60)
        return "moved", 1.0, False, True, {"metrics": {"speed": 2}}
class NoStep:
    def reset(self, seed): return ""
class Picky:
    def __init__(self, level): self.level = level
    def reset(self, seed): return f"level {self.level}"
    def step(self, text): return "wrong shape"
"""


async def test_an_environment_of_the_users_is_loaded_by_path_and_may_wait(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(OWN)
    make = load_environment(EnvironmentConfig(environment=f"{tmp_path}/own.py:Slow"))
    conversation = EnvironmentConversation(make, a_task(), 0.5, is_quick=False)

    await conversation.begin()
    quick = await conversation.answer("quick", is_cut=False)
    with pytest.raises(Exception, match=r"longer than 0\.5 s"):
        await conversation.answer("slow", is_cut=False)

    assert (quick.reward, quick.finish) == (1.0, FinishReason.TURNS)
    assert conversation.metrics["environment/speed"] == 2.0


async def test_what_an_environment_lacks_is_said_before_anything_runs(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(OWN)

    for name, options, words in (
        (f"{tmp_path}/own.py:NoStep", {}, "no method step"),
        (f"{tmp_path}/own.py:Picky", {"size": 3}, "does not take the options"),
        (f"{tmp_path}/own.py:Other", {}, "it has: NoStep, Picky, Slow"),
        (f"{tmp_path}/none.py:Other", {}, "no file"),
        ("sokoban", {"size": 2}, "at least 5"),
        ("gymnasium:NoSuchThing-v0", {}, "cannot be made|is absent"),
    ):
        with pytest.raises(InvalidSpec, match=words):
            load_environment(EnvironmentConfig(environment=name, options=options))
    picky = load_environment(EnvironmentConfig(environment=f"{tmp_path}/own.py:Picky", options={"level": 1}))
    conversation = EnvironmentConversation(picky, a_task(), 5.0, is_quick=False)
    assert "level 1" in (await conversation.begin()).messages[-1].content
    with pytest.raises(Exception, match="must return observation, reward"):
        await conversation.answer("x", is_cut=False)


def cliff() -> Environment:
    pytest.importorskip("gymnasium")
    config = EnvironmentConfig(environment="gymnasium:CliffWalking-v1", options={"format_penalty": -5.0})
    return load_environment(config)()


def test_an_environment_of_gymnasium_is_played_by_numbers() -> None:
    environment = cliff()

    assert environment.reset(2**40)[0] == "36"
    assert environment.step("<answer>0</answer>")[:3] == ("24", -1.0, False)


@pytest.mark.parametrize("text", ["up", "", "-1", "4", "--1", "²", "1.0", pytest.param("9" * 5000, id="5000 digits")])
def test_a_text_that_is_no_number_of_an_action_costs_the_penalty_and_is_no_error(text: str) -> None:
    environment = cliff()
    environment.reset(0)

    assert environment.step(text)[:3] == ("36", -5.0, False)


def test_a_room_is_drawn_with_the_symbols_that_are_asked_for() -> None:
    usual, other = Sokoban(), Sokoban(symbols="W.GCBA@")

    (plain, _), (drawn, info) = usual.reset(3), other.reset(3)

    assert drawn == plain.translate(str.maketrans("#_O√XPS", "W.GCBA@")) != plain
    assert "W is a wall" in info["instruction"]
    assert other.step("Up")[0] == usual.step("Up")[0].translate(str.maketrans("#_O√XPS", "W.GCBA@"))
    with pytest.raises(ValueError, match="different characters"):
        Sokoban(symbols="WWGCBA@")
