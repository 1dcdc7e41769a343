"""The systems' typical launch files become exactly the specs that stand beside them."""

from pathlib import Path

import pytest
import yaml

from flotilla.importers.build import Imported, build
from flotilla.importers.systems import SYSTEMS, read, read_launch_text
from flotilla.shared.config.load.spec_text import validate_spec
from tests.unit.importers.sources import BASES, import_flat

RECIPES = Path(__file__).parent / "recipes"
NAMES = sorted(path.name for path in RECIPES.iterdir() if not path.name.endswith(".expected.yaml"))


def import_recipe(name: str) -> Imported:
    system = name.partition("_")[0]
    given = read(system, read_launch_text(RECIPES / name), (), {}, source=name)
    return build(SYSTEMS[system], given, rows=100_000)


def test_there_are_recipes_of_each_system() -> None:
    # TRL's are scripts, which docs/import/trl.md has, and test_documented_examples reads.
    assert {name.partition("_")[0] for name in NAMES} == set(SYSTEMS) - {"trl"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_becomes_the_spec_beside_it(name: str) -> None:
    imported = import_recipe(name)

    assert imported.may_run(), imported.report.render()
    expected = yaml.safe_load((RECIPES / f"{Path(name).stem}.expected.yaml").read_text(encoding="utf-8"))
    assert imported.spec == validate_spec(expected)
    assert imported.document == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_recipe_has_its_entry_once(name: str) -> None:
    system = name.partition("_")[0]
    given = read(system, read_launch_text(RECIPES / name), (), {}, source=name)

    entries = [entry.name for entry in import_recipe(name).report.entries]

    assert entries[: len(given)] == [each.spelling for each in given]
    assert len(entries) == len(set(entries))


@pytest.mark.parametrize(
    ("system", "name"),
    [("openrlhf", "--use_wandb"), ("openrlhf", "--other.api_key"), ("roll", "tracker_kwargs.api_key"),
     ("verl", "trainer.hub_token")],
)  # fmt: skip
def test_a_secret_by_any_name_is_not_shown(system: str, name: str) -> None:
    imported = import_flat(system, {**BASES[system], name: "0123456789"})

    assert "0123456789" not in imported.report.render()


def test_a_secret_of_a_recipe_is_not_shown() -> None:
    imported = import_recipe("openrlhf_dynamic_filtering.sh")

    assert "0123456789" not in imported.report.render()
    assert "0123456789" not in str([entry.as_dict() for entry in imported.report.entries])
