"""Whatever a launch file holds, the answer is a report or a message with the place, never another exception."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from flotilla.importers.build import build
from flotilla.importers.systems import SYSTEMS, read
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import BASES, import_flat

RECIPES = sorted(path for path in (Path(__file__).parent / "recipes").iterdir() if ".expected" not in path.name)
PIECES = ["${", "}", "$((", "))", "'", '"', "\\", "\n", ": ", "- ", "[", "{", "#", "=", "~", "null", "1e999", "\0",
          "--", "2020-13-45", "&a", "*a", "!!python/object:os.system", "é", "<<EOF", "\t", "-1", "0"]  # fmt: skip
ODD: list[Any] = [None, True, False, 0, -1, 10**400, 1e308, "", "x", "-1", "1e-6", "${x}", "nan", ".inf", [], [1, "a"],
                  [[]], {}, {"a": 1}, "list(range(0,99999999999999999999))", "a_b_c", "0_0"]  # fmt: skip


def mutated(text: str, random: Random) -> str:
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(text) + 1)
        end = min(len(text), start + random.choice([0, 0, 1, 5, 40]))
        text = text[:start] + random.choice(["", *PIECES]) + text[end:]
    return text


@pytest.mark.parametrize("seed", range(120))
def test_a_broken_launch_file_is_a_report_or_a_message_with_its_place(seed: int) -> None:
    random = Random(seed)
    path = random.choice(RECIPES)
    system = path.name.partition("_")[0]
    text = mutated(path.read_text(encoding="utf-8"), random)

    try:
        imported = build(SYSTEMS[system], read(system, text, (), {}, source=path.name), rows=1000)
    except InvalidSpec as error:
        assert error.detail
        assert error.errors and all(entry["path"] for entry in error.errors)
    else:
        assert imported.report.render()
        assert imported.spec is not None or imported.report.problems


@pytest.mark.parametrize("seed", range(120))
def test_odd_values_are_a_report_or_a_message_that_names_the_parameter(seed: int) -> None:
    random = Random(seed)
    system = random.choice(sorted(SYSTEMS))
    names = random.sample(sorted(SYSTEMS[system].parameters), 3)
    odd = {name: random.choice(ODD) for name in names if not any(name.startswith(f"{other}.") for other in names)}
    values = {**BASES[system], **odd}
    values = {
        name: value for name, value in values.items() if not any(other.startswith(f"{name}.") for other in values)
    }

    try:
        imported = import_flat(system, values)
    except InvalidSpec as error:
        assert error.errors and all(entry["path"] for entry in error.errors), error.detail
    else:
        assert imported.report.render()
        assert imported.spec is not None or imported.report.problems
