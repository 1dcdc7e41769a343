"""Files that tutorials show are what they say: specs that are valid, programs that run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flotilla.shared.config.load.spec_text import validate_spec
from tests.contract.shell_text import named_files

PAGES = Path(__file__).parents[3] / "docs" / "tutorials"
SHOWN = {
    (page.stem, name): text
    for page in sorted(PAGES.glob("*.md"))
    for name, text in named_files(page.read_text(encoding="utf-8")).items()
}
SPECS = [key for key in SHOWN if key[1].endswith(".yaml")]


def program(page: str, name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(SHOWN[page, name], name, "exec"), names)
    return names


@pytest.mark.parametrize("key", SPECS, ids="/".join)
def test_a_spec_of_a_tutorial_is_valid(key: tuple[str, str]) -> None:
    assert validate_spec(yaml.safe_load(SHOWN[key])).optimisation.steps > 0


def test_the_graders_of_the_tutorial_grade() -> None:
    graders = program("own-reward", "graders.py")
    right = SimpleNamespace(response="17 + 25 = 42 #### 42", label="42")
    silent = SimpleNamespace(response="forty-two", label="42")

    assert graders["correct"](right) == {"reward": 1.0, "answer": "42"}
    assert graders["correct"](silent)["reward"] == 0.0
    assert graders["brevity"](right)["reward"] == pytest.approx(0.9)
    assert graders["brevity"](silent) is None


def test_the_environment_of_the_tutorial_is_a_function_of_seed_and_answers() -> None:
    guess = program("environment", "guess.py")["Guess"]
    first, second = guess(most=10), guess(most=10)

    assert first.reset(seed=3) == second.reset(seed=3)
    found = [first.step(str(number)) for number in range(1, 11)]
    assert found == [second.step(str(number)) for number in range(1, 11)]
    assert [reward for _, reward, *_ in found].count(1.0) == 1
    assert found[0][0].endswith("is too small.") or found[0][2]
    assert first.step("ten")[1:4] == (0.0, False, False)
