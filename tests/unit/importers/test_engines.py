"""Whoever brings a launch file that names an engine is told how to get it, in overrides that work as they stand."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build, look_up
from flotilla.importers.engines import OF_A_SERVER, RESCORED_NOTE
from flotilla.importers.systems import SYSTEMS
from tests.unit.importers.sources import BASES, import_flat, nested

ROLLOUT = "actor_rollout_ref.rollout"
INFER = "actor_infer.strategy_args"


def engine_of(found: Imported) -> tuple[Any, Any, Any]:
    assert found.spec is not None, found.report.problems
    spec = found.spec.model_dump(mode="json")
    paths = ("rollout.engine.kind", "rollout.engine.options", "resources.rollouts.devices")
    kind, options, devices = (look_up(spec, path) for path in paths)
    return kind, options, devices


@pytest.mark.parametrize(
    ("system", "named", "expected"),
    [
        (
            "verl",
            {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 2,
             f"{ROLLOUT}.gpu_memory_utilization": 0.6},
            ("sglang", {"tp_size": 2, "mem_fraction_static": 0.6}, 2),
        ),
        (
            "verl",
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": "4"},
            ("vllm", {"tensor_parallel_size": 4}, 4),
        ),
        ("verl", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 1}, ("vllm", {}, "auto")),
        (
            "openrlhf",
            {"--vllm_num_engines": 4, "--vllm_tensor_parallel_size": 2, "--vllm_gpu_memory_utilization": 0.5},
            ("vllm", {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}, 2),
        ),
        (
            "roll",
            {f"{INFER}.strategy_name": "sglang", f"{INFER}.strategy_config.mem_fraction_static": 0.7,
             "actor_infer.num_gpus_per_worker": 2},
            ("sglang", {"tp_size": 2, "mem_fraction_static": 0.7}, 2),
        ),
    ],
)  # fmt: skip
def test_the_overrides_that_are_suggested_give_the_engine_that_is_named(
    system: str, named: Mapping[str, Any], expected: tuple[Any, Any, Any]
) -> None:
    plain = import_flat(system, {**BASES[system], **named})
    told, command = plain.report.suggestion
    overrides = [word for word in shlex.split(command) if word != "--set"]

    found = import_flat(system, {**BASES[system], **named}, settings=overrides)

    assert f"the file names {expected[0]}" in told
    assert plain.report.render().splitlines()[2:4] == [told, command]
    assert engine_of(plain)[0] == "torch"
    assert engine_of(found) == expected
    assert found.report.suggestion == []
    assert OF_A_SERVER in {entry.detail for entry in found.report.unsupported}


BYPASS = "algorithm.rollout_correction.bypass_mode"
CUT = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.top_k": 20, f"{ROLLOUT}.temperature": 0.7}


def test_a_cut_at_a_temperature_has_the_engine_that_is_named_since_the_trainer_computes_the_ratio() -> None:
    overrides = ["rollout.engine.kind=vllm"]

    found = import_flat("verl", {**BASES["verl"], **CUT}, settings=overrides)

    assert found.spec is not None
    assert found.spec.rollout.records_the_cut and found.spec.algorithm.old_log_probs == "recompute"
    roll = import_flat("roll", {**BASES["roll"], f"{INFER}.strategy_name": "vllm"}, settings=overrides)
    assert roll.spec is not None and roll.spec.rollout.records_the_cut  # by ROLL's silent top-k of 50


def test_a_file_that_takes_the_records_of_a_cut_for_the_policys_has_them_computed_again_in_step() -> None:
    named = {**BASES["verl"], **CUT, BYPASS: True}

    plain = import_flat("verl", named)
    told, command = plain.report.suggestion
    overrides = [word for word in shlex.split(command) if word != "--set"]
    asked, kept = (import_flat("verl", named, settings=each) for each in (overrides, ["rollout.engine.kind=vllm"]))

    assert plain.spec is not None and plain.spec.algorithm.old_log_probs == "rollout", "the embedded engine has them"
    assert "algorithm.old_log_probs=recompute" in overrides and told.startswith("the file names vllm; for it in")
    for found in (asked, kept):
        assert found.spec is not None and found.spec.rollout.records_the_cut
        assert found.spec.algorithm.old_log_probs == "recompute"
    assert kept.report.suggestion == [RESCORED_NOTE] and kept.report.render().splitlines()[2] == RESCORED_NOTE
    uncut = {name: value for name, value in named.items() if not name.endswith("top_k")}
    of_all = import_flat("verl", uncut, settings=["rollout.engine.kind=vllm"])
    assert of_all.spec is not None and of_all.spec.algorithm.old_log_probs == "rollout"


def test_whoever_asks_for_the_records_of_a_cut_is_refused() -> None:
    settings = ["rollout.engine.kind=vllm", "algorithm.old_log_probs=rollout"]

    found = import_flat("verl", {**BASES["verl"], **CUT, BYPASS: True}, settings=settings)

    assert found.spec is None and "rollout.sampling.temperature" in found.report.problems[0]


AHEAD = ["asynchrony={staleness_threshold: 1.0}"]
"""Samples of an older version: what the trainer computes is no longer what the engine would have recorded."""


def test_an_engine_that_the_spec_cannot_have_is_named_with_the_reason() -> None:
    named = {**CUT, BYPASS: True}

    (line,) = import_flat("verl", {**BASES["verl"], **named}, settings=AHEAD).report.suggestion

    assert line.startswith("the file names vllm, with which this spec cannot sample: ")
    assert "rollout.sampling.temperature" in line


@pytest.mark.parametrize("name", ["hf", "trtllm"])
def test_of_an_engine_that_is_not_known_here_nothing_is_suggested(name: str) -> None:
    assert import_flat("verl", {**BASES["verl"], f"{ROLLOUT}.name": name}).report.suggestion == []
    assert build(SYSTEMS["verl"], []).report.suggestion == []


def written(path: Path, *options: str) -> dict[str, Any]:
    path.write_text(yaml.safe_dump(nested({**BASES["verl"], f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.n": 4})))
    output = path.parent / "spec.yaml"
    assert main(["import", "verl", str(path), "--output", str(output), "--force", *options]) == 0
    found: dict[str, Any] = yaml.safe_load(output.read_text())["rollout"].get("engine", {})
    return found


def test_the_named_engine_samples_where_it_is_installed_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "launch.yaml"
    monkeypatch.delenv("FLOTILLA_VLLM_PYTHON", raising=False)

    assert "kind" not in written(path)
    assert written(path, "--engine", "vllm")["kind"] == "vllm"
    assert written(path, "--engine", "sglang")["kind"] == "sglang"

    monkeypatch.setenv("FLOTILLA_VLLM_PYTHON", "/opt/vllm/bin/python")
    assert written(path)["kind"] == "vllm"
    assert "kind" not in written(path, "--engine", "embedded")


def test_an_installed_engine_that_cannot_sample_what_is_asked_leaves_the_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = tmp_path / "launch.yaml", tmp_path / "spec.yaml"
    named = {**CUT, f"{ROLLOUT}.n": 4, BYPASS: True}
    path.write_text(yaml.safe_dump(nested({**BASES["verl"], **named})))
    monkeypatch.setenv("FLOTILLA_VLLM_PYTHON", "/opt/vllm/bin/python")
    command = ["import", "verl", str(path), "--output", str(output), "--set", *AHEAD]

    assert main([*command, "--engine", "vllm"]) == 1
    assert main(command) == 0
    assert "kind" not in yaml.safe_load(output.read_text())["rollout"].get("engine", {})
