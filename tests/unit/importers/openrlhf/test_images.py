"""OpenRLHF's images: its GPUs are ranks, each of which computes other sequences."""

import pytest

from tests.unit.importers.sources import BASES, import_flat

PICTURED = {
    "--data.max_images_per_prompt": 2,
    "--data.image_key": "images",
    "--pretrain": "Qwen/Qwen2.5-VL-7B-Instruct",
    "--actor_num_gpus_per_node": 8,
    "--advantage_estimator": "group_norm",
}


@pytest.mark.parametrize("flag", ["--ds_tensor_parallel_size", "--ring_attn_size"])
def test_gpus_are_ranks_with_images_and_what_divides_rows_is_unsupported(flag: str) -> None:
    made = import_flat("openrlhf", {**BASES["openrlhf"], **PICTURED, flag: 2})

    assert made.spec is not None, made.report.problems
    assert made.spec.resources.trainer.devices == 8
    assert (made.spec.parallelism.tensor_parallel, made.spec.parallelism.sequence_parallel) == (1, 1)
    assert "other sequences" in {entry.name: entry.detail for entry in made.report.unsupported}[flag]
