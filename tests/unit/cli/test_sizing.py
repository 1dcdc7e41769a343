"""What an experiment will take is told before anything starts, and what cannot fit is refused."""

from pathlib import Path

import pytest
from pytest import MonkeyPatch

from flotilla import sizing as module
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.service import GpuDevice
from flotilla.shared.service import devices
from flotilla.sizing import batch_lines, size_up
from tests.unit.sizes.test_trainer import PARAMETERS, a_model, a_spec


def test_each_process_and_the_batches_have_a_line(tmp_path: Path) -> None:
    sizing = size_up(a_spec(model={"path": str(a_model(tmp_path))}), rollouts=2)
    lines = sizing.lines(8 * 10**9)

    assert lines[0].startswith("memory     trainer, at most ") and "x 4 bytes)" in lines[0]
    assert lines[1].startswith("memory     2 x rollout's engine, at most ")
    assert any(line.endswith("of 8.00 GB that are available here") for line in lines)
    assert lines[-3:] == [
        "batch      4 prompts x 4 = 16 samples a step, 1 optimiser update of 16 samples",
        "batch      a sample has at most 16 + 48 tokens, a step 1024; an update at most 4 passes, of 256 tokens "
        "(4 samples of the largest length)",
        "batch      5 steps: 5 updates, 80 samples, at most 5120 tokens",
    ]
    assert "x 4 bytes" not in sizing.lines(8 * 10**9, is_brief=True)[0]


def test_the_same_is_told_to_programs(tmp_path: Path) -> None:
    trainer, engine, others = size_up(a_spec(model={"path": str(a_model(tmp_path))})).facts()

    assert (trainer["process"], trainer["count"], trainer["device"]) == ("trainer", 1, "cpu")
    parts = trainer["parts"]
    assert isinstance(parts, dict) and parts["weights"] == 4 * PARAMETERS
    assert engine["process"] == "rollout's engine" and others["process"] == "other services"


def test_what_cannot_fit_on_this_machine_is_refused(tmp_path: Path) -> None:
    sizing = size_up(a_spec(model={"path": str(a_model(tmp_path))}))

    sizing.check(4 * 10**9)
    with pytest.raises(InvalidSpec, match="this machine has 100 MB: trainer, at least"):
        sizing.check(10**8)


def test_what_may_not_fit_with_the_longest_samples_is_told(tmp_path: Path) -> None:
    sizing = size_up(a_spec(model={"path": str(a_model(tmp_path))}))
    lines = sizing.lines(sum(each.host_bytes * count for each, count in sizing.processes) - 1)

    assert any("too much. What would help: " in line for line in lines)


def test_a_model_that_is_not_here_is_not_predicted() -> None:
    sizing = size_up(a_spec())

    assert [line for line in sizing.lines(10**9) if line.startswith("memory")] == [
        f"memory     not predicted: {sizing.unknown}"
    ]
    sizing.check(1)


def test_servers_say_what_they_take_themselves(tmp_path: Path) -> None:
    served = {"engine": {"kind": "sglang", "context_tokens": 128}}
    lines = size_up(a_spec(model={"path": str(a_model(tmp_path))}, rollout=served)).lines(10**10)

    assert "memory     not predicted: sglang takes what rollout.engine.options say" in lines


def test_an_evaluation_trains_no_batches() -> None:
    spec = a_spec()
    ranks = spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update={"ranks": 2})})

    assert "on each of 2 ranks" in "".join(batch_lines(ranks))


def test_what_run_would_refuse_is_told_with_its_reason_and_not_that_of_long_samples(tmp_path: Path) -> None:
    sizing = size_up(a_spec(model={"path": str(a_model(tmp_path))}))
    lines, brief = sizing.lines(10**8), sizing.lines(10**8, is_brief=True)

    assert any(line.startswith("memory     `flotilla run` here would refuse: at least ") for line in lines)
    assert not any("with samples of the largest length it would be" in line for line in [*lines, *brief])
    assert not any("would refuse" in line for line in brief), "run raises it"


@pytest.fixture
def gpus(monkeypatch: MonkeyPatch) -> None:
    """Let this machine have GPUs that torch uses."""
    found = (GpuDevice(index=0, uuid="GPU-0", memory_bytes=10**11),)
    for place in (module, devices):
        monkeypatch.setattr(place, "machine_devices", lambda: found)
    monkeypatch.setattr(devices, "torch_uses_cuda", lambda: True)
    for name in (devices.VISIBLE, devices.DEVICES):
        monkeypatch.delenv(name, raising=False)


def on_auto(model: Path) -> ExperimentSpec:
    rollout = {"engine": {"context_tokens": 128, "device": "auto"}}
    return a_spec(model={"path": str(model), "dtype": "auto"}, parallelism={"device": "auto"}, rollout=rollout)


@pytest.mark.usefixtures("gpus")
def test_auto_is_sized_as_this_machines_gpus_and_refuses_nothing(tmp_path: Path) -> None:
    sizing = size_up(on_auto(a_model(tmp_path)))
    trainer = sizing.processes[0][0]
    weights = next(part.num_bytes for part in trainer.parts if part.name == "weights")

    assert (trainer.device, weights) == ("cuda", 2 * PARAMETERS)
    sizing.check(1)
    assert "auto is taken to be cuda here" in "".join(sizing.lines(1))


def test_auto_is_a_cpu_where_there_is_nothing_else(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for place in (module, devices):
        monkeypatch.setattr(place, "machine_devices", lambda: ())
    monkeypatch.delenv(devices.DEVICES, raising=False)
    sizing = size_up(on_auto(a_model(tmp_path)))

    assert sizing.processes[0][0].device == "cpu"
    with pytest.raises(InvalidSpec):
        sizing.check(10**8)


def test_images_are_counted_once_for_all_ranks(tmp_path: Path) -> None:
    model = {"path": str(a_model(tmp_path))}
    leader, others, *_ = size_up(a_spec(model=model, parallelism={"ranks": 4, "device": "cpu"})).facts()

    assert (leader["count"], others["count"]) == (1, 3)
    assert isinstance(leader["parts"], dict) and isinstance(others["parts"], dict)
    assert leader["parts"]["images to publish"] == 8 * PARAMETERS
    assert "images to publish" not in others["parts"]
    assert {**leader["parts"], "images to publish": 0} == {**others["parts"], "images to publish": 0}


def test_teachers_are_counted_where_they_are_here(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    model = {"path": str(a_model(tmp_path / "student"))}

    def parts(path: Path) -> tuple[dict[str, int], str]:
        spec = a_spec(model=model, algorithm={"distillation": {"path": str(path), "dtype": "bfloat16"}})
        found = size_up(spec)
        return {part.name: part.num_bytes for part in found.processes[0][0].parts}, found.unknown

    (tmp_path / "teacher").mkdir()
    assert parts(a_model(tmp_path / "teacher")) == ({**parts(tmp_path / "none")[0], "teacher": 2 * PARAMETERS}, "")
    assert "algorithm.distillation.path, which is not here" in parts(tmp_path / "none")[1]


def a_finished(job: dict[str, object]) -> ExperimentSpec:
    written = {"name": "job", "model": {"path": "nowhere"}, "job": job, "data": {"path": "rows.jsonl"}}
    return validate_spec(written | {"optimisation": {"steps": 5, "groups_per_mini_batch": 4}})


def test_rows_with_finished_answers_have_lengths_of_their_own() -> None:
    bounded = batch_lines(a_finished({"kind": "sft", "max_tokens": 100}))
    pairs = batch_lines(a_finished({"kind": "preference"}))

    assert bounded[0] == "batch      4 rows x 1 = 4 samples a step, 1 optimiser update of 4 samples"
    assert bounded[1].startswith("batch      a sample has at most 100 tokens, a step 400; ")
    assert pairs[0].startswith("batch      4 rows x 2 = 8 samples a step")
    assert pairs[1].startswith("batch      a sample has any number of tokens (job.max_tokens is unbounded); ")
    assert pairs[2].endswith("40 samples")
