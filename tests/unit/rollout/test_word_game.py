"""Every environment pays a player who plays at random, and one who plays as well as can be, what theory says."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from flotilla.services.rollout.environments.base import Environment
from flotilla.services.rollout.environments.gymnasium_text import GymnasiumText
from flotilla.services.rollout.environments.loading import load_environment
from flotilla.services.rollout.environments.word_game import WORDS
from flotilla.shared.config.sections.episodes import ENVIRONMENTS, EnvironmentConfig
from tests.unit.rollout import players
from tests.unit.rollout.players import PENALTY, Act, Rules

CHANCE = 4.5
"""Standard deviations: what a right mean leaves once in a hundred thousand times."""


@dataclass(frozen=True)
class Game:
    """An environment and its theory.

    Attributes:
        rules: of what is shown first and the turns that there are.
        turns: of an episode.
        seeds: to play, each so many ``times`` by chance.
        limit: the environment's own option for its turns.
        best: the mean return of the best player over all seeds, where it is known from elsewhere.
    """

    name: str
    rules: Callable[[str, int], Rules]
    turns: int
    seeds: int
    times: int
    options: dict[str, Any] = field(default_factory=dict)
    limit: str | None = None
    best: float | None = None

    def make(self) -> Environment:
        limit = {self.limit: self.turns} if self.limit else {}
        return load_environment(EnvironmentConfig(environment=self.name, options={**self.options, **limit}))()


def toy(name: str, turns: int, times: int, best: float | None = None) -> Game:
    table = GymnasiumText(name)._made.unwrapped.P
    rules = players.gymnasium_table(table)
    return Game(f"gymnasium:{name}", rules, turns, 1, times, limit="max_episode_steps", best=best)


WORDS_USED = 60
GAMES: dict[str, Callable[[], Game]] = {
    "frozen_lake": lambda: Game("frozen_lake", players.frozen_lake, 8, 100, 10, best=1.0),
    "sokoban": lambda: Game("sokoban", players.sokoban, 10, 20, 50, limit="max_steps"),
    "countdown": lambda: Game(
        "countdown", players.countdown, 3, 20, 40, {"num_numbers": 3, "format_penalty": PENALTY}, "max_attempts", 1.0
    ),
    "word_game": lambda: Game(
        "word_game", players.word_game(WORDS_USED), 5, 60, 40, {"num_words": WORDS_USED}, "max_guesses", 1.0
    ),
    "cliff": lambda: toy("CliffWalking-v1", 20, 500, best=-13.0),
    "slippery lake": lambda: toy("FrozenLake-v1", 30, 800),
}
assert set(ENVIRONMENTS) < set(GAMES)


def play(environment: Environment, shown: str, turns: int, act: Act) -> tuple[float, int]:
    """Play an episode that has begun; returns its return and turns."""
    total = 0.0
    for turn in range(turns):
        shown, reward, is_over, _, _ = environment.step(act(turns - turn, shown))
        total += reward
        if is_over:
            return total, turn + 1
    return total, turns


@pytest.mark.parametrize("name", GAMES)
def test_a_player_by_chance_gets_on_average_what_is_computed(name: str) -> None:
    if name not in ENVIRONMENTS:
        pytest.importorskip("gymnasium")
    game, dice = GAMES[name](), random.Random(11)
    environment = game.make()
    found = expected = variance = 0.0
    for seed in range(game.seeds):
        rules = game.rules(environment.reset(seed)[0], game.turns)
        mean, spread = rules.by_chance(game.turns)
        texts = WORDS[:WORDS_USED] if name == "word_game" else rules.texts
        for _ in range(game.times):
            shown, _ = environment.reset(seed if game.seeds > 1 else dice.randrange(2**31))
            found += play(environment, shown, game.turns, lambda *_, texts=texts: dice.choice(texts))[0]
        expected, variance = expected + game.times * mean, variance + game.times * spread

    assert variance > 0
    assert found == pytest.approx(expected, abs=CHANCE * math.sqrt(variance))
    if name == "word_game":
        assert expected / (game.seeds * game.times) == pytest.approx(1 - (1 - 1 / WORDS_USED) ** game.turns)


@pytest.mark.parametrize("name", GAMES)
def test_the_best_player_gets_what_is_computed(name: str) -> None:
    if name not in ENVIRONMENTS:
        pytest.importorskip("gymnasium")
    game = GAMES[name]()
    environment = game.make()
    is_chance = name == "slippery lake"
    found: list[float] = []
    for seed in range(1000 if is_chance else game.seeds):
        shown, _ = environment.reset(seed)
        if name == "word_game":
            found.append(play(environment, shown, game.turns, players.careful_guesser(WORDS_USED))[0])
            continue
        if not is_chance or not found:  # it begins in one place
            rules = game.rules(shown, game.turns)
            best, choose = rules.at_best(game.turns)
        total = play(environment, shown, game.turns, follower(rules, choose))[0]
        found.append(total)
        assert is_chance or total == pytest.approx(best)

    mean = sum(found) / len(found)
    if is_chance:
        spread = math.sqrt(sum((each - mean) ** 2 for each in found) / len(found) ** 2)
        assert mean == pytest.approx(best, abs=CHANCE * spread)
        assert best > 0.3
    if game.best is not None:
        assert mean == pytest.approx(game.best)


def follower(rules: Rules, choose: Callable[[Any, int], str]) -> Act:
    """Make a player who keeps count of the state; where chance decides it, what is shown is the state."""
    state = rules.start

    def act(left: int, shown: str) -> str:
        nonlocal state
        if shown.isdigit():
            state = int(shown)
        text = choose(state, left)
        if not shown.isdigit():
            state = rules.outcomes(state, text)[0][1]
        return text

    return act
