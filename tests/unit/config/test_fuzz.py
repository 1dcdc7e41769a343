"""Whatever a spec's file holds, the answer is a spec or a message with a field's path or a place in the file."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from flotilla.shared.config.load.spec_text import parse_document, validate_spec
from flotilla.shared.errors import InvalidSpec

RECIPES = sorted((Path(__file__).parents[1] / "importers" / "recipes").glob("*.expected.yaml"))
PIECES = ["${", "'", '"', "\\", "\n", ": ", "- ", "[", "{", "]", "#", "~", "1e999", ".nan", "\0", "2020-13-45", "&a ",
          "*a", "<<: *a", "!!int x", "!!timestamp x", "!!set {a}", "!!python/object:os.system x", "é", "\ufeff", "\t",
          "? ", "|", "9" * 5000]  # fmt: skip
ODD: list[Any] = [None, True, 0, -1, 10**400, 1e308, float("nan"), float("inf"), "", "x", "1e-6", [], [[]], {},
                  {"a": 1}, {"kind": "x"}, {"kind": None}, {"kind": ["a"]}, [None], 2**63, "é" * 1000]  # fmt: skip
INTERNAL = re.compile(r"function-|literal\[|Config\b|NoneType|BaseModel|Traceback")
"""What pydantic and Python call things; nobody who writes a spec knows them."""


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def with_other_values(text: str, random: Random) -> str:
    document = yaml.safe_load(text)
    for _ in range(random.randint(1, 3)):
        *parents, last = random.choice(list(places(document)))
        above = document
        for key in parents:
            above = above[key]
        if random.random() < 0.2:
            del above[last]
        else:
            above[last] = random.choice([copy.deepcopy(above[last]), [above[last]], {"x": above[last]}, *ODD])
    return yaml.safe_dump(document, allow_unicode=True)


def with_other_letters(text: str, random: Random) -> str:
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(text) + 1)
        text = text[:start] + random.choice(["", *PIECES]) + text[start + random.choice([0, 0, 1, 5, 40]) :]
    return text


@pytest.mark.parametrize("mutate", [with_other_values, with_other_letters])
@pytest.mark.parametrize("seed", range(100))
def test_a_broken_spec_is_a_message_with_its_place(seed: int, mutate: Any) -> None:
    random = Random(seed)
    text = mutate(random.choice(RECIPES).read_text(encoding="utf-8"), random)

    try:
        validate_spec(parse_document(text, source="spec.yaml"))
    except InvalidSpec as error:
        assert not INTERNAL.search(error.detail), error.detail
        assert "\n" not in error.detail or "\n" in text
        if error.errors:
            assert all(entry["path"] and entry["allowed"] for entry in error.errors), error.errors
        else:
            assert error.detail.startswith("spec.yaml")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "spec.yaml is empty"),
        ("- 1", "must hold a mapping"),
        ("name: &a [*a]", "deep in each other"),
        ("a: " + "[" * 3000, "nested too deeply"),
        (BOMB, "values at most"),
        ("name: x\nname: y", "line 2, column 1: the key 'name' stands twice"),
        ("1: x", "line 1, column 1: the key '1' is no text"),
        ("on: x", "the key 'on' is no text"),
        ("seed: 2020-13-45", "line 1, column 7: '2020-13-45' cannot be read as timestamp"),
        ("seed: !!timestamp x", "'x' cannot be read as timestamp"),
        ("seed: !!float ''", "cannot be read as float"),
        ("name: x\0y", "line 1: the character U+0000"),
    ],
)
def test_what_is_no_document_is_a_message_with_its_line(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_document(text, source="spec.yaml")

    assert said in caught.value.detail


@pytest.mark.parametrize(
    ("value", "path", "said"),
    [
        ("atuo", "algorithm.correction", "a section"),
        (3, "algorithm.correction", "'auto'"),
        ({"weigth": 1}, "algorithm.correction.weigth", "did you mean algorithm.correction.weight?"),
        ({"weight": {"upper": -1}}, "algorithm.correction.weight.upper", "greater than 0"),
        ({"weight": None}, "algorithm.correction", "neither weight nor rejections"),
    ],
)
def test_a_field_that_is_a_word_or_a_section_says_what_is_wrong_once(value: Any, path: str, said: str) -> None:
    document = yaml.safe_load(RECIPES[0].read_text(encoding="utf-8"))
    document["algorithm"]["correction"] = value

    with pytest.raises(InvalidSpec) as caught:
        validate_spec(document)

    assert [entry["path"] for entry in caught.value.errors] == [path]
    assert said in caught.value.detail
