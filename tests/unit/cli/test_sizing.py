"""What an experiment will take is told before anything starts, and what cannot fit is refused."""

from pathlib import Path

import pytest

from flotilla.shared.errors import InvalidSpec
from flotilla.sizing import batch_lines, size_up
from tests.unit.sizes.test_sizes import PARAMETERS, a_model, a_spec


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
    lines = size_up(a_spec(model={"path": str(a_model(tmp_path))})).lines(10**8)

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
