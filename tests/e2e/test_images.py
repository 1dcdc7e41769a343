"""A random vision-language model learns what only the pictures tell, through the whole fleet."""

import io
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.e2e.records import check_summary
from tests.fleet import FLOTILLA
from tests.vision_models import COLOURS, save_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(590)]

STEPS = 60
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


def test_a_model_learns_to_see(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(rows(400, 0)), tmp_path / "train.parquet")
    parquet.write_table(pa.Table.from_pylist(rows(64, 1)), tmp_path / "held.parquet")
    save_vision_model(tmp_path / "model", hidden=64)
    (tmp_path / "spec.yaml").write_text(SPEC)

    result = subprocess.run(
        [*FLOTILLA, "run", "spec.yaml", "--plain", "--runs", "runs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=480,
        env={**os.environ, "FLOTILLA_REDIS_URL": ""},
    )

    assert result.returncode == 0, result.stdout + result.stderr
    summary = check_summary(tmp_path / "runs" / "colours", steps=STEPS, groups=8)
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] > 0.8, json.dumps(summary)
    assert "template_mismatch" not in result.stdout
