"""What SGLang is handed instead of weights: handles, in words that it allows, of memory that holds them."""

import base64
import pickle
import pickletools
from pathlib import Path

import pytest
import torch

from flotilla.services.rollout.engines.sglang.buckets import BucketProcess
from flotilla.services.rollout.engines.sglang.handles import pieces_of
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.layout import read_layout
from flotilla.shared.weights.image.tensors import open_image
from tests.contract.engine.models import save_model

ALLOWED = {
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "uint8"),
    ("torch", "float32"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("types", "SimpleNamespace"),
}
"""Names that SGLang 0.5.23 lets a payload use (``SafeUnpickler``)."""


async def test_each_rank_gets_a_handle_that_holds_no_weights_of_memory_that_holds_them(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    image = tmp_path / "model.safetensors"
    expected = open_image(image)
    found: dict[str, torch.Tensor] = {}
    buckets = BucketProcess("cpu", 120.0, bucket_bytes=20_000)
    try:
        pieces = pieces_of(tmp_path, buckets.bucket_bytes)
        for _, span in pieces:
            for handle in await buckets.hold(image, span, num_ranks=2):
                content = base64.b64decode(handle)
                assert names_in(content) <= ALLOWED
                assert len(content) < 4_000
                bucket = pickle.loads(content)
                for place in bucket["metadata"]:
                    piece = bucket["flattened_tensor"][place.start_idx : place.end_idx]
                    found[place.name] = piece.view(place.dtype).reshape(place.shape).clone()
        with pytest.raises(WeightTransferFailed, match=r"cannot be held for SGLang: .*No such file"):
            await buckets.hold(image.with_name("gone"), range(1), num_ranks=1)
    finally:
        await buckets.close()

    assert len(pieces) > 2
    assert [each.name for each in read_layout(image).tensors] == list(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def names_in(content: bytes) -> set[tuple[str, str]]:
    """Find the names that unpickling would look up, without doing it."""
    found, strings, memo = set(), [], []
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "MEMOIZE":
            memo.append(strings[-1] if strings else "")
        elif operation.name.endswith("BINGET"):
            strings.append(memo[int(argument or 0)])
        elif operation.name == "STACK_GLOBAL":
            found.add((strings[-2], strings[-1]))
        elif operation.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            found.add((module, name))
        elif isinstance(argument, str):
            strings.append(argument)
    return found
