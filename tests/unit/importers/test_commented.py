"""A spec that an import writes says of each key where it came from, and reads as the same spec without that."""

import json
from pathlib import Path

import pytest
import yaml

from flotilla.importers.build import build, look_up
from flotilla.importers.commented import commented
from flotilla.importers.parameter import UNSET
from flotilla.importers.systems import read, system_of
from flotilla.shared.config.load.yaml_text import write_value

RECIPES = Path(__file__).parent / "recipes"
FILES = sorted(path for path in RECIPES.iterdir() if not path.name.endswith(".expected.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_comments_change_nothing_and_each_key_has_one(path: Path) -> None:
    system = path.name.partition("_")[0]
    given = read(system, path.read_text(), (), {}, source=path.name)
    imported = build(system_of(system, given), given, rows=7000)
    document = json.loads(json.dumps(imported.document))

    text = commented(document, imported.report.entries, "it", write_value)

    assert yaml.safe_load(text) == document
    said = [line.partition("# ")[2] for line in text.splitlines() if "# " in line]
    for entry in imported.report.entries:
        for field in entry.fields:
            if look_up(document, field) is UNSET:
                continue
            names = [each.name for each in imported.report.entries if field in each.fields]
            assert any(name in line for name in names for line in said), field


def test_a_key_names_the_parameters_that_set_it() -> None:
    path = RECIPES / "verl_grpo_kl.sh"
    given = read("verl", path.read_text(), (), {}, source=path.name)
    imported = build(system_of("verl", given), given, rows=7000)

    text = commented(json.loads(json.dumps(imported.document)), imported.report.entries, "verl", write_value)

    assert "  group_size: 5  # actor_rollout_ref.rollout.n\n" in text
    assert "    context_tokens: 1536  # data.max_prompt_length, data.max_response_length\n" in text
    assert "seed: 0  # follows from verl's defaults\n" in text


@pytest.mark.parametrize("key", ["2024", "yes", "null", "a: b", "#x"])
def test_keys_that_need_quotes_have_them(key: str) -> None:
    document = {"reward": {key: {"weight": 1.0}}}

    assert yaml.safe_load(commented(document, [], "it", write_value)) == document
