"""``exactness: bitwise``: engine and trainer say the same of every sampled token, to the last bit."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pyarrow import parquet

from tests.fleet import make_experiment, running_fleet, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FIGURES = ("exactness/difference", "exactness/unequal_fraction", "ratio/mean", "ratio/approx_kl", "grad_norm")


def exact_experiment(directory: Path, steps: int) -> dict[str, Any]:
    spec = make_experiment(
        directory,
        exactness="bitwise",
        rollout={"sampling": {"max_new_tokens": 24, "temperature": 0.9}},
        asynchrony={"staleness_threshold": 0},
        optimisation={"steps": steps, "groups_per_mini_batch": 4, "learning_rate": 1e-3},
        checkpoint={"every_steps": 100},
    )
    del spec["asynchrony"]["on_weight_update"]
    return spec


def run(directory: Path, spec: dict[str, Any]) -> tuple[dict[str, list[float]], Path]:
    """Train to the end; gives series by name and the experiment's directory."""
    with running_fleet(directory / "fleet") as fleet:
        headers = {"Authorization": f"Bearer {fleet.token}"}
        with httpx.Client(base_url=fleet.url, headers=headers, timeout=60) as client:
            view = client.post("/v1/experiments", json=spec, params={"start": "true"}).raise_for_status().json()
            path = f"/v1/experiments/{view['id']}"

            def ended() -> Any:
                found = client.get(path).json()
                return found if found["state"] in {"completed", "failed", "stopped"} else None

            view = until(ended, 500, "the end of the experiment")
            assert view["state"] == "completed", view["problem"]
            names = ",".join(FIGURES)
            series: dict[str, list[float]] = {name: [] for name in FIGURES}
            params: dict[str, Any] = {"names": names, "limit": 1000}
            for point in client.get(f"{path}/metrics", params=params).json()["items"]:
                series[point["name"]].append(point["value"])
            return series, Path(view["directory"])


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.long)])
def test_every_trained_token_has_the_engines_bits_and_an_on_policy_ratio_of_exactly_one(
    tmp_path: Path, steps: int
) -> None:
    series, directory = run(tmp_path, exact_experiment(tmp_path, steps))

    assert series["exactness/difference"] == [0.0] * steps
    assert series["exactness/unequal_fraction"] == [0.0] * steps
    assert series["ratio/mean"] == [1.0] * steps
    assert series["ratio/approx_kl"] == [0.0] * steps
    assert len(series["grad_norm"]) == steps and min(series["grad_norm"]) > 0, "the weights change with each step"
    compared = 0
    for file in sorted((directory / "samples").glob("step-*.parquet")):
        for row in parquet.read_table(file, columns=["loss_mask", "log_probs", "trained_log_probs"]).to_pylist():
            sampled = np.array(row["loss_mask"], bool)
            reported = np.array(row["log_probs"], np.float32)[sampled]
            trained = np.array(row["trained_log_probs"], np.float32)[sampled]
            if not np.isnan(trained).any():
                assert reported.tobytes() == trained.tobytes()
                compared += reported.size
    assert compared > 100 * steps
