"""What a run that goes on may differ in, and the command that is printed for it."""

from typing import Any

import pytest

from flotilla.cli.command_line import build_parser
from flotilla.cli.commands.continuing import keys_of_fork
from flotilla.cli.continuing import check_same, continue_command, differences, overrides_of
from flotilla.shared.config.load.overrides import apply, on_command_line
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import Conflict
from flotilla.shared.schemas.live_changes import ChangedKey, Effect, LiveChange
from tests.unit.gateway.builders import a_spec


@pytest.mark.parametrize(
    ("typed", "name", "expected"),
    [
        ("run a.yaml", "tiny", "flotilla run a.yaml --continue"),
        ("run a.yaml --fresh", "tiny-2", "flotilla run a.yaml --continue --name tiny-2"),
        (
            "run a.yaml --set seed=2 --seed 3 --runs r --rollouts 2 --plain",
            "tiny",
            "flotilla run a.yaml --continue --set seed=2 --seed 3 --runs r --rollouts 2 --plain",
        ),
    ],
)
def test_the_command_that_goes_on_says_what_the_first_one_said(typed: str, name: str, expected: str) -> None:
    arguments = build_parser().parse_args(typed.split())

    command = continue_command(arguments, name=name, default_name="tiny")

    assert command == expected
    again = build_parser().parse_args(command.split()[1:])
    assert again.go_on and continue_command(again, name=name, default_name="tiny") == expected


def test_a_run_is_not_both_continued_and_begun_again() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["run", "a.yaml", "--continue", "--fresh"])


def test_steps_and_quotas_may_differ_and_nothing_else() -> None:
    recorded = a_spec()
    longer = a_spec(optimisation={"steps": 9, "groups_per_mini_batch": 2}, resources={"priority": 3})
    other = a_spec(seed=4, rollout={"group_size": 3, "sampling": {"max_new_tokens": 8}})

    check_same(recorded, longer)

    assert set(differences(recorded, longer)) == {"optimisation.steps", "resources.priority"}
    with pytest.raises(Conflict, match=r"rollout\.group_size was 2, is 3; seed was 0, is 4.*resume_from"):
        check_same(recorded, other)


def changed(after: float, version: int | None, before: float = 1e-6) -> LiveChange:
    key = ChangedKey(path="optimisation.learning_rate", before=before, after=after)
    return LiveChange(
        id=f"{after}", at="2026-01-01T00:00:00Z", actor="a", effect=Effect.TRAINER, keys=(key,), version=version
    )


def with_rate(rate: float, **sections: Any) -> ExperimentSpec:
    return a_spec(optimisation={"steps": 4, "groups_per_mini_batch": 2, "learning_rate": rate}, **sections)


def test_a_run_goes_on_with_what_was_changed_while_it_ran_and_says_so() -> None:
    changes = [changed(5e-7, 3), changed(2e-7, None, before=5e-7)]
    recorded = with_rate(2e-7)

    (line,) = check_same(recorded, with_rate(1e-6), changes)

    told = "was changed while it ran and stays 2e-07 from the next version on; the spec has 1e-06"
    assert line == f"optimisation.learning_rate {told}"
    assert check_same(recorded, with_rate(2e-7), changes) == []


def test_a_value_that_a_run_never_began_with_is_refused_though_the_key_was_changed() -> None:
    changes = [changed(5e-7, 3), changed(2e-7, None, before=5e-7)]

    with pytest.raises(Conflict, match=r"learning_rate was 2e-07, is 3e-07; a running .* flotilla set"):
        check_same(with_rate(2e-7), with_rate(3e-7), changes)
    with pytest.raises(Conflict, match="seed was 0, is 4"):
        check_same(with_rate(2e-7), with_rate(1e-6, seed=4), changes)


def test_the_commit_that_a_hubs_model_was_pinned_to_stays() -> None:
    pinned = a_spec(model={"path": "a/b", "revision": "0" * 40})

    check_same(pinned, a_spec(model={"path": "a/b"}))
    check_same(pinned, a_spec(model={"path": "a/b", "revision": "main"}))

    with pytest.raises(Conflict, match=r"model\.revision"):
        check_same(pinned, a_spec(model={"path": "a/b", "revision": "1" * 40}))


def test_a_name_is_of_the_experiment_and_of_its_directory() -> None:
    arguments = build_parser().parse_args(["run", "a.yaml", "--name", "7", "--set", "name=mine", "--seed", "3"])

    assert overrides_of(arguments) == ["name=mine", "seed=3", 'name="7"']
    assert continue_command(arguments, name="7", default_name="") == (
        "flotilla run a.yaml --continue --set name=mine --seed 3 --name 7"
    )


def test_a_run_whose_experiment_has_another_name_than_its_directory_goes_on() -> None:
    check_same(a_spec(name="trial"), a_spec(name="trial-2"))


def test_a_fork_is_sent_every_key_that_was_named_though_the_parent_has_that_value_by_now() -> None:
    present = with_rate(0.5).model_dump(mode="json")
    layers = on_command_line(["optimisation.learning_rate=0.5", "seed=9"])
    wanted = validate_spec(apply(present, layers)).model_dump(mode="json")

    assert keys_of_fork(present, wanted, layers) == {"optimisation": {"learning_rate": 0.5}, "seed": 9}
