"""Each benchmark in its smallest form: it runs, and the figures that it writes are there and can be true."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoints, engine, gpu, scale, streams, trainer, weights

Main = Callable[[], int | None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a benchmark's command line, and give the JSON that it wrote."""

    def call(main: Main, *options: str) -> Any:
        report = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *options, "--json", str(report)])
        threads = torch.get_num_threads()
        try:
            main()
        finally:
            torch.set_num_threads(threads)
        return json.loads(report.read_text())

    return call


def test_streams(run: Callable[..., Any]) -> None:
    found = run(streams.main, "--seconds", "0.02", "--rounds", "1")

    assert found["server"]
    assert set(found["results"]) == set(streams.CASES)
    for result in found["results"].values():
        rates = [result[f"{way}_per_second"] for way in ("raw", "unacknowledged", "whole", "graded")]
        assert min(rates) > 1
        for name, rate in (("whole_to_raw", rates[2]), ("graded_to_raw", rates[3])):
            rounding = 0.05 * (1 + rate / rates[0]) / rates[0]  # of rates to tenths: much, of what is slow
            assert result[name] == pytest.approx(rate / rates[0], rel=0.01, abs=rounding)


def test_trainer(run: Callable[..., Any]) -> None:
    few = ("--model", "tiny", "--samples", "8", "--tokens", "4", "--rounds", "1")

    (row,) = run(trainer.main, "--part", "long_tailed", "--beside", "plain", *few)

    assert (row["part"], row["rounds"], row["trl"], row["earlier"]) == ("long_tailed", 1, None, None)
    assert min(row["flotilla"], row["plain"]) > 1


def test_engine(run: Callable[..., Any]) -> None:
    rows = []
    while len(rows) < 4 and not any(0 < row["engine"] < row["roofline"] for row in rows):
        rows += run(engine.main, "--concurrency", "1", "--rounds", "1")  # again if something else slowed one of the two

    assert rows[-1]["concurrency"] == 1
    assert 0 < rows[-1]["engine"] < rows[-1]["roofline"], "nothing is faster than its matrix products alone"


def test_scale(run: Callable[..., Any]) -> None:
    found = run(scale.main, "--quick", "--services", "10", "--tasks", "100", "--seconds", "0.5")

    (result,) = found["results"]
    assert (result["services"], result["lost_leases"]) == (10, 0)
    assert result["tasks_outstanding"] >= 100
    assert 0 < result["change_p50_seconds"] <= result["change_p99_seconds"] < scale.PATIENCE_SECONDS
    assert set(found["growth"].values()) <= {1.0, None}
    assert result["publication_cpu_seconds"] > 0 and 0 < result["publication_seconds"] < scale.PATIENCE_SECONDS
    assert len(found["start_seconds"]) == 2 and min(found["start_seconds"].values()) > 0


@pytest.mark.long
def test_checkpoints(run: Callable[..., Any]) -> None:
    found = run(checkpoints.main, "--model", "tiny", "--rounds", "1", "--threads", "1")

    assert found["checkpoint_bytes"] > 1 << 20
    assert min(found[name] for name in ("pause_at_once", "pause_copied", "written", "step", "step_beside")) > 0
    assert found["pause_ratio"] == pytest.approx(found["pause_at_once"] / found["pause_copied"])


@pytest.mark.long
def test_weights(run: Callable[..., Any]) -> None:
    rows = run(weights.main, "--mebibytes", "2", "--receivers", "1")

    by_name = {row["transport"]: row for row in rows}
    assert set(by_name) == {"shared_memory", "memcpy", "raw gloo", "gloo", "pull"}
    assert by_name["memcpy"]["ratio"] == 1, "it is what others are compared with"
    for row in rows:
        assert row["image_bytes"] >= 2 << 20
        assert 0 < row["median"] <= row["best"]
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]


ONE_FLEET = ("engine", "training", "update", "fleet")
NO_FLEET = ("decoding", "adapters", "proof", "throughput", "halving", "tinker")
VARIANTS = ("images", "compiled", "asynchronous")
THE_REST = tuple(part for part in gpu.MODULES if part not in (*ONE_FLEET, *NO_FLEET, *VARIANTS))


@pytest.mark.long
@pytest.mark.timeout(600)  # a compiler takes minutes of a busy machine
@pytest.mark.parametrize(
    "parts",
    [ONE_FLEET, NO_FLEET, *((part,) for part in VARIANTS), THE_REST],
    ids=["one fleet", "no fleet", *VARIANTS, "the rest"],
)
def test_gpu_rehearsal(run: Callable[..., Any], parts: tuple[str, ...]) -> None:
    found = run(gpu.main, "--cpu-rehearsal", *(word for part in parts for word in ("--part", part)))

    assert set(found) == set(parts)
    failed = {name: part for name, part in found.items() if gpu.has_failed(part)}
    assert not failed, json.dumps(failed, indent=1)
    if "fleet" in parts:
        assert found["engine"]["tiny, 8 samples"]["engine_tokens_per_second"] > 1
        assert found["fleet"]["fleet"]["ledger"]["trained"] > 0
    elif "proof" in parts:
        assert found["adapters"]["served"]["mean_difference_from_the_base"] > 0.01
        assert found["throughput"]["tiny, uniform, times as fast"] > 0
        assert "differ" in found["proof"]["engine.read flip"]["found"]
    elif "images" in parts:
        assert found["images"]["qwen3_vl, engine beside trainer"]["correction/probability_difference"] < 1e-5
    elif "compiled" in parts:
        assert found["compiled"]["compiled"]["compiler"]["stats"]["unique_graphs"] == 1
    elif "sharing" in parts:
        assert found["sharing"]["largest_difference_of_a_loss"] <= 1e-5
        assert found["lora"]["checkpoint_megabytes"] > 0
