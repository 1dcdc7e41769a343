"""Rows of one batch that compute with adapters of their own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flotilla.services.rollout.engines.decoders.adapted import RowAdapters
from flotilla.services.rollout.engines.decoders.fused import FusedDecoder
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.adapters import names_of
from tests.unit.engine.test_kernels import an_architecture

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler")
CPU, SCALE = torch.device("cpu"), 1.7
PROMPT = np.array([3, 7, 11, 5, 2], dtype=np.int64)
SIZES = an_architecture(has_qkv_bias=True, has_qk_norm=True)


@pytest.fixture(autouse=True)
def drawn_alike() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def base_of(directory: Path) -> Path:
    """Save random weights of every name that the model has."""
    sizes, tensors = SIZES, dict[str, Tensor]()
    for name, (outputs, depth) in shapes().items():
        tensors[name] = torch.randn(outputs, depth) * 0.1
    keys = sizes.num_kv_heads * sizes.head_dim
    for number in range(sizes.num_layers):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.rand(sizes.hidden_size) + 0.5
        for norm in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{norm}.weight"] = torch.rand(sizes.head_dim) + 0.5
        for part, width in (("q", sizes.num_heads * sizes.head_dim), ("k", keys), ("v", keys)):
            tensors[f"{layer}.self_attn.{part}_proj.bias"] = torch.randn(width) * 0.1
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(sizes.vocab_size, sizes.hidden_size) * 0.1
    tensors["model.norm.weight"] = torch.rand(sizes.hidden_size) + 0.5
    file = directory / "base.safetensors"
    save_file(tensors, file)
    return file


def shapes() -> dict[str, tuple[int, int]]:
    """List the weights that can be adapted."""
    sizes, found = SIZES, dict[str, tuple[int, int]]()
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    for number in range(sizes.num_layers):
        layer = f"model.layers.{number}"
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (width, sizes.hidden_size)
        found[f"{layer}.self_attn.o_proj.weight"] = (sizes.hidden_size, queries)
        for name in ("gate", "up"):
            found[f"{layer}.mlp.{name}_proj.weight"] = (sizes.intermediate_size, sizes.hidden_size)
        found[f"{layer}.mlp.down_proj.weight"] = (sizes.hidden_size, sizes.intermediate_size)
    return found


def adapter_of(directory: Path, rank: int, targets: str = "") -> Path:
    """Save an adapter of all weights whose name has ``targets``."""
    tensors = dict[str, Tensor]()
    for name, (outputs, depth) in shapes().items():
        if targets in name:
            low, high = names_of(name)
            tensors[low], tensors[high] = torch.randn(rank, depth) * 0.3, torch.randn(outputs, rank) * 0.3
    file = directory / f"adapter-{rank}-{targets}.safetensors"
    save_file(tensors, file)
    return file


def merged(base: Path, adapter: Path) -> Path:
    """Save the base with an adapter added."""
    tensors, added = load_file(base), load_file(adapter)
    for weight in shapes():
        low, high = names_of(weight)
        if low in added:
            tensors[weight] = tensors[weight] + SCALE * (added[high] @ added[low])
    file = adapter.with_suffix(".merged.safetensors")
    save_file(tensors, file)
    return file


def decoder_of(file: Path, num_rows: int = 6) -> FusedDecoder:
    return FusedDecoder(
        SIZES, [file], dtype=torch.float32, device=CPU, num_rows=num_rows, context_tokens=32, may_be_native=True
    )


def adapters_of(decoder: FusedDecoder) -> RowAdapters:
    found = decoder.row_adapters
    assert found is not None
    return found


def computed(decoder: FusedDecoder, rows: list[int], steps: int = 3) -> Tensor:
    """Compute the prompt in some rows, each by itself, and tokens behind it: [1 + steps, rows, V] log-probabilities."""
    found = [decoder.prefill([PROMPT] * len(rows), [[row] for row in rows])]
    lengths = torch.zeros(max(rows) + 1, dtype=torch.int64)
    lengths[rows] = PROMPT.size
    for step in range(steps):
        logits = decoder.decode(torch.full((len(lengths),), 4 + step), lengths, int(lengths.max()))
        found.append(logits[rows].clone())
        lengths[rows] += 1
    return torch.stack(found).log_softmax(-1)


KINDS = [(1, ""), (3, "self_attn"), (8, "mlp"), (5, "q_proj"), (16, "gate_proj")]


@pytest.mark.parametrize(("rank", "targets"), KINDS)
def test_a_row_with_an_adapter_computes_what_merged_weights_compute(rank: int, targets: str, tmp_path: Path) -> None:
    base, adapter = base_of(tmp_path), adapter_of(tmp_path, rank, targets)
    decoder = decoder_of(base)
    plain = computed(decoder, [2])

    adapters_of(decoder).put("a", adapter, SCALE)
    adapters_of(decoder).assign([2], "a")

    found = computed(decoder, [2])
    assert (found - plain).abs().max() > 1e-2
    torch.testing.assert_close(found, computed(decoder_of(merged(base, adapter)), [2]), atol=2e-5, rtol=0)


def test_rows_of_one_batch_have_the_bits_that_each_has_alone(tmp_path: Path) -> None:
    decoder = decoder_of(base_of(tmp_path))
    adapters = adapters_of(decoder)
    plain = computed(decoder, [0])
    for rank, targets in KINDS:
        adapters.put(f"{rank}", adapter_of(tmp_path, rank, targets), SCALE)
        adapters.assign([KINDS.index((rank, targets)) + 1], f"{rank}")

    together = computed(decoder, list(range(6)))

    assert torch.equal(together[:, :1], plain)
    for row in range(1, 6):
        assert torch.equal(together[:, row : row + 1], computed(decoder, [row]))


def test_rows_take_their_adapter_along_and_lose_it(tmp_path: Path) -> None:
    decoder = decoder_of(base_of(tmp_path))
    adapters = adapters_of(decoder)
    plain = computed(decoder, [0])
    adapters.put("a", adapter_of(tmp_path, 4), SCALE)
    adapters.assign([3], "a")
    adapted = computed(decoder, [3])

    decoder.move_rows([3], [1], PROMPT.size)
    assert torch.equal(computed(decoder, [1]), adapted)
    adapters.assign([3], None)
    assert torch.equal(computed(decoder, [3]), plain)

    adapters.put("a", adapter_of(tmp_path, 2), SCALE)
    assert not torch.equal(computed(decoder, [1]), adapted)
    adapters.drop("a")
    assert torch.equal(computed(decoder, [1]), plain)
    assert adapters.num_bytes == 0


def test_a_prompt_of_several_rows_is_computed_with_their_adapter(tmp_path: Path) -> None:
    decoder = decoder_of(base_of(tmp_path))
    adapters_of(decoder).put("a", adapter_of(tmp_path, 4), SCALE)
    adapters_of(decoder).assign([0, 1], "a")
    alone = computed(decoder, [0])

    decoder.prefill([PROMPT], [[0, 1]])
    lengths = torch.full((2,), PROMPT.size)
    logits = decoder.decode(torch.full((2,), 4), lengths, PROMPT.size).log_softmax(-1)

    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[:1], alone[1])


def test_what_is_no_adapter_of_the_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    decoder = decoder_of(base_of(tmp_path))
    adapters = adapters_of(decoder)
    adapters.put("a", adapter_of(tmp_path, 4), SCALE)
    adapters.assign([0], "a")
    before = computed(decoder, [0])
    first = next(iter(shapes()))
    low, high = names_of(first)
    outputs, depth = shapes()[first]
    wrong = {
        "no adapter": {"lm_head.weight": torch.ones(2, 2)},
        "no adapter of": {names_of("model.layers.9.mlp.up_proj.weight")[0]: torch.ones(2, 2)},
        "needs": {low: torch.ones(2, depth), high: torch.ones(outputs, 3)},
        r"\[\]": {low: torch.ones(2, depth)},
    }

    for words, tensors in wrong.items():
        save_file(tensors, tmp_path / "wrong.safetensors")
        with pytest.raises(WeightTransferFailed, match=words):
            adapters.put("a", tmp_path / "wrong.safetensors", SCALE)
    with pytest.raises(WeightTransferFailed, match="cannot be read"):
        adapters.put("a", tmp_path / "none.safetensors", SCALE)

    assert torch.equal(computed(decoder, [0]), before)
