"""The native kernels compute what torch's operators compute."""

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.fused import FusedDecoder
from flotilla.services.rollout.engines.decoders.fused_weights import PACKED_ELEMENTS, FusedWeights, Matrix
from flotilla.services.rollout.engines.decoders.native import kernels
from flotilla.services.rollout.engines.decoders.native.kernels import Kernels, kernels_for
from flotilla.services.rollout.engines.embedded.sampling import RowSampling, sample
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.models import native_code
from flotilla.shared.weights.image.digests import of_tensor, row_sums

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def native() -> Kernels:
    found = kernels_for(CPU, torch.float32)
    assert found is not None
    return found


@pytest.fixture(params=["native", "avx2"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Build the kernels for this processor, and as for one that has AVX2 alone."""
    if request.param == "avx2":
        if platform.machine() != "x86_64":
            pytest.skip("only x86-64 has AVX2")
        monkeypatch.setattr(native_code, "FLAGS", (*native_code.FLAGS, "-mno-avx512f"))
    for cached in (native_code.load_library, kernels._kernels):
        cached.cache_clear()
    yield request.param
    for cached in (native_code.load_library, kernels._kernels):
        cached.cache_clear()


def an_architecture(**changes: Any) -> Architecture:
    """Describe a model whose sizes are no multiples of anything."""
    numbers: dict[str, Any] = {"vocab_size": 83, "hidden_size": 40, "intermediate_size": 52, "num_layers": 2}
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 12, "max_positions": 64}
    others = {"rope_theta": 1e4, "norm_epsilon": 1e-6}
    has = dict.fromkeys(("has_qkv_bias", "has_qk_norm", "is_tied"), False)
    return Architecture(**{**numbers, **heads, **others, **has, **changes})


def decoders_of(
    sizes: Architecture, directory: Path, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
) -> list[FusedDecoder]:
    """Make two decoders of the same random weights, of types of their own: native kernels, and torch's operators."""
    width, queries, keys = sizes.hidden_size, sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    tensors = {"model.embed_tokens.weight": torch.randn(sizes.vocab_size, width) * 0.1}
    tensors["model.norm.weight"] = torch.rand(width) + 0.5
    if not sizes.is_tied:
        tensors["lm_head.weight"] = torch.randn(sizes.vocab_size, width) * 0.1
    for number in range(sizes.num_layers):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.rand(width) + 0.5
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = torch.randn(outputs, width) * 0.2
            if sizes.has_qkv_bias:
                tensors[f"{layer}.self_attn.{name}_proj.bias"] = torch.randn(outputs)
            if sizes.has_qk_norm and name != "v":
                tensors[f"{layer}.self_attn.{name}_norm.weight"] = torch.rand(sizes.head_dim) + 0.5
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.randn(width, queries) * 0.2
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = torch.randn(sizes.intermediate_size, width) * 0.4
        tensors[f"{layer}.mlp.down_proj.weight"] = torch.randn(width, sizes.intermediate_size) * 0.2
    if torch.bfloat16 in dtypes:
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    places: dict[str, Any] = {"device": CPU, "num_rows": 16, "context_tokens": 64}
    files = [directory / "model.safetensors"]
    return [
        FusedDecoder(sizes, files, dtype=dtype, may_be_native=may_be_native, **places)
        for dtype, may_be_native in zip(dtypes, (True, False), strict=True)
    ]


def places_of(weight: torch.Tensor) -> torch.Tensor:
    """Tell where the rows of a weight lie."""
    return weight.data_ptr() + torch.arange(weight.shape[0]) * weight.stride(0) * weight.itemsize


def addresses_of(decoder: FusedDecoder) -> list[int]:
    """Tell where the weights of a decoder lie, but for what oneDNN has packed."""
    weights: FusedWeights = decoder._weights
    matrices = [weights.layers[0].down, weights.layers[1].gate_up, weights.head]
    packed = [getattr(matrix, "native", matrix.plain) for matrix in matrices]
    return [each.data_ptr() for each in (weights.embedding, weights.final_norm, *packed) if each is not None]


def a_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """Make a matrix that was read, and is not packed yet."""
    matrix = Matrix((weight.shape[0], weight.shape[1]), torch.float32, CPU, has_bias=bias is not None)
    matrix.open().copy_(weight)
    if matrix.bias is not None and bias is not None:
        matrix.bias.copy_(bias)
    return matrix


def sequences_of(sizes: Architecture, *lengths: int) -> list[npt.NDArray[np.int64]]:
    return [torch.randint(sizes.vocab_size, (length,)).numpy() for length in lengths]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4},
    "norms, tied": {"has_qk_norm": True, "is_tied": True, "head_dim": 16},
    "bias": {"has_qkv_bias": True, "head_dim": 24},
    "wide": {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "vocab_size": 128, "has_qk_norm": True},
    "widest heads": {"num_heads": 2, "head_dim": 128, "num_layers": 1},
}


@needs_compiler
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_torch(variant: str, tmp_path: Path) -> None:
    sizes = an_architecture(**VARIANTS[variant])
    pair = decoders_of(sizes, tmp_path)
    prompts, rows = sequences_of(sizes, 1, 17, 5), [[0, 3], [1], [2, 4, 6]]
    lengths = torch.tensor([1, 17, 5, 1, 5, 0, 5])
    tokens = torch.randint(sizes.vocab_size, (20, 7))

    native, plain = ([decoder.prefill(prompts, rows)] for decoder in pair)
    for step in range(20):
        for decoder, logits in zip(pair, (native, plain), strict=True):
            lengths_now = lengths + step * (lengths > 0)
            logits.append(decoder.decode(tokens[step], lengths_now, int(lengths_now.max()))[lengths > 0].clone())

    assert [decoder.description for decoder in pair] == ["fused forward, native kernels", "fused forward"]
    for one, other in zip(native, plain, strict=True):
        torch.testing.assert_close(one.log_softmax(-1), other.log_softmax(-1), atol=1e-5, rtol=0)


@needs_compiler
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_bfloat16_compute_what_the_same_numbers_of_float32_do(variant: str, tmp_path: Path) -> None:
    sizes = an_architecture(**VARIANTS[variant])
    halves, plain = decoders_of(sizes, tmp_path, (torch.bfloat16, torch.float32))
    floats = FusedDecoder(
        *(sizes, [tmp_path / "model.safetensors"]),
        dtype=torch.float32,
        device=CPU,
        num_rows=16,
        context_tokens=64,
        may_be_native=True,
    )
    sequences, rows = sequences_of(sizes, 1, 17, 5), [[0, 3], [1], [2, 4, 6]]
    lengths, tokens = torch.tensor([1, 17, 5, 1, 5, 0, 5]), torch.randint(sizes.vocab_size, (7,))

    found = [[each.prefill(sequences, rows), each.decode(tokens, lengths, 17)] for each in (halves, floats, plain)]

    assert halves.description == floats.description == "fused forward, native kernels"
    assert all(torch.equal(*pair) for pair in zip(*found[:2], strict=True))
    torch.testing.assert_close(found[0][0].log_softmax(-1), found[2][0].log_softmax(-1), atol=1e-5, rtol=0)
    assert dict(halves.digests()) == {
        name: of_tensor(tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert halves._weights.layers[0].down.native.dtype == torch.bfloat16


@needs_compiler
@pytest.mark.usefixtures("build")
def test_a_token_is_computed_alike_in_any_company(tmp_path: Path) -> None:
    sizes = an_architecture(has_qk_norm=True, head_dim=16)
    native, _ = decoders_of(sizes, tmp_path)
    [sequence] = sequences_of(sizes, 40)
    [whole] = native.prefill([sequence], [[0]])

    for company in range(13):
        others = sequences_of(sizes, *range(1, company + 1))
        rows = [[row] for row in range(1, company + 1)]
        native.prefill([*others, sequence[:20]], [*rows, [0]])
        for length in range(20, 40):
            lengths = torch.cat([torch.tensor([length]), torch.ones(company, dtype=torch.int64)])
            tokens = torch.full((company + 1,), int(sequence[length]))
            logits = native.decode(tokens, lengths, length)
        assert torch.equal(logits[0], whole)


@needs_compiler
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("heads", [(10, 5, 64), (32, 4, 20)])
def test_the_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path, heads: tuple[int, int, int]) -> None:
    """Large enough for products and attention to be divided among threads."""
    wide = {"hidden_size": 256, "intermediate_size": 4100, "vocab_size": 4200, "num_layers": 2}
    num_heads, num_kv_heads, head_dim = heads
    about = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes = an_architecture(**wide, **about, has_qk_norm=True)
    native, _ = decoders_of(sizes, tmp_path)
    prompts, tokens = sequences_of(sizes, *[59] * 16), torch.randint(sizes.vocab_size, (4, 16))
    found = []
    assert native.gains_by_threads

    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        logits = [native.prefill(prompts, [[row] for row in range(16)])]
        logits += [native.decode(tokens[step], torch.full((16,), 59 + step), 59 + step).clone() for step in range(4)]
        found.append(torch.cat(logits))

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_compiler
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_take_the_memory_of_discarded_ones(
    tmp_path: Path, is_native: bool, is_tied: bool, dtype: torch.dtype
) -> None:
    sizes = an_architecture(is_tied=is_tied, hidden_size=64, vocab_size=4096)
    initial, other = tmp_path / "initial", tmp_path / "other"
    initial.mkdir()
    other.mkdir()
    decoder, expected = (decoders_of(sizes, each, (dtype, dtype))[not is_native] for each in (initial, other))
    sequences, rows = sequences_of(sizes, 5), [[0]]
    before, memory = decoder.prefill(sequences, rows), addresses_of(decoder)

    decoder.discard()
    decoder.stage(other / "model.safetensors")
    decoder.switch()
    kept = addresses_of(decoder)
    logits = decoder.prefill(sequences, rows)
    decoder.discard()
    decoder.restore()

    assert kept == memory == addresses_of(decoder)
    assert torch.equal(logits, expected.prefill(sequences, rows))
    assert torch.equal(decoder.prefill(sequences, rows), before)
    decoder.stage(other / "model.safetensors")
    decoder.switch()
    assert addresses_of(decoder) != memory
    assert torch.equal(decoder.prefill(sequences, rows), logits)


@needs_compiler
@pytest.mark.parametrize("is_native", [True, False])
def test_two_copies_take_turns_and_no_more_memory(tmp_path: Path, is_native: bool) -> None:
    sizes = an_architecture(hidden_size=64, vocab_size=4096)
    images = [tmp_path / name for name in ("initial", "other", "third")]
    for each in images:
        each.mkdir()
    decoder, *expected = (decoders_of(sizes, each)[0 if is_native else 1] for each in images)
    sequences, rows = sequences_of(sizes, 5), [[0]]
    memory = [addresses_of(decoder)]
    (tmp_path / "damaged").write_bytes(b"no header")

    for image, other in zip(images[1:], expected, strict=True):
        decoder.stage(image / "model.safetensors")
        with pytest.raises(WeightTransferFailed):
            decoder.stage(tmp_path / "damaged")  # What was staged is no longer, and its memory is not lost.
        decoder.stage(image / "model.safetensors")
        decoder.switch()
        memory.append(addresses_of(decoder))
        assert torch.equal(decoder.prefill(sequences, rows), other.prefill(sequences, rows))

    assert memory[2] == memory[0] != memory[1]
    decoder.release()
    decoder.restore()
    assert decoder._unused is None


@needs_compiler
def test_a_small_model_gains_nothing_by_threads(tmp_path: Path) -> None:
    assert [decoder.gains_by_threads for decoder in decoders_of(an_architecture(), tmp_path)] == [False, False]


@needs_compiler
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("shape", [(2, 1), (84, 40), (256, 130)])
def test_a_packed_weight_holds_every_element_once(native: Kernels, shape: tuple[int, int], is_gated: bool) -> None:
    weight = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)

    packed = native.pack(places_of(weight), shape[1], is_gated=is_gated)

    assert torch.equal(packed[packed != 0].sort().values, weight.flatten())


@needs_compiler
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_weight_is_packed_over_an_earlier_one_from_rows_that_lie_anywhere(native: Kernels, is_gated: bool) -> None:
    weight, order = torch.randn(84, 40), torch.randperm(84)
    expected = native.pack(places_of(weight), 40, is_gated=is_gated)
    earlier = native.pack(places_of(torch.randn(84, 40)), 40, is_gated=is_gated)
    scattered = weight[order]

    packed = native.pack(places_of(scattered)[order.argsort()], 40, is_gated=is_gated, into=earlier)

    assert packed is earlier
    assert torch.equal(packed, expected)


@needs_compiler
@pytest.mark.parametrize("size", [1, 3, 64, 65, 428])
@pytest.mark.parametrize("has_temperatures", [True, False])
def test_the_same_draw_samples_the_same_token(
    native: Kernels, size: int, has_temperatures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, draws = torch.randn(300, size) * 4, torch.rand(300, dtype=torch.float64)
    logits[torch.rand(300, size) < 0.2] = -torch.inf
    logits[:, 0], draws[0], draws[1] = 0, 0, 1 - 2.0**-52
    how = RowSampling(temperatures=torch.rand(300) + 0.5 if has_temperatures else None)
    tokens, log_probs = sample(logits, draws, how)
    monkeypatch.setattr(kernels, "_kernels", lambda: None)

    expected_tokens, expected_log_probs = sample(logits, draws, how)

    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, atol=2e-6, rtol=1e-6)
    assert torch.isfinite(logits.gather(1, tokens.unsqueeze(1))).all()


@needs_compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_of_no_numbers_shows(native: Kernels, bad: float) -> None:
    logits = torch.zeros(2, 70)
    logits[1, 33] = bad

    tokens, log_probs = native.sample(logits, torch.full((2,), 0.5, dtype=torch.float64), None)

    assert log_probs[0].isfinite() and not log_probs[1].isfinite()
    assert tokens[1] < 70


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [8, PACKED_ELEMENTS // 256])
def test_a_packed_matrix_multiplies_as_a_plain_one(width: int, has_bias: bool) -> None:
    weight, bias = torch.randn(256, width), torch.randn(256) if has_bias else None
    matrix, hidden, total = a_matrix(weight, bias), torch.randn(5, width), torch.randn(5, 256)
    expected = functional.linear(hidden, weight, bias)
    expected_total = total + expected

    matrix.pack()
    matrix.add_to(total, hidden)

    assert (matrix.plain is None) == (weight.numel() >= PACKED_ELEMENTS)
    torch.testing.assert_close(matrix(hidden), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(total, expected_total, atol=1e-4, rtol=1e-4)


@needs_compiler
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("outputs", "depth"), [(64, 16), (50, 7), (6, 33), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight_have_the_sums_that_they_have_elsewhere(
    dtype: torch.dtype, outputs: int, depth: int, is_gated: bool
) -> None:
    native = kernels_for(CPU, dtype)
    assert native is not None
    weight = torch.randn(outputs, depth).to(dtype)
    packed = native.pack(places_of(weight), depth, dtype, is_gated=is_gated)

    assert np.array_equal(native.row_sums(packed, (outputs, depth), is_gated=is_gated), row_sums(weight))
