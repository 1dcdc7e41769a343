"""How a local fleet divides GPUs among its services. None of this was run on a GPU."""

import pytest

from flotilla.cli.device_division import Division, Wish, Wishes, check_devices, divide, wishes_of
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec

FOUR = ("0", "1", "2", "3")


def test_without_devices_nothing_is_divided_and_nothing_is_said() -> None:
    assert divide((), Wishes(), num_trainers=1, num_rollouts=2) == Division()


@pytest.mark.parametrize(
    ("wishes", "trainers", "rollouts", "sentence"),
    [
        (Wishes(), [("0", "1")], [("2",), ("3",)], "trainer cuda 0,1; rollout-0 cuda 2; rollout-1 cuda 3"),
        (
            Wishes(Wish(1), Wish(1)),
            [("0",)],
            [("1",), ("2",)],
            "trainer cuda 0; rollout-0 cuda 1; rollout-1 cuda 2; 3 unused",
        ),
        (
            Wishes(rollouts=Wish(1)),
            [("0", "1")],
            [("2",), ("3",)],
            "trainer cuda 0,1; rollout-0 cuda 2; rollout-1 cuda 3",
        ),
        (
            Wishes(Wish(0), Wish(2)),
            [()],
            [("0", "1"), ("2", "3")],
            "trainer none; rollout-0 cuda 0,1; rollout-1 cuda 2,3",
        ),
        (
            Wishes(are_shared=True),
            [FOUR],
            [("0", "1"), ("2", "3")],
            "trainer cuda 0,1,2,3; rollout-0 cuda 0,1; rollout-1 cuda 2,3 (in turns)",
        ),
    ],
)
def test_devices_are_divided_as_they_are_wished_for(
    wishes: Wishes, trainers: list[tuple[str, ...]], rollouts: list[tuple[str, ...]], sentence: str
) -> None:
    division = divide(FOUR, wishes, num_trainers=1, num_rollouts=2)

    assert (division.trainers, division.rollouts, division.sentence) == (trainers, rollouts, sentence)


def test_too_few_devices_are_seen_by_all() -> None:
    division = divide(("0",), Wishes(), num_trainers=1, num_rollouts=1)

    assert (division.trainers, division.rollouts) == (None, None)
    assert division.sentence == "cuda 0, which every service sees: there are fewer of them than services"
    more = divide(FOUR, Wishes(Wish(4), Wish(1)), num_trainers=1, num_rollouts=1)
    assert more.sentence.endswith("there are fewer of them than the services ask for")


def test_a_run_divides_them_as_its_spec_needs_them() -> None:
    assert wishes_of(a_spec()) == Wishes(Wish(1), Wish(1))
    assert wishes_of(a_spec(resources={"trainer": {"devices": 2}, "sharing": "time"})) == Wishes(
        Wish(2), Wish(1), are_shared=True
    )
    assert wishes_of(a_spec(parallelism={"device": "cpu"})) == Wishes(Wish(0), Wish(1))
    numbered = wishes_of(a_spec(parallelism={"device": "cuda:1"}))
    assert numbered.why_whole == "the spec names them by number (cuda:1 and auto)"
    assert divide(FOUR, numbered, num_trainers=1, num_rollouts=1).trainers is None


@pytest.mark.parametrize("name", ["trainer", "rollouts"])
def test_what_no_service_of_this_machine_could_have_is_refused(name: str) -> None:
    spec = a_spec(resources={name: {"devices": 1}})
    check_devices(spec, 1)

    with pytest.raises(InvalidSpec, match=rf"resources.{name}.devices: 1 GPUs are asked for, and this machine has 0"):
        check_devices(spec, 0)


def test_a_model_that_is_divided_among_more_devices_than_there_are_is_refused() -> None:
    spec = a_spec(rollout={"engine": {"kind": "vllm", "options": {"tensor_parallel_size": 64}}})
    on_cpu = a_spec(rollout={"engine": {"kind": "vllm", "device": "cpu", "options": {"tensor_parallel_size": 2}}})

    check_devices(spec, 64)
    with pytest.raises(InvalidSpec, match=r"rollout\.engine\.options: 64 GPUs are asked for, and this machine has 1"):
        check_devices(spec, 1)
    check_devices(on_cpu, 0)


def test_a_spec_that_asks_for_no_devices_runs_where_there_are_none() -> None:
    check_devices(a_spec(), 0)
