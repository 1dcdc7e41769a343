"""A random vision-language model learns what only the pictures tell, through the whole fleet."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from tests.e2e.records import check_summary, metrics_of
from tests.e2e.test_run import Run
from tests.vision_models import COLOURS, save_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(590)]

GROUPS = 8
SPEC = """
name: colours
model: {path: model}
data:
  path: train.parquet
  format: verl
  images: {max_pixels: 1024}
rollout:
  group_size: 16
  sampling: {max_new_tokens: 1}
  engine: {kind: torch, slots: 128, context_tokens: 128}
reward: {components: [{kind: exact}]}
optimisation: {steps: 60, groups_per_mini_batch: 8, learning_rate: 3.0e-3}
asynchrony: {on_weight_update: interrupt, staleness_threshold: 1.0}
evaluation: {path: held.parquet, every_versions: 30}
"""
EXACT = 1e-4
"""Nats between what engine and trainer compute in float32."""


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Draw noisy squares of one colour, of several sizes, as geometry3k has its figures in verl's shape."""
    generator = np.random.default_rng(seed)
    found: list[dict[str, object]] = []
    for number in range(count):
        colour = str(generator.choice(list(COLOURS)))
        width, height = (int(each) * 8 for each in generator.integers(2, 5, 2))
        noisy = np.array(COLOURS[colour]) + generator.normal(0, 12, (height, width, 3))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "PNG")
        found.append(
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": "<image> which colour is this ?"}],
                "images": [{"bytes": file.getvalue(), "path": None}],
                "ability": "sight",
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"split": "train", "index": number},
            }
        )
    return found


def a_spec(directory: Path, **model: Any) -> dict[str, Any]:
    """Write a random model and rows with pictures, and give a spec that uses them."""
    parquet.write_table(pa.Table.from_pylist(rows(400, 0)), directory / "train.parquet")
    parquet.write_table(pa.Table.from_pylist(rows(64, 1)), directory / "held.parquet")
    save_vision_model(directory / "model", **model)
    spec: dict[str, Any] = yaml.safe_load(SPEC)
    return spec


def check_seen(run: Run, spec: dict[str, Any]) -> dict[str, Any]:
    """Check what a run that has ended told of itself, and that its engine saw the pictures as its trainer did."""
    directory = run.runs / spec["name"]
    summary = check_summary(directory, steps=spec["optimisation"]["steps"], groups=GROUPS)
    gaps = [
        gap for name, found in metrics_of(directory).items() if name.startswith("engine_gap/") for gap in found.values()
    ]
    assert gaps and max(gaps) < EXACT, gaps
    return summary


def learned(spec: dict[str, Any], directory: Path) -> Run:
    """Run a spec to its end; it learns."""
    run = Run(spec, directory, directory / "runs")
    assert run.wait(480) == 0, run.said()
    assert "template_mismatch" not in run.said()
    summary = check_seen(run, spec)
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] > 0.8, json.dumps(summary)
    return run


def test_a_model_learns_to_see(tmp_path: Path) -> None:
    learned(a_spec(tmp_path, hidden=64), tmp_path)


def test_a_critic_values_what_a_policy_sees(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, hidden=64)
    spec["algorithm"] = {"advantage": {"kind": "gae"}, "value_loss": {"learning_rate": 3.0e-3}}
    spec["optimisation"]["steps"] = 30
    run = Run(spec, tmp_path, tmp_path / "runs")

    assert run.wait(480) == 0, run.said()

    check_seen(run, spec)
    metrics = metrics_of(run.runs / spec["name"])
    losses = [loss for _, loss in sorted(metrics["loss/value"].items())]
    assert len(losses) == spec["optimisation"]["steps"]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2, losses


GALLERY = f'''
import io

from PIL import Image

COLOURS = {COLOURS}


class Gallery:
    """Two pictures, turn by turn; the second one's colour is asked for."""

    def reset(self, seed):
        self.left = [list(COLOURS)[seed // 4**turn % 4] for turn in range(2)]
        return self.show("first"), {{}}

    def step(self, text):
        if self.left:
            return self.show("second"), 0.0, False, False, {{}}
        return "", float(text.strip() == self.colour), True, False, {{}}

    def show(self, name):
        self.colour, file = self.left.pop(0), io.BytesIO()
        Image.new("RGB", (16, 24), COLOURS[self.colour]).save(file, "PNG")
        return [{{"type": "image", "image": file.getvalue()}}, {{"type": "text", "text": f" {{name}} ?"}}]
'''


def test_a_model_learns_what_an_environment_shows_in_a_later_turn(tmp_path: Path) -> None:
    (tmp_path / "gallery.py").write_text(GALLERY)
    spec = a_spec(tmp_path, hidden=64)
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "is this"}\n' * 400)
    spec["data"] = {"path": "train.jsonl", "images": spec["data"]["images"]}
    spec["optimisation"]["steps"] = 40
    spec["evaluation"] |= {"path": "held.jsonl", "max_rows": 64}
    spec["rollout"]["episodes"] = {
        "kind": "environment",
        "environments": [{"environment": "gallery.py:Gallery"}],
        "max_turns": 2,
    }
    spec["reward"]["components"] = [{"kind": "environment"}]

    run = learned(spec, tmp_path)

    metrics = metrics_of(run.runs / "colours")
    assert max(metrics["fully_async/partial/total_partial_num"].values()) > 0, "no episode was interrupted"
    [first, *_] = sorted(run.runs.rglob("samples/step-*.parquet"))
    kept = parquet.read_table(first, columns=["shown_images"]).column(0).to_pylist()
    assert {len(json.loads(each)) for each in kept} == {2}
