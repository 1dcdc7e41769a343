"""How many devices a spec asks for, what it may not ask, and what `auto` becomes on the services it gets."""

from typing import Any

import pytest

from flotilla.cli.continuing import check_same
from flotilla.shared.config.load.live import changed_live
from flotilla.shared.config.load.spec_text import validate_spec, with_changes
from flotilla.shared.config.rules.devices import DeviceFacts, DeviceNeed, decide, rollout_need, trainer_need
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import Conflict, InvalidSpec
from tests.unit.config.test_spec_text import a_document

SGLANG = {"kind": "sglang", "device": "cuda"}
GPU, TWO, CPU = DeviceFacts(1, uses_cuda=True), DeviceFacts(2, uses_cuda=True), DeviceFacts()


def a_spec(**sections: Any) -> ExperimentSpec:
    return validate_spec(a_document(**sections))


def test_a_spec_that_says_nothing_asks_for_no_device_and_uses_those_it_gets() -> None:
    spec = a_spec()

    assert (spec.parallelism.device, spec.rollout.engine.device, spec.model.dtype) == ("auto", "auto", "auto")
    assert trainer_need(spec) == rollout_need(spec) == DeviceNeed(0, is_used=True)


@pytest.mark.parametrize(
    ("sections", "trainer", "rollout"),
    [
        ({"parallelism": {"device": "cpu"}, "rollout": {"engine": {"device": "cpu"}}}, (0, False), (0, False)),
        ({"parallelism": {"device": "cuda:1"}, "rollout": {"engine": {"device": "cuda:0"}}}, (2, True), (1, True)),
        ({"parallelism": {"device": "cuda", "ranks": 4}}, (4, True), (0, True)),
        ({"resources": {"trainer": {"devices": 4}}}, (4, True), (0, True)),
        ({"resources": {"trainer": {"devices": 4}}, "parallelism": {"nodes": 2}}, (4, True), (0, True)),
        ({"parallelism": {"device": "cuda", "ranks": 4, "nodes": 2}}, (2, True), (0, True)),
        ({"parallelism": {"offload": {"optimiser": True}}}, (1, True), (0, True)),
        (
            {"rollout": {"engine": {"kind": "vllm", "device": "cuda", "options": {"tensor_parallel_size": 2}}}},
            (0, True),
            (2, True),
        ),
        ({"resources": {"rollouts": {"devices": 1}}}, (0, True), (1, True)),
        ({"rollout": {"engine": {**SGLANG, "options": {"--tp-size": 2, "pp": 2}}}}, (0, True), (4, True)),
        ({"rollout": {"engine": SGLANG}, "resources": {"rollouts": {"devices": 2}}}, (0, True), (2, True)),
        ({"rollout": {"engine": {"kind": "sglang", "url": "http://127.0.0.1:3"}}}, (0, True), (0, False)),
        ({"resources": {"sharing": "time"}}, (0, True), (0, True)),
        ({"resources": {"sharing": "time"}, "rollout": {"engine": {"kind": "vllm"}}}, (0, True), (1, True)),
    ],
)
def test_devices_follow_from_what_computes(
    sections: dict[str, Any], trainer: tuple[int, bool], rollout: tuple[int, bool]
) -> None:
    spec = a_spec(**sections)

    assert trainer_need(spec) == DeviceNeed(*trainer)
    assert rollout_need(spec) == DeviceNeed(*rollout)
    assert validate_spec(spec.model_dump(mode="json")) == spec


def test_ranks_that_are_not_said_are_the_devices_of_the_trainer() -> None:
    assert a_spec(resources={"trainer": {"devices": 4}}).parallelism.ranks == 4
    assert a_spec(resources={"trainer": {"devices": 4}}, parallelism={"ranks": 4}).parallelism.ranks == 4
    assert a_spec(resources={"trainer": {"devices": 4}}, parallelism={"nodes": 2}).parallelism.ranks == 8


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        (
            {"resources": {"trainer": {"devices": 2}}, "parallelism": {"ranks": 4}},
            "resources.trainer.devices",
            "parallelism.ranks 4 differ",
        ),
        (
            {"resources": {"trainer": {"devices": 1}}, "parallelism": {"device": "cpu"}},
            "resources.trainer.devices",
            "no effect while parallelism.device is cpu",
        ),
        (
            {"resources": {"trainer": {"devices": 1}}, "parallelism": {"device": "cuda:3"}},
            "resources.trainer.devices",
            "parallelism.device cuda:3 names one",
        ),
        ({"resources": {"rollouts": {"devices": 2}}}, "resources.rollouts.devices", "torch computes on one device"),
        ({"resources": {"rollouts": {"devices": 0}}}, "resources.rollouts.devices", "greater than or equal to 1"),
        (
            {"rollout": {"engine": {**SGLANG, "options": {"tp": 4}}}, "resources": {"rollouts": {"devices": 2}}},
            "resources.rollouts.devices",
            "divide the model among 4",
        ),
        (
            {
                "rollout": {"engine": {"kind": "sglang", "url": "http://127.0.0.1:3"}},
                "resources": {"rollouts": {"devices": 2}},
            },
            "resources.rollouts.devices",
            "whose server runs already",
        ),
    ],
)
def test_devices_that_do_not_fit_or_have_no_effect_are_refused(sections: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        a_spec(**sections)

    assert {str(entry["path"]).removesuffix(".constrained-int") for entry in error.value.errors} == {path}
    assert words in error.value.detail


@pytest.mark.parametrize(
    ("sections", "trainer", "rollouts", "expected"),
    [
        ({}, CPU, [CPU], ("cpu", "cpu", "float32")),
        ({}, GPU, [GPU, TWO], ("cuda:0", "cuda:0", "bfloat16")),
        ({}, GPU, [GPU, CPU], ("cuda:0", "cpu", "float32")),
        ({}, DeviceFacts(2), [DeviceFacts(1)], ("cpu", "cpu", "float32")),
        ({"parallelism": {"ranks": 2}}, GPU, [GPU], ("cpu", "cuda:0", "float32")),
        ({"parallelism": {"ranks": 2}}, TWO, [GPU], ("cuda", "cuda:0", "bfloat16")),
        ({"model": {"path": "m", "dtype": "float32"}}, GPU, [GPU], ("cuda:0", "cuda:0", "float32")),
        ({"asynchrony": {"publication": {"wire_dtype": "bfloat16"}}}, GPU, [GPU], ("cuda:0", "cuda:0", "float32")),
        ({"parallelism": {"device": "cpu"}}, GPU, [GPU], ("cpu", "cuda:0", "float32")),
        ({"resources": {"trainer": {"devices": 1}}}, CPU, [CPU], ("cuda:0", "cpu", "float32")),
        ({"rollout": {"engine": {"kind": "sglang"}}}, GPU, [DeviceFacts(1)], ("cuda:0", "cuda:0", "bfloat16")),
        (
            {"rollout": {"engine": {"kind": "sglang", "options": {"tp_size": 2}}}},
            GPU,
            [GPU],
            ("cuda:0", "cpu", "float32"),
        ),
    ],
)
def test_auto_is_cuda_and_bfloat16_where_those_that_compute_have_it(
    sections: dict[str, Any], trainer: DeviceFacts, rollouts: list[DeviceFacts], expected: tuple[str, str, str]
) -> None:
    spec = a_spec(**sections)

    decided = with_changes(spec, decide(spec, trainers=[trainer], rollouts=rollouts))

    assert (decided.parallelism.device, decided.rollout.engine.device, decided.model.dtype) == expected
    assert decide(decided, trainers=[CPU], rollouts=[CPU]) == {}


def test_a_run_goes_on_with_what_was_decided_when_it_began() -> None:
    spec = a_spec()
    recorded = with_changes(spec, decide(spec, trainers=[GPU], rollouts=[GPU]))

    check_same(recorded, spec)
    with pytest.raises(Conflict, match=r"parallelism\.device was 'cuda:0', is 'cpu'"):
        check_same(recorded, a_spec(parallelism={"device": "cpu"}))


def test_devices_stay_as_they_are_while_quotas_change() -> None:
    spec = a_spec(resources={"trainer": {"devices": 2}})

    assert changed_live(spec, {"resources": {"trainer": {"devices": 2}, "rollouts": {"max": 3}}}).parallelism.ranks == 2
    with pytest.raises(InvalidSpec, match=r"resources\.rollouts\.devices: auto cannot be changed"):
        changed_live(spec, {"resources": {"rollouts": {"devices": 1}}})
