"""verl's learning-rate schedules, weight decay, devices and names that two releases have for one thing."""

from typing import Any

import pytest

from flotilla.importers.build import Imported, build
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read
from tests.unit.importers.sources import BASES, import_flat

ACTOR = "actor_rollout_ref.actor"
OPTIM = f"{ACTOR}.optim"
TWO_UPDATES = {"data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 128}


def imported(values: dict[str, Any]) -> Imported:
    found = import_flat("verl", {**BASES["verl"], **values})
    assert found.may_run(), found.report.render()
    return found


def optimisation(values: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = imported(values).document["optimisation"]
    return section


def verdict(found: Imported, name: str) -> Verdict:
    return next(each.verdict for each in found.report.entries if each.name == name)


def test_wsd_and_where_a_fall_ends_are_counted_in_updates() -> None:
    found = optimisation({**TWO_UPDATES, f"{OPTIM}.lr": 1e-5, f"{OPTIM}.lr_decay_style": "WSD",
                          f"{OPTIM}.lr_decay_steps": 8, f"{OPTIM}.lr_wsd_decay_steps": 3, f"{OPTIM}.min_lr": 1e-6,
                          f"{OPTIM}.lr_wsd_decay_style": "cosine", f"{OPTIM}.lr_warmup_steps": 2,
                          f"{OPTIM}.lr_warmup_init": 2e-6})  # fmt: skip

    assert found["schedule"] == "wsd"
    assert (found["decay_updates"], found["wsd_decay_updates"], found["wsd_decay"]) == (16, 6, "cosine")
    assert (found["warmup_updates"], found["warmup_start_ratio"]) == (4, pytest.approx(0.2))


def test_the_end_of_a_fall_has_no_effect_on_a_constant_rate() -> None:
    name = f"{OPTIM}.lr_decay_steps"
    found = imported({name: 51_200})

    assert "decay_updates" not in found.document["optimisation"]
    assert verdict(found, name) is Verdict.IGNORED


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, True), ({f"{ACTOR}.strategy": "fsdp2"}, True), ({f"{ACTOR}.strategy": "megatron"}, None),
     ({"model_engine": "megatron"}, None),
     ({f"{OPTIM}.weight_decay": 0.0}, None)],
)  # fmt: skip
def test_fsdp_decays_all_parameters_and_megatron_leaves_biases_and_norms_out(
    values: dict[str, Any], expected: bool | None
) -> None:
    assert optimisation(values).get("decay_all") == expected


def test_the_file_of_megatron_says_what_trains() -> None:
    text = "python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml data.seed=1\n"
    found = build(SYSTEMS["verl"], read("verl", text, (), {}, source="run.sh"), rows=1000)

    assert "decay_all" not in found.document["optimisation"]


def test_npus_are_unsupported_and_their_number_is_taken_for_gpus() -> None:
    found = imported({"trainer.device": "npu", "trainer.n_gpus_per_node": 8})

    assert verdict(found, "trainer.device") is Verdict.UNSUPPORTED
    assert found.document["resources"]["trainer"]["devices"] == 8
    assert found.document["resources"]["sharing"] == "time"
    assert "device" not in found.document.get("parallelism", {})


def test_code_beside_a_model_is_not_run_and_the_model_is_read_all_the_same() -> None:
    found = imported({"actor_rollout_ref.model.trust_remote_code": True, "data.trust_remote_code": True})

    assert verdict(found, "data.trust_remote_code") is Verdict.UNSUPPORTED


def test_a_name_of_another_release_that_is_empty_leaves_the_one_that_is_not() -> None:
    for first in (True, False):
        pairs = [(f"{OPTIM}.warmup_style", None), (f"{OPTIM}.lr_scheduler_type", "cosine")]
        found = optimisation(dict(pairs if first else reversed(pairs)))
        assert found["schedule"] == "cosine"
    assert optimisation({f"{OPTIM}.warmup_style": None})["schedule"] == "constant"


def test_classes_that_sections_are_read_into_may_differ() -> None:
    found = imported({"algorithm._target_": "verl.trainer.config.AlgoConfig", "critic._target_": "verl.CriticConfig"})

    assert verdict(found, "critic._target_") is Verdict.IGNORED
