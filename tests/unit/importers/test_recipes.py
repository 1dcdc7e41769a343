"""The systems' typical launch files become exactly the specs that stand beside them."""

from pathlib import Path

import pytest
import yaml

from flotilla.importers.build import Imported, build
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read, read_launch_text
from shared.config.load import validate_spec
from tests.unit.importers.sources import BASES, import_flat

RECIPES = Path(__file__).parent / "recipes"
NAMES = sorted(path.name for path in RECIPES.iterdir() if not path.name.endswith(".expected.yaml"))
WITH_ENVIRONMENTS = "roll_agentic.yaml"


def import_recipe(name: str) -> Imported:
    system = name.partition("_")[0]
    given = read(system, read_launch_text(RECIPES / name), (), {}, source=name)
    return build(SYSTEMS[system], given, rows=100_000)


def test_there_are_recipes_of_each_system() -> None:
    assert {name.partition("_")[0] for name in NAMES} == set(SYSTEMS)


@pytest.mark.parametrize("name", [name for name in NAMES if name != WITH_ENVIRONMENTS])
def test_a_recipe_becomes_the_spec_beside_it(name: str) -> None:
    imported = import_recipe(name)

    assert imported.may_run(), imported.report.render()
    expected = yaml.safe_load((RECIPES / f"{Path(name).stem}.expected.yaml").read_text(encoding="utf-8"))
    assert imported.spec == validate_spec(expected)
    assert imported.document == expected


def test_environments_are_refused_one_by_one() -> None:
    imported = import_recipe(WITH_ENVIRONMENTS)

    refused = {entry.name for entry in imported.report.entries if entry.verdict is Verdict.REFUSED}
    assert refused == {
        "env_manager.env_groups",
        "env_manager.group_size",
        "env_manager.tags",
        "env_manager.n_groups",
        "env_manager.max_traj_per_env",
        "env_manager.format_penalty",
        "custom_envs.SimpleSokoban.env_type",
        "custom_envs.SimpleSokoban.max_steps",
    }
    assert not imported.may_run(allow_refused=True)  # what is graded is not known without the environments


def test_what_is_not_of_environments_imports_once_a_grader_is_named() -> None:
    given = read("roll", read_launch_text(RECIPES / WITH_ENVIRONMENTS), (), {}, source=WITH_ENVIRONMENTS)

    imported = build(SYSTEMS["roll"], given, rows=1000, overrides=["reward.components=[{kind: math}]"])

    assert imported.may_run(allow_refused=True) and not imported.may_run()


def test_an_environment_is_written_beside_an_agentic_recipe() -> None:
    text = read_launch_text(RECIPES / WITH_ENVIRONMENTS).replace("adv_estimator: grpo", "adv_estimator: gigpo")
    given = read("roll", text, (), {}, source=WITH_ENVIRONMENTS)
    sokoban = "{environment: sokoban, options: {size: 6, format_penalty: -0.15}}"
    overrides = [
        f"rollout.episodes={{kind: environment, max_turns: 10, environments: [{sokoban}]}}",
        "reward.components=[{kind: environment}]",
        "data.input_template=null",
    ]

    without = build(SYSTEMS["roll"], given, rows=1000, overrides=overrides[1:])
    assert not without.may_run(allow_refused=True)
    assert any("set rollout.episodes.kind to environment" in problem for problem in without.report.problems)

    imported = build(SYSTEMS["roll"], given, rows=1000, overrides=overrides)

    assert imported.may_run(allow_refused=True), imported.report.render()
    assert imported.spec is not None
    assert (imported.spec.rollout.episodes.kind, imported.spec.algorithm.advantage.kind) == ("environment", "gigpo")
    said = {entry.name: entry.detail for entry in imported.report.refused}
    assert "num_return_sequences_in_group" in said["env_manager.group_size"]
    assert "options.format_penalty" in said["env_manager.format_penalty"]


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
