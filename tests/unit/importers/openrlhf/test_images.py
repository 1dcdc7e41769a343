"""OpenRLHF's images: its GPUs are ranks, which may divide layers or sequences as without."""

import pytest

from tests.unit.importers.sources import BASES, import_flat

PICTURED = {
    "--data.max_images_per_prompt": 2,
    "--data.image_key": "images",
    "--pretrain": "Qwen/Qwen2.5-VL-7B-Instruct",
    "--actor_num_gpus_per_node": 8,
    "--advantage_estimator": "group_norm",
}


@pytest.mark.parametrize(("flag", "sizes"), [("--ds_tensor_parallel_size", (2, 1)), ("--ring_attn_size", (1, 2))])
def test_gpus_are_ranks_with_images_and_divide_what_is_asked_for(flag: str, sizes: tuple[int, int]) -> None:
    made = import_flat("openrlhf", {**BASES["openrlhf"], **PICTURED, flag: 2})

    assert made.spec is not None, made.report.problems
    assert made.spec.resources.trainer.devices == 8
    assert (made.spec.parallelism.tensor_parallel, made.spec.parallelism.sequence_parallel) == sizes
